// Usage, its cost, and the limits of usage.
import { html } from "../lib.js";
import { url, useData } from "../api.js";
import { count, money, NONE, percent, span, time, words } from "../format.js";
import { Badge, Bar, Chart, Filters, Link, Missing, Note, Table, Tabs, Title } from "../ui.js";
import { holds } from "./tenants.js";

const BY = [
  ["tenant_id", "by tenant"],
  ["key_id", "by key"],
  ["model", "by model"],
  ["start", "over time"],
];
const MEASURES = ["requests", "failed_requests", "prompt_tokens", "cached_tokens", "output_tokens"];

function grouped(rows, by) {
  const found = new Map();
  for (const row of rows) {
    const sum = found.get(row[by]) || found.set(row[by], { name: row[by], tenant_id: row.tenant_id }).get(row[by]);
    for (const name of MEASURES) sum[name] = (sum[name] || 0) + row[name];
  }
  return ordered([...found.values()], by);
}

const ordered = (rows, by) =>
  rows.sort(
    by === "start"
      ? (a, b) => (a.name < b.name ? -1 : 1)
      : (a, b) => b.output_tokens + b.prompt_tokens - a.output_tokens - a.prompt_tokens,
  );

function added(rows) {
  const sum = Object.fromEntries(MEASURES.map((name) => [name, 0]));
  for (const row of rows) for (const name of MEASURES) sum[name] += row[name];
  return sum;
}

const cachedShare = (total) => percent(total ? total.cached_tokens / Math.max(1, total.prompt_tokens) : null);

export function Usage({ query, me }) {
  const by = query.by || (me.role === "publisher" ? "model" : "tenant_id");
  const granularity = query.granularity || "day";
  const span = { tenant: query.tenant, key: query.key, model: query.model, from: query.from, to: query.to };
  const asked = { ...span, granularity };
  // All tenants' days and hours come as sums by the minute of their making; the ledger of a tenant as it is.
  const isSummed = !query.tenant && me.role !== "publisher" && me.role !== "reader";
  const { data, problems, isLoading } = useData(
    isSummed ? { sums: url("data/usage/sums", { ...asked, by }) } : { usage: url("data/usage", asked) },
  );
  const found = isSummed ? data.sums : data.usage;
  const rows = found ? (isSummed ? ordered(found.data, by) : grouped(found.data, by)) : null;
  const total = found ? found.total || added(rows) : null;
  const over = found && by === "start" ? rows.map((it) => it.prompt_tokens + it.output_tokens) : [];
  const link = {
    tenant_id: (it) => html`<${Link} to=${["tenants", it.name]}>${it.name}<//>`,
    model: (it) => html`<${Link} to=${["models", it.name]}>${it.name}<//>`,
    start: (it) => time(it.name).slice(0, 16),
    key_id: (it) => html`<code>${it.name}</code> of ${it.tenant_id}`,
  };
  return html`<${Title} title="Usage" isLoading=${isLoading}><a class="button"
    href=${url("data/usage", { ...asked, format: "csv" })} download>CSV</a><//>
    <${Filters} page="usage" query=${query} fields=${[
      ["tenant", "Tenant"],
      ["key", "Key"],
      ["model", "Model"],
      ["from", "From (UTC)"],
      ["to", "To (UTC)"],
      [
        "granularity",
        "In",
        [
          ["day", "days"],
          ["hour", "hours"],
        ],
      ],
    ]} />
    <${Tabs} page="usage" query=${query} name="by" standard=${by} choices=${BY} /><${Missing} problems=${problems} />
    ${
      found
        ? html`<p>
          ${time(found.from)} to ${time(found.to)} UTC: ${count(total?.requests || 0)} requests,${" "}
          ${count(total?.prompt_tokens || 0)} prompt tokens (${cachedShare(total)} cached), ${""}
          ${count(total?.output_tokens || 0)} output tokens.
      ${found.closed_until ? ` What is before ${time(found.closed_until)} is closed.` : ""}
      ${found.as_of ? ` As of ${time(found.as_of)}; one tenant's, and hours, are up to the last request.` : ""}
      ${found.data.length === 1000 ? " The 1,000 largest; the file has all." : ""}</p>
        ${over.length > 1 ? html`<${Chart} name="Tokens" unit="tokens" points=${over} />` : null}`
        : null
    }
    <${Table} name="Usage" rows=${rows} empty="Nothing was used in this time." columns=${[
      [words(by.replace("_id", "")), link[by]],
      ["requests", (it) => count(it.requests), "number"],
      ["failed", (it) => count(it.failed_requests), "number"],
      ["prompt tokens", (it) => count(it.prompt_tokens), "number"],
      ["cached", (it) => count(it.cached_tokens), "number"],
      ["output tokens", (it) => count(it.output_tokens), "number"],
    ]} />`;
}

