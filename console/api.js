// Requests to the control plane that serves this page, with the session's cookie; paths are relative,
// so that a proxy may put a prefix before them.
import { useEffect, useState } from "./lib.js";

let csrf = "";
let onEnd = () => {};
export const whenSessionEnds = (tell) => {
  onEnd = tell;
};

export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `status ${status}`);
    this.status = status;
    this.code = body.code || "";
  }
}

async function answer(response) {
  if (response.status === 204) return null;
  const body = await response.json().catch(() => ({}));
  if (response.ok) return body;
  if (response.status === 401) onEnd();
  throw new Problem(response.status, body);
}

export async function get(path, signal) {
  return answer(await fetch(path, { signal, cache: "no-store" }));
}

// A write is done once, however often it is sent: the key of this call goes with it.
export async function write(method, path, body, headers = {}) {
  const sent = { "x-csrf-token": csrf, "content-type": "application/json", ...headers };
  if (path.startsWith("v1/")) sent["idempotency-key"] = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  return answer(
    await fetch(path, { method, headers: sent, body: body === undefined ? undefined : JSON.stringify(body) }),
  );
}

export async function session() {
  const found = await get("session");
  csrf = found.csrf || "";
  return found;
}

export async function signIn(key, name) {
  const headers = { authorization: `Bearer ${key}` };
  const found = await write("POST", "session", name ? { name } : {}, headers);
  csrf = found.csrf;
  return found;
}

// A request to a gateway, with the key that its person gave for it; the answer may be a stream.
export const play = (dialect, key, body, signal) =>
  fetch(`data/play/${dialect}`, {
    method: "POST",
    headers: { "x-csrf-token": csrf, "x-sluice-key": key, "content-type": "application/json" },
    body,
    signal,
    cache: "no-store",
  });

export const url = (path, query) => {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const text = new URLSearchParams(kept).toString();
  return text ? `${path}?${text}` : path;
};

const NOTHING = { key: "", data: {}, problems: {}, isLoading: true };

// Fetches a few paths side by side: {name: path} -> {data, problems, isLoading, reload}. What fails is
// told where it belongs, and the rest of the page works. A hidden page waits until it is looked at.
export function useData(paths) {
  const [state, setState] = useState(NOTHING);
  const [round, setRound] = useState(0);
  const key = JSON.stringify(paths);
  useEffect(() => {
    const stop = new AbortController();
    const load = async () => {
      const data = {};
      const problems = {};
      await Promise.all(
        Object.entries(paths).map(async ([name, path]) => {
          try {
            data[name] = await get(path, stop.signal);
          } catch (problem) {
            problems[name] = problem;
          }
        }),
      );
      if (!stop.signal.aborted) setState({ key, data, problems, isLoading: false });
    };
    const look = () => {
      if (!document.hidden) {
        document.removeEventListener("visibilitychange", look);
        load();
      }
    };
    setState((old) => ({ ...old, isLoading: true }));
    if (document.hidden) document.addEventListener("visibilitychange", look);
    else load();
    return () => {
      stop.abort();
      document.removeEventListener("visibilitychange", look);
    };
  }, [key, round]);
  // A result that was fetched for another question is no answer to this one.
  return { ...(state.key === key ? state : NOTHING), reload: () => setRound((old) => old + 1) };
}

// The feed: each event is the whole state, so nothing is missed between two connections. A hidden page
// has none.
export function useLive() {
  const [state, setState] = useState({ data: null, isConnected: false, at: 0 });
  useEffect(() => {
    let source = null;
    const close = () => {
      source?.close();
      source = null;
    };
    const open = () => {
      if (document.hidden) {
        close();
        return;
      }
      if (source) return;
      source = new EventSource("data/live");
      source.addEventListener("state", (event) =>
        setState({ data: JSON.parse(event.data), isConnected: true, at: Date.now() }),
      );
      source.addEventListener("error", () => {
        setState((old) => ({ ...old, isConnected: false }));
        // Refused for good (a session that ended): the browser does not come back by itself.
        if (source?.readyState === EventSource.CLOSED) {
          close();
          session().then((found) => found.actor || onEnd());
        }
      });
    };
    open();
    document.addEventListener("visibilitychange", open);
    return () => {
      document.removeEventListener("visibilitychange", open);
      close();
    };
  }, []);
  return state;
}
