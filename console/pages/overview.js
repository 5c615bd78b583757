// How everything is, and what the fleet does this second.
import { html } from "../lib.js";
import { useData, useLive } from "../api.js";
import { count, ms, percent } from "../format.js";
import { Badge, Card, Chart, Link, Missing, Note, Table, Title } from "../ui.js";
import { href } from "../route.js";

export const queued = (cell) => Object.values(cell.queued).reduce((sum, it) => sum + it, 0);
const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);

// One sentence for all: the worst first.
function sentence(state) {
  const { counts, pools, slo } = state;
  const short = pools.filter((pool) => pool.ready < pool.wanted);
  const bad = [];
  if (counts.incidents_open) bad.push([`${counts.incidents_open} incidents are open`, ["incidents"]]);
  if (counts.alerts) bad.push([`${counts.alerts} alerts fire`, ["alerts"]]);
  if (counts.nodes_lost) bad.push([`${counts.nodes_lost} of ${counts.nodes} nodes are lost`, ["fleet"]]);
  if (counts.quarantines) bad.push([`${counts.quarantines} replicas are in quarantine for wrong answers`, ["quality"]]);
  if (short.length) bad.push([`${short.length} of ${pools.length} pools have fewer replicas than wanted`, ["fleet"]]);
  const goodput = slo?.total?.goodput;
  if (goodput !== null && goodput !== undefined && goodput < 0.85)
    bad.push([`goodput is ${percent(goodput)}, below 85 %`, ["requests"]]);
  if (counts.rollouts_paused) bad.push([`${counts.rollouts_paused} rollouts are paused`, ["rollouts"]]);
  if (counts.tenants_stopped) bad.push([`${counts.tenants_stopped} tenants have used up a budget`, ["budgets"]]);
  return bad;
}

export function Overview() {
  const { data, problems, isLoading, reload } = useData({ overview: "data/overview" });
  const state = data.overview;
  return html`<${Title} title="Overview" isLoading=${isLoading}><button onClick=${reload}>Look again</button><//>
    <${Missing} problems=${problems} />${state ? html`<${Whole} state=${state} />` : null}`;
}

function Whole({ state }) {
  const { counts, pools, load, slo, missing } = state;
  const bad = sentence(state);
  const total = slo?.total;
  const objectives = slo?.objectives || {};
  const tone = (value, limit) => (value === null || value === undefined ? "" : value > limit ? "bad" : "");
  return html`${
    bad.length
      ? html`<${Note} tone="warn">${bad.map(([text, to], at) => html`${at ? "; " : ""}<a href=${href(...to)}>${text}
        </a>`)}.<//>`
      : html`<${Note} tone="good">All ${pools.length} pools have their replicas, and nothing needs a look.<//>`
  }
    ${missing ? html`<${Note} tone="warn">Numbers of requests are missing: ${missing}<//>` : null}
    <div class="cards">
    <${Card} name="TTFT, p95 of the last hour" value=${ms(total?.ttft_ms?.[1])}
      hint="p50 ${ms(total?.ttft_ms?.[0])}, p99 ${ms(total?.ttft_ms?.[2])}; objective ${objectives.ttft_ms || "–"} ms"
      tone=${tone(total?.ttft_ms?.[1], objectives.ttft_ms)} />
    <${Card} name="Time per token, p95" value=${ms(total?.tpot_ms?.[1])}
      hint="p50 ${ms(total?.tpot_ms?.[0])}; objective ${objectives.tpot_ms || "–"} ms"
      tone=${tone(total?.tpot_ms?.[1], objectives.tpot_ms)} />
    <${Card} name="Goodput" value=${percent(total?.goodput)} hint="requests within both objectives"
      tone=${total?.goodput < 0.85 && total?.goodput !== null ? "bad" : ""} />
    <${Card} name="Requests" value=${count(total?.requests)} hint="${count(total?.failed)} failed, in the last hour" />
    <${Card} name="Waiting and running" value="${count(sum(load, queued))} / ${count(sum(load, (it) => it.running))}"
      hint="as routers last told" />
    <${Card} name="Fleet" value="${count(sum(pools, (it) => it.ready))} of ${count(sum(pools, (it) => it.wanted))}"
      hint="replicas ready, ${counts.nodes} nodes, ${counts.routers} routers" />
    <${Card} name="Rollouts" value=${counts.rollouts_live} hint="under way, ${counts.rollouts_paused} paused" />
    <${Card} name="Customers" value=${count(counts.tenants)} hint="tenants, ${count(counts.models)} models" /></div>
    ${
      slo
        ? html`<h2>The last hour</h2><div class="charts">
      <${Chart} name="TTFT p95, ms" unit="ms" points=${slo.series.map((it) => it.ttft_ms[1])}
        objective=${objectives.ttft_ms} />
      <${Chart} name="Time per token p95, ms" unit="ms" points=${slo.series.map((it) => it.tpot_ms[1])}
        objective=${objectives.tpot_ms} />
      <${Chart} name="Requests per minute" unit="" points=${slo.series.map((it) => it.requests)} /></div>
    <h2>By model</h2><${Table} name="Models" rows=${slo.models} empty="No request ended in the last hour." columns=${[
      ["model", (it) => html`<${Link} to=${["models", it.model]}>${it.model}<//>`],
      ["requests", (it) => count(it.requests), "number"],
      ["failed", (it) => count(it.failed), "number"],
      ["TTFT p50", (it) => ms(it.ttft_ms[0]), "number"],
      ["p99", (it) => ms(it.ttft_ms[2]), "number"],
      ["per token p95", (it) => ms(it.tpot_ms[1]), "number"],
      ["goodput", (it) => percent(it.goodput), "number"],
    ]} />`
        : null
    }
    <h2>Pools</h2><${Pools} pools=${pools} load=${load} />`;
}

