// The parts of pages. Texts of others go through the library as texts, never as markup.
import { html, useEffect, useRef, useState } from "./lib.js";
import { NONE, time } from "./format.js";
import { go, href } from "./route.js";

export const Link = ({ to, children }) =>
  to[1] === "" || to[1] === null ? html`<span>${children}</span>` : html`<a href=${href(...to)}>${children}</a>`;
export const When = ({ at }) => (at ? html`<time datetime=${at}>${time(at)}</time>` : NONE);
export const Badge = ({ tone = "plain", children }) => html`<span class="badge ${tone}">${children}</span>`;
export const Note = ({ tone = "bad", children }) =>
  html`<p class="note ${tone}" role=${tone === "bad" ? "alert" : "status"}>${children}</p>`;

export function Missing({ problems }) {
  const told = Object.entries(problems);
  if (!told.length) return null;
  return html`<${Note}>${told.map(([name, it]) => html`<span>${name}: ${it.message}. </span>`)}<//>`;
}

export const Title = ({ title, children, isLoading }) => html`<header class="title"><h1>${title}</h1>
  <span class="busy" role="status">${isLoading ? "loading…" : ""}</span><div class="actions">${children}</div>
    </header>`;

// Columns: [heading, row -> content, "number" for right-aligned].
export function Table({ name, columns, rows, empty = "There is nothing here yet.", more }) {
  if (!rows) return null;
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${name}><table><caption class="hidden">${name}
    </caption>
    <thead><tr>${columns.map(([heading, , kind]) => html`<th scope="col" class=${kind || ""}>${heading}</th>`)}</tr>
      </thead>
    <tbody>${rows.map((row) => html`<tr>${columns.map(([, cell, kind]) => html`<td class=${kind || ""}>${cell(row)}
      </td>`)}</tr>`)}</tbody>
  </table></div>${more ? html`<p class="more">${more}</p>` : null}`;
}

export const Facts = ({ facts }) =>
  html`<dl class="facts">${facts
    .filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

export const Card = ({ name, value, hint, tone = "" }) =>
  html`<div class="card ${tone}"><h2>${name}</h2><p class="value">${value}</p><p class="hint">${hint}</p></div>`;

// The path of a line, with gaps where a value is missing.
export function line(values, x, y) {
  let pen = "M";
  return values
    .map((value, at) => {
      if (value === null || value === undefined) {
        pen = "M";
        return "";
      }
      const step = `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
      return step;
    })
    .join("");
}

// A line over time, with its objective; the numbers are in the table beside it, too.
export function Chart({ name, points, objective, unit }) {
  const known = points.filter((it) => it !== null && it !== undefined);
  if (known.length < 2) return html`<p class="empty">${name}: too few points for a chart.</p>`;
  const top = Math.max(...known, objective || 0) * 1.1 || 1;
  const x = (at) => (at / (points.length - 1)) * 300;
  const y = (value) => 60 - (value / top) * 58;
  const highest = Math.max(...known);
  const label = `${name}: from ${known[0]} to ${known[known.length - 1]} ${unit}, at most ${highest} ${unit}`;
  return html`<figure class="chart"><figcaption>${name}${objective ? ` (objective ${objective} ${unit})` : ""}
    </figcaption>
    <svg viewBox="0 0 300 62" role="img" aria-label=${label} preserveAspectRatio="none">
    ${objective ? html`<line class="objective" x1="0" x2="300" y1=${y(objective)} y2=${y(objective)} />` : null}<path
      d=${line(points, x, y)} /></svg></figure>`;
}

export const Bar = ({ share, label }) =>
  html`<span class="bar" title=${label}><meter min="0" max="1" value=${Math.max(0, Math.min(1, share || 0))}
    aria-label=${label}></meter></span>`;

// A form whose fields are the query of the URL.
export function Filters({ page, id = "", query, fields }) {
  const submit = (event) => {
    event.preventDefault();
    const data = new FormData(event.target);
    go(page, id, { ...query, ...Object.fromEntries(data) });
  };
  return html`<form class="filters" onSubmit=${submit}>${fields.map(
    ([name, label, choices]) => html`<label key=${name}>${label}
    ${
      choices
        ? html`<select name=${name} value=${query[name] || ""} onChange=${(event) => event.target.form.requestSubmit()}>
      ${choices.map((it) => {
        const [value, text] = Array.isArray(it) ? it : [it, it || "any"];
        return html`<option value=${value} selected=${value === (query[name] || "")}>${text}</option>`;
      })}</select>`
        : html`<input name=${name} value=${query[name] || ""} autocomplete="off" spellcheck=${false} />`
    }</label>`,
  )}<button>Show</button></form>`;
}

export function Tabs({ page, id = "", query, name, choices, standard }) {
  const now = query[name] || standard;
  return html`<nav class="tabs" aria-label=${name}>${choices.map(([value, text]) => html`<a
    href=${href(page, id, { ...query, [name]: value })} aria-current=${value === now ? "page" : null}>${text}</a>`)}
    </nav>`;
}

// A button that first says what it will do, and to how much. `act` returns a promise.
export function Action({ label, title, says, act, done, tone = "", fields = [], confirm = "Do it" }) {
  const [isOpen, open] = useState(false);
  const [problem, tell] = useState("");
  const [isBusy, busy] = useState(false);
  const dialog = useRef(null);
  useEffect(() => {
    if (isOpen) dialog.current?.showModal();
  }, [isOpen]);
  const submit = async (event) => {
    event.preventDefault();
    busy(true);
    tell("");
    try {
      const values = Object.fromEntries(new FormData(event.target));
      const result = await act(values);
      open(false);
      done?.(result);
    } catch (error) {
      tell(error.message);
    }
    busy(false);
  };
  return html`<button class=${tone} onClick=${() => open(true)}>${label}</button>${
    isOpen
      ? html`<dialog ref=${dialog} onClose=${() => open(false)} aria-label=${title || label}>
    <form onSubmit=${submit}><h2>${title || label}</h2><p>${says}</p>
    ${fields.map(([name, text, given = "", kind = "text"]) => html`<label>${text}<input name=${name}
      type=${kind} defaultValue=${given} value=${given} autocomplete="off" /></label>`)}
    ${problem ? html`<${Note}>${problem}<//>` : null}
    <div class="actions"><button type="button" onClick=${() => dialog.current.close()}>Leave it</button><button
      class=${tone || "primary"} disabled=${isBusy}>${isBusy ? "…" : confirm}</button></div></form></dialog>`
      : null
  }`;
}

// A secret that is shown once.
export function Secret({ text, onClose }) {
  const dialog = useRef(null);
  useEffect(() => {
    dialog.current?.showModal();
  }, []);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-label="The new key"><h2>The new key</h2>
    <p>It is shown now and never again.</p><p><code class="secret">${text}</code></p>
    <div class="actions"><button onClick=${() => navigator.clipboard?.writeText(text)}>Copy</button><button
      class="primary" onClick=${() => dialog.current.close()}>I have it</button></div></dialog>`;
}
