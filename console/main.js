// The frame around all pages: sign-in, navigation, search.
import { html, render, useEffect, useRef, useState } from "./lib.js";
import { session, signIn, whenSessionEnds, write } from "./api.js";
import { go, href, refuseKeyInUrl, useRoute } from "./route.js";
import { Note } from "./ui.js";
import { PAGES } from "./pages/index.js";

const hadKey = refuseKeyInUrl();

// Why a provider's sign-in came back without a session.
const REFUSED = {
  denied: "The provider let nobody in.",
  away: "The provider does not answer: try again, or give an admin key.",
  wrong: "The provider's answer cannot be used: try again. The control plane's log says why.",
  unknown: "The provider knows you, and the settings give you no role here.",
};

// Where to come back to, if it is a place that the server takes.
const place = () => (/^#\/[A-Za-z0-9/._~%?&=:@+,-]{0,1000}$/.test(location.hash) ? location.hash : "");

function SignIn({ onDone, isEnded, hasProvider }) {
  const [problem, tell] = useState(
    hadKey ? "The URL held a key. It is in the history of this browser, and maybe in logs: rotate it."
      : REFUSED[useRoute().query.problem] || "",
  );
  const submit = async (event) => {
    event.preventDefault();
    const { key, name } = Object.fromEntries(new FormData(event.target));
    try {
      onDone(await signIn(key.trim(), name.trim()));
    } catch (error) {
      tell(error.message);
    }
  };
  return html`<main class="signin"><h1>Sluice</h1>${isEnded ? html`<${Note}
    tone="warn">Your session has ended.<//>` : null}
    ${hasProvider ? html`<p><a class="button" href=${`login?to=${encodeURIComponent(place())}`}>Sign in with your
      company's account</a></p>` : null}
    <form onSubmit=${submit}><label>Admin key<input name="key" type="password" required
      autocomplete="off" autofocus /></label>
    <label>Your name, for the audit log<input name="name" maxlength="64" autocomplete="name" /></label>
    ${problem ? html`<${Note}>${problem}<//>` : null}<button class="primary">Sign in</button></form></main>`;
}

// An id says itself what it is of; what does not is looked for among names.
function find(text) {
  const found = text.trim();
  const of = [
    ["rollout_", "rollouts"],
    ["quarantine_", "quality"],
    ["alert_", "alerts"],
    ["incident_", "incidents"],
    ["batch_", "batches"],
    ["req", "requests"],
    ["chatcmpl", "requests"],
    ["cmpl", "requests"],
    ["resp_", "requests"],
    ["msg_", "requests"],
    ["embd", "requests"],
  ].find(([prefix]) => found.startsWith(prefix));
  if (!found) return;
  if (of) go(of[1], found);
  else go("search", "", { q: found });
}

function Search() {
  const input = useRef(null);
  useEffect(() => {
    const key = (event) => {
      if (
        event.key !== "/" ||
        event.ctrlKey ||
        event.metaKey ||
        /^(input|textarea|select)$/i.test(event.target.tagName)
      )
        return;
      event.preventDefault();
      input.current?.focus();
    };
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  }, []);
  const submit = (event) => {
    event.preventDefault();
    find(input.current.value);
    input.current.value = "";
  };
  return html`<form role="search" onSubmit=${submit}><input ref=${input} type="search"
    aria-label="Find an id or a name" placeholder="Find an id or a name ( / )" spellcheck=${false} /></form>`;
}

function Shell({ me, onSignOut }) {
  const route = useRoute();
  const [isOpen, open] = useState(false);
  const shown = PAGES.filter((page) => page.roles.includes(me.role));
  const home = shown.find((page) => page.label)?.path;
  const page =
    shown.find((it) => it.path === route.page) ||
    (route.page === "overview" ? shown.find((it) => it.path === home) : null);
  useEffect(() => {
    document.title = `${route.id || page?.label || "Sluice"} · Sluice`;
    open(false);
    scrollTo(0, 0);
  }, [route.page, route.id]);
  return html`<div class="shell"><a class="skip" href="#content" onClick=${(event) => {
    event.preventDefault();
    document.getElementById("content").focus();
  }}>To the content</a>
    <div class="side ${isOpen ? "open" : ""}"><div class="brand"><img src="icon.svg" alt="" />Sluice<button
      class="menu" aria-expanded=${isOpen ? "true" : "false"} onClick=${() => open(!isOpen)}>Menu</button></div>
    <nav aria-label="Pages">${shown.filter((it) => it.label).map((it) => html`<a href=${href(it.path)}
      aria-current=${it === page ? "page" : null}>${it.label}</a>`)}</nav>
    <div class="me"><p>${me.name || me.actor}<br />${me.role}${me.tenant_id ? ` of ${me.tenant_id}` : ""}</p>
    <button onClick=${() => onSignOut("session")}>Sign out</button>${" "}
    <button onClick=${() => onSignOut("sessions")}>Everywhere</button></div></div>
    <div><div class="top"><${Search} /></div><main id="content" tabindex="-1">${
      page
        ? html`<${page.show} key=${route.page + route.id} id=${route.id} query=${route.query} me=${me} />`
        : html`<h1>Not here</h1><p>There is no page ${route.page}, or your role, ${me.role}, does not have it.</p>`
    }</main></div></div>`;
}

function App() {
  const [me, setMe] = useState(null);
  const [isEnded, end] = useState(false);
  useEffect(() => {
    whenSessionEnds(() => {
      setMe((old) => {
        if (old?.actor) end(true);
        return { actor: null };
      });
      session().then(setMe, () => {});
    });
    session().then(setMe, (error) => setMe({ actor: null, problem: error.message }));
    // Another tab may have signed out.
    const look = () => {
      if (!document.hidden)
        session().then(
          (found) =>
            setMe((old) => {
              if (old?.actor && !found.actor) end(true);
              return old?.actor === found.actor && old.role === found.role ? old : found;
            }),
          () => {},
        );
    };
    document.addEventListener("visibilitychange", look);
    return () => document.removeEventListener("visibilitychange", look);
  }, []);
  const signOut = async (which) => {
    await write("DELETE", which).catch(() => {});
    end(false);
    setMe({ actor: null });
    session().then(setMe, () => {});
  };
  if (!me) return html`<main class="signin"><h1>Sluice</h1><p role="status">loading…</p></main>`;
  if (!me.actor)
    return html`<${SignIn} isEnded=${isEnded} hasProvider=${me.has_provider} onDone=${(found) => {
      end(false);
      setMe(found);
    }} />`;
  return html`<${Shell} me=${me} onSignOut=${signOut} />`;
}

render(html`<${App} />`, document.getElementById("app"));