export function Pools({ pools, load }) {
  const of = (pool) => load.filter((cell) => cell.pool_id === pool.id);
  return html`<${Table} name="Pools" rows=${pools} columns=${[
    ["pool", (it) => html`<${Link} to=${["scaling", it.id]}>${it.id}<//>`],
    ["wanted", (it) => it.wanted, "number"],
    ["ready", (it) => it.ready, "number"],
    ["starting", (it) => it.starting, "number"],
    ["draining", (it) => it.draining, "number"],
    ["waiting", (it) => count(sum(of(it), queued)), "number"],
    ["running", (it) => count(sum(of(it), (cell) => cell.running)), "number"],
    [
      "state",
      (it) =>
        it.failed + it.lost
          ? html`<${Badge} tone="bad">${it.failed} failed, ${it.lost} lost<//>`
          : it.ready < it.wanted
            ? html`<${Badge} tone="warn">short<//>`
            : html`<${Badge} tone="good">as wanted<//>`,
    ],
    ["why", (it) => it.condition],
  ]} />`;
}

export function Live() {
  const { data, isConnected, at } = useLive();
  const state = data?.counts ? data : null;
  const priorities = [...new Set((state?.load || []).flatMap((cell) => Object.keys(cell.queued)))].sort(
    (a, b) => b - a,
  );
  return html`<${Title} title="Live"><span>${isConnected ? html`<${Badge} tone="good">connected<//>` : html`<${Badge}
    tone="warn">${data ? "not connected: it comes back by itself" : "connecting"}<//>`}</span><//>
    <p
      class="hint">What routers told last, each two seconds while this page is looked at. ${at
        ? `Changed at ${new Date(at).toISOString().slice(11, 19)} UTC.` : ""}</p>
    ${data?.problem ? html`<${Note}>${data.problem}<//>` : null}
    ${
      state
        ? html`<h2>Cells</h2><${Table} name="Cells" rows=${state.load}
          empty="No router has told anything in the last minute." columns=${[
            ["cell", (it) => it.cell_id],
            ["pool", (it) => it.pool_id],
            ["router", (it) => it.router_id],
            ["replicas ready", (it) => it.ready, "number"],
            ["running", (it) => count(it.running), "number"],
            ...priorities.map((priority) => [
              `waiting, priority ${priority}`,
              (it) => count(it.queued[priority] || 0),
              "number",
            ]),
          ]} />
    <h2>Pools</h2><${Pools} pools=${state.pools} load=${state.load} />`
        : null
    }`;
}