const COST_BY = ["model", "tenant", "pool", "hour"].map((it) => [it, `by ${it}`]);

export function Costs({ query }) {
  const by = query.by || "model";
  const { data, problems, isLoading } = useData({ costs: url("data/costs", { by, from: query.from, to: query.to }) });
  const found = data.costs;
  const { costs: problem, ...others } = problems;
  return html`<${Title} title="Cost" isLoading=${isLoading} /><${Filters} page="costs" query=${query} fields=${[
    ["from", "From (UTC)"],
    ["to", "To (UTC)"],
  ]} /><${Tabs} page="costs" query=${query} name="by" standard="model" choices=${COST_BY} />
    <${Missing} problems=${others} />${problem ? html`<${Note} tone="warn">${problem.message}<//>` : null}
    ${
      found
        ? html`<p>
          ${time(found.from)} to ${time(found.to)} UTC, as of ${time(found.as_of)}:
          ${" "}${money(found.total_micros, found.currency)} in all.</p>
          <${Table} name="Cost" rows=${found.data} columns=${[
            [by, (it) => it.name || NONE],
            ["of", (it) => it.kind],
            ["requests", (it) => count(it.requests), "number"],
            ["prompt tokens", (it) => count(it.prompt_tokens), "number"],
            ["output tokens", (it) => count(it.output_tokens), "number"],
            ["cost", (it) => money(it.cost_micros, found.currency), "number"],
            [
              "per million tokens",
              (it) => (it.cost_per_million === null ? NONE : it.cost_per_million.toFixed(3)),
              "number",
            ],
          ]} />
    ${
      found.pools
        ? html`<h2>Pools</h2><${Table} name="Pools" rows=${found.pools} columns=${[
            ["pool", (it) => it.pool_id],
            ["paid hours", (it) => it.paid_hours.toFixed(2), "number"],
            ["busy", (it) => percent(it.busy_share), "number"],
            ["cost", (it) => money(it.cost_micros, found.currency), "number"],
            ["of it idle", (it) => money(it.idle_micros, found.currency), "number"],
          ]} />`
        : null
    }`
        : null
    }`;
}

const BUDGET = { ok: "good", soft: "warn", hard: "bad", exhausted: "bad", stopped: "bad" };

export function Budgets({ query }) {
  const { data, problems, isLoading } = useData({
    budgets: url("v1/budgets", { tenant_id: query.tenant, after: query.after }),
  });
  return html`<${Title} title="Budgets" isLoading=${isLoading} /><${Filters} page="budgets" query=${query} fields=${[
    ["tenant", "Tenant"],
    ["q", "Name, on this page"],
  ]} /><${Missing} problems=${problems} />
    <${Table} name="Budgets" rows=${data.budgets?.data.filter(holds(query, "name", "tenant_id"))}
      empty="No budget fits. The command sluice tenants budget set makes one." columns=${[
      ["tenant", (it) => html`<${Link} to=${["tenants", it.tenant_id]}>${it.tenant_id}<//>`],
      ["name", (it) => it.name],
      ["model", (it) => it.model_id || "all"],
      ["period", (it) => it.period],
      ["state", (it) => html`<${Badge} tone=${BUDGET[it.state] || "plain"}>${it.state}<//>`],
      ["used", (it) => (it.used === null ? NONE : count(it.used)), "number"],
      ["of", (it) => count(it.tokens || it.requests || it.amount), "number"],
      [
        "reached",
        (it) =>
          html`<${Bar} share=${(it.reached_percent || 0) / 100}
            label=${`${it.reached_percent ?? 0} %`} /> ${it.reached_percent ?? NONE} %`,
      ],
      ["until", (it) => (it.period_end ? time(it.period_end) : NONE)],
      ["stops within", (it) => span(it.stop_delay_s)],
    ]} />`;
}
