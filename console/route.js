// All state of a page is in the URL, behind the #: a link, a reload or a second window shows the same.
import { useEffect, useState } from "./lib.js";

const KEY = /sk-sluice-[A-Za-z0-9_-]+/;

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const parts = path
    .split("/")
    .filter(Boolean)
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
  return {
    page: parts[0] || "overview",
    id: parts.slice(1).join("/"),
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

// Names may hold slashes: each part is encoded by itself.
export const encoded = (id) => id.split("/").map(encodeURIComponent).join("/");

export function href(page, id = "", query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const text = new URLSearchParams(kept).toString();
  return `#/${page}${id ? `/${encoded(id)}` : ""}${text ? `?${text}` : ""}`;
}

export const go = (...where) => {
  location.hash = href(...where);
};

// A key in a URL stays in histories and logs: it is taken away, and never used.
export function refuseKeyInUrl() {
  if (!KEY.test(decodeURIComponent(location.href.replace(/%(?![0-9a-f]{2})/gi, "")))) return false;
  history.replaceState(null, "", location.pathname);
  return true;
}

export function useRoute() {
  const [route, setRoute] = useState(parse(location.hash));
  useEffect(() => {
    const changed = () => setRoute(parse(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}
