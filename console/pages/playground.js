// A request to one model or two, in any dialect: the answer as it comes, its times, and the curl line.
import { html, useEffect, useRef, useState } from "../lib.js";
import { play, useData } from "../api.js";
import { asked, curl, DIALECTS, events, heard, nothing } from "../dialects.js";
import { count, ms, NONE } from "../format.js";
import { Facts, Link, Missing, Note, Tabs, Title } from "../ui.js";
import { href } from "../route.js";

const EVENTS_MAX = 500;
const TEMPLATE = `[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]`;

// One side's run: what was heard so far, and when.
async function run(dialect, model, key, form, signal, tell) {
  const begun = performance.now();
  let state = { ...nothing(), isRunning: true, events: [], begun, first: null, ended: null, request: "" };
  const show = (change) => tell((state = { ...state, ...change }));
  const hear = (event) => {
    const known = heard(state, dialect, event);
    const isFirst = state.first === null && (known.text || Object.keys(known.calls).length);
    show({ ...known, first: isFirst ? performance.now() : state.first,
      events: [...state.events, event].slice(-EVENTS_MAX) });
  };
  show({});
  try {
    const response = await play(DIALECTS[dialect].path, key, asked(dialect, model, form), signal);
    show({ request: response.headers.get("x-request-id") || "" });
    if (!response.ok) {
      const body = await response.json().catch(() => ({}));
      throw new Error(`${response.status}: ${body.error?.message || body.detail || body.title || "refused"}`);
    }
    if (!response.headers.get("content-type")?.startsWith("text/event-stream")) hear(await response.json());
    else await read(response.body, hear);
  } catch (error) {
    show({ problem: error.name === "AbortError" ? "stopped" : error.message });
  }
  show({ isRunning: false, ended: performance.now() });
}

async function read(body, hear) {
  const pieces = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let piece = await pieces.read(); !piece.done; piece = await pieces.read()) {
    rest += piece.value;
    const end = Math.max(rest.lastIndexOf("\n\n"), rest.lastIndexOf("\r\n\r\n"));
    if (end < 0) continue;
    events(rest.slice(0, end)).forEach(hear);
    rest = rest.slice(end).trimStart();
  }
  events(rest).forEach(hear);
}

