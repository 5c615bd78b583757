// A day of a scaled pool, minute by minute: replicas, demand and violated minutes.
import { html } from "../lib.js";
import { url, useData } from "../api.js";
import { count, NONE, time } from "../format.js";
import { Card, Filters, line, Missing, Note, Tabs, Title } from "../ui.js";
import { encoded } from "../route.js";

const WIDTH = 960;
const HEIGHT = 240;
const LINES = [
  ["demand", "Demand"],
  ["wanted", "Wanted"],
  ["ready", "Ready"],
  ["asleep", "Asleep"],
];
const MINUTE_MS = 60000;

export const Views = ({ id, query }) =>
  html`<${Tabs} page="scaling" id=${id} query=${query} name="view" standard="now" choices=${[
    ["now", "Now"],
    ["day", "A day"],
  ]} />`;

// The start and end of a day of UTC; without a day, the last 24 hours.
const span = (day) => {
  if (!/^\d{4}-\d\d-\d\d$/.test(day || "")) return {};
  const begin = new Date(`${day}T00:00:00Z`);
  if (Number.isNaN(begin.getTime())) return {};
  return { from: begin.toISOString(), to: new Date(begin.getTime() + 1440 * MINUTE_MS).toISOString() };
};

export function PoolDay({ id, query }) {
  const { data, problems, isLoading, reload } = useData({
    minutes: url(`v1/pools/${encoded(id)}/scaling/minutes`, span(query.day)),
  });
  const { minutes } = data;
  return html`<${Title} title=${`A day of ${id}`} isLoading=${isLoading}><button onClick=${reload}>Look again</button>
    <//><${Missing} problems=${problems} /><${Views} id=${id} query=${query} />
    <${Filters} page="scaling" id=${id} query=${query} fields=${[["day", "Day of UTC, as 2026-11-28"]]} />
    ${minutes ? html`<${Day} minutes=${minutes} />` : null}`;
}

function Day({ minutes }) {
  const known = (name) => minutes[name].filter((it) => it !== null);
  const most = (name) => (known(name).length ? String(Math.max(...known(name))) : NONE);
  const hours = known("ready").reduce((sum, it, at) => sum + it + known("booting")[at] + known("asleep")[at], 0) / 60;
  const sum = (values) => values.reduce((total, it) => total + Number(it), 0);
  const { missing } = minutes;
  return html`${missing ? html`<${Note} tone="warn">Violated minutes are missing: ${missing}<//>` : null}
    <div class="cards"><${Card} name="Replica-hours" value=${count(hours)} hint="ready, starting and asleep" />
    <${Card} name="Most replicas" value=${most("ready")} hint=${`ready; ${most("wanted")} wanted`} />
    <${Card} name="Violated minutes" value=${missing ? NONE : count(sum(minutes.violated))}
      hint="more than 1 % of first tokens were late or failed" />
    <${Card} name="Requests" value=${missing ? NONE : count(sum(minutes.requests))} hint="with copies" /></div>
    ${known("wanted").length ? html`<${Curves} minutes=${minutes} />` : html`<p
      class="empty">No numbers of this time are stored. They are kept for eight days.</p>`}`;
}

function Curves({ minutes }) {
  const length = minutes.wanted.length;
  const top = Math.max(1, ...LINES.flatMap(([name]) => minutes[name].map(Number))) * 1.05;
  const x = (at) => (at / Math.max(1, length - 1)) * WIDTH;
  const y = (value) => HEIGHT - (value / top) * HEIGHT;
  const begin = new Date(minutes.from).getTime();
  const step = 60 * Math.max(1, Math.ceil(length / 60 / 8));
  const hours = Array.from({ length: Math.ceil(length / step) }, (_, at) => at * step);
  const late = minutes.violated.flatMap((it, at) => (it ? [at] : []));
  return html`<figure class="chart day"><figcaption>${LINES.map(([name, label]) => html`<span
      class=${name}>${label}</span>`)}<span class="late">Violated</span></figcaption>
    <svg viewBox="0 -4 ${WIDTH} ${HEIGHT + 30}" role="img"
      aria-label=${`Replicas and demand from ${time(minutes.from)} to ${time(minutes.to)} UTC, at most
        ${top.toFixed(1)}; ${late.length} minutes are violated`}>
    ${hours.map((at) => html`<text x=${x(at)} y=${HEIGHT + 24}>${new Date(begin + at * MINUTE_MS)
      .toISOString()
      .slice(11, 16)}</text>`)}<text x="0" y="8">${top.toFixed(1)}</text>
    ${LINES.map(([name]) => html`<path class=${name} d=${line(minutes[name], x, y)} />`)}
    ${late.map((at) => html`<rect class="late" x=${x(at)} y=${HEIGHT + 2} width="1.5" height="7" />`)}</svg></figure>`;
}