function Answer({ name, model, state }) {
  const empty = html`<p class="empty">Nothing was asked yet.</p>`;
  if (!state) return html`<section aria-label=${name}><h2>${model}</h2>${empty}</section>`;
  const { begun, first, ended, usage } = state;
  const pace = usage?.[1] && ended && first && ended > first ? (1000 * usage[1]) / (ended - first) : null;
  return html`<section aria-label=${name}><h2>${model}</h2>
    ${state.problem ? html`<${Note}>${state.problem}<//>` : null}
    <pre class="answer" tabindex="0" aria-live="polite" aria-busy=${state.isRunning ? "true" : "false"}
      >${state.text || (state.isRunning ? "…" : "")}</pre>
    ${Object.values(state.calls).map((it) => html`<p>calls <code>${it.name}(${it.text})</code></p>`)}
    <${Facts} facts=${[
      ["first token", first === null ? NONE : ms(first - begun)],
      ["whole answer", ended === null ? "" : ms(ended - begun)],
      ["tokens", usage ? `${count(usage[0])} in, ${count(usage[1])} out` : NONE],
      ["tokens per second", pace === null ? "" : count(pace)],
      ["ended by", state.end],
      ["request", state.request && html`<${Link} to=${["requests", state.request]}>${state.request}<//>`],
    ]} /><details><summary>${count(state.events.length)} events</summary>
      <pre tabindex="0">${state.events.map((it) => JSON.stringify(it)).join("\n")}</pre></details></section>`;
}

const START = { system: "", prompt: "Hello!", most: "128", temperature: "", seed: "1", tools: "", stream: true };

export function Playground({ query }) {
  const { data, problems, isLoading } = useData({ models: "v1/models" });
  const dialect = query.dialect in DIALECTS ? query.dialect : "chat";
  const [form, setForm] = useState(START);
  const [sides, setSides] = useState([null, null]);
  const [problem, tell] = useState("");
  const key = useRef(null);
  const stop = useRef(null);
  useEffect(() => () => stop.current?.abort(), []);
  const models = [query.model || data.models?.data[0]?.id || "", query.other || ""].filter((it, at) => it || !at);
  const isRunning = sides.some((it) => it?.isRunning);
  const set = (name) => (event) => setForm({ ...form, [name]: event.target.value });
  const choose = (name) => (event) =>
    history.replaceState(null, "", href("playground", "", { ...query, [name]: event.target.value })) ||
    dispatchEvent(new HashChangeEvent("hashchange"));
  const submit = async (event) => {
    event.preventDefault();
    tell("");
    try { models.forEach((model) => asked(dialect, model, form)); } catch { return tell("Tools: this is no JSON."); }
    stop.current = new AbortController();
    setSides([null, null]);
    const show = (at) => (state) => setSides((old) => old.map((it, side) => (side === at ? state : it)));
    await Promise.all(models.map((model, at) =>
      run(dialect, model, key.current.value.trim(), form, stop.current.signal, show(at))));
  };
  let line = "";
  try { line = curl(dialect, models[0], form); } catch { line = "Tools: this is no JSON."; }
  return html`<${Title} title="Playground" isLoading=${isLoading} /><${Missing} problems=${problems} />
    <${Tabs} page="playground" query=${{ ...query, dialect }} name="dialect" standard="chat"
      choices=${Object.entries(DIALECTS).map(([name, it]) => [name, it.name])} />
    <form class="play" onSubmit=${submit}><datalist id="models">${
      data.models?.data.map((it) => html`<option value=${it.id}></option>`)}</datalist>
      <label>A tenant's key; it stays on this page, and is kept nowhere
        <input ref=${key} name="key" type="password" required autocomplete="off" /></label>
      <label>Model, or model@release
        <input name="model" list="models" required value=${models[0]} onChange=${choose("model")} /></label>
      <label>Beside it (empty: none)
        <input name="other" list="models" value=${query.other || ""} onChange=${choose("other")} /></label>
      ${dialect === "completions" ? null : html`<label class="wide">System
        <input name="system" value=${form.system} onInput=${set("system")} /></label>`}
      <label class="wide">Prompt<textarea name="prompt" required value=${form.prompt} onInput=${set("prompt")}
        ></textarea></label>
      <label>Tokens at most<input name="most" type="number" min="1" value=${form.most} onInput=${set("most")} /></label>
      <label>Temperature<input name="temperature" type="number" min="0" max="2" step="0.1" value=${form.temperature}
        onInput=${set("temperature")} /></label>
      ${dialect in { chat: 1, completions: 1 } ? html`<label>Seed<input name="seed" type="number" value=${form.seed}
        onInput=${set("seed")} /></label>` : null}
      ${dialect === "completions" ? null : html`<label class="wide">Tools, as this dialect has them, in JSON
        <textarea name="tools" class="code" placeholder=${dialect === "chat" ? TEMPLATE : ""} value=${form.tools}
          onInput=${set("tools")} spellcheck=${false}></textarea></label>`}
      <label class="check"><input name="stream" type="checkbox" checked=${form.stream}
        onChange=${(event) => setForm({ ...form, stream: event.target.checked })} /> as a stream</label>
      <div class="actions">
        <button type="button" disabled=${!isRunning} onClick=${() => stop.current?.abort()}>Stop</button>
        <button class="primary" disabled=${isRunning}>Ask</button></div></form>
    ${problem ? html`<${Note}>${problem}<//>` : null}
    <div class="split">${models.map((model, at) => html`<${Answer} name=${`Answer ${at + 1}`} model=${model}
      state=${sides[at]} />`)}</div>
    <h2>The same by curl</h2><pre class="curl" tabindex="0">${line}</pre>`;
}
