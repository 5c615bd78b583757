// Pools, cells, replicas and nodes; how many replicas each pool shall have, and why.
import { html } from "../lib.js";
import { url, useData, write } from "../api.js";
import { bytes, count, NONE, time, words } from "../format.js";
import { Action, Badge, Facts, Filters, Link, Missing, Note, Table, Title, When } from "../ui.js";
import { encoded } from "../route.js";
import { PoolDay, Views } from "./day.js";
import { Pools, queued } from "./overview.js";
import { holds } from "./tenants.js";

const STATES = { ready: "good", starting: "warn", draining: "warn", failed: "bad", lost: "bad" };
const HEAT_CELLS_MAX = 500;

export function Fleet(props) {
  return props.id ? html`<${Node} ...${props} />` : html`<${All} ...${props} />`;
}

// How much a cell has before it, for each of its ready replicas: three steps of colour, and the numbers.
function Heat({ load }) {
  const of = (cell) => queued(cell) / Math.max(1, cell.ready);
  const step = (cell) => (of(cell) > 8 ? "h3" : of(cell) > 1 ? "h2" : cell.running ? "h1" : "");
  return html`<div class="heat" role="group" aria-label="Cells by what waits">
    ${load.slice(0, HEAT_CELLS_MAX).map((cell) => html`<span class=${step(cell)}>${cell.cell_id}<br />
    ${count(queued(cell))} wait, ${count(cell.running)} run</span>`)}</div>`;
}

function All({ query, me }) {
  const { data, problems, isLoading, reload } = useData({
    overview: "data/overview",
    replicas: "v1/replicas",
    nodes: "v1/nodes",
  });
  const { overview, replicas, nodes } = data;
  const mayWrite = me.role !== "viewer";
  return html`<${Title} title="Fleet" isLoading=${isLoading}><button onClick=${reload}>Look again</button><//>
    <${Missing} problems=${problems} />
    ${overview ? html`<h2>Pools</h2><${Pools} pools=${overview.pools} load=${overview.load} /><h2>Cells</h2>
      ${overview.load.length ? html`<${Heat} load=${overview.load} />` : html`<p
      class="empty">No router has told anything in the last minute.</p>`}` : null}
    <h2>Nodes and replicas</h2><${Filters} page="fleet" query=${query}
      fields=${[["q", "Id, pool or node, of the first 1,000"]]} />
    <${Table} name="Nodes" rows=${nodes?.data.filter(holds(query, "id", "region"))} empty="No node fits."
      more=${nodes?.has_more ? "There are more: ask the command line." : ""} columns=${[
      ["node", (it) => html`<${Link} to=${["fleet", it.id]}>${it.id}<//>`],
      ["state", (it) => nodeState(it)],
      ["replicas", (it) => it.replicas, "number"],
      ["processors", (it) => it.cpu_count, "number"],
      ["memory", (it) => bytes(it.memory_bytes), "number"],
      ["accelerators", (it) => it.accelerators.length, "number"],
      ["region", (it) => it.region],
      ["seen", (it) => html`<${When} at=${it.seen_at} />`],
      ["note", (it) => it.drain_note || it.cordon_reason || it.order_reason],
      ...(mayWrite
        ? [["", (it) => html`<span class="actions"><${NodeActions} node=${it} reload=${reload} /></span>`]]
        : []),
    ]} />
    <h2>Replicas</h2><${Table} name="Replicas"
      rows=${replicas?.data.filter(holds(query, "id", "pool_id", "node_id", "state"))} empty="No replica fits."
      more=${replicas?.has_more ? "There are more: ask the command line." : ""} columns=${REPLICA} />`;
}

const REPLICA = [
  ["replica", (it) => it.id],
  [
    "state",
    (it) =>
      html`<${Badge} tone=${STATES[it.is_draining ? "draining" : it.state] || "plain"}>
        ${it.is_quarantined ? "quarantined" : it.is_draining ? "draining" : it.state}<//>`,
  ],
  ["pool", (it) => it.pool_id],
  ["cell", (it) => it.cell_id],
  ["node", (it) => html`<${Link} to=${["fleet", it.node_id]}>${it.node_id}<//>`],
  ["memory", (it) => bytes(it.memory_bytes), "number"],
  ["restarts", (it) => it.restarts, "number"],
  ["says", (it) => it.message],
];

function nodeState(it) {
  if (it.is_lost) return html`<${Badge} tone="bad">lost<//>`;
  if (it.is_draining) return html`<${Badge} tone="warn">draining<//>`;
  if (it.is_unschedulable || it.is_cordoned) return html`<${Badge} tone="warn">cordoned<//>`;
  return html`<${Badge} tone="good">in service<//>`;
}

function NodeActions({ node, reload }) {
  const order =
    (is_unschedulable, is_draining) =>
    ({ reason = "" }) =>
      write("PUT", `v1/nodes/${encoded(node.id)}/desired`, { is_unschedulable, is_draining, reason });
  const why = [["reason", "Why, for whoever looks"]];
  const much = `${node.replicas} replicas are on it now.`;
  if (node.is_draining || node.is_unschedulable)
    return html`<${Action} label="Release" title=${`Release ${node.id}`} says="New replicas may come to it again."
      act=${order(false, false)} done=${reload} />`;
  return html`<${Action} label="Cordon" title=${`Cordon ${node.id}`}
    says=${`No new replica comes to it. ${much} They stay, and serve.`} fields=${why} act=${order(true, false)}
    done=${reload} />
    <${Action} label="Drain" tone="danger" title=${`Drain ${node.id}`}
      says=${`${much} Each is replaced elsewhere where there is room, takes no new requests, and ends once its own
        have ended. It goes on when this page is closed.`} fields=${why} act=${order(true, true)} done=${reload} />`;
}

function Node({ id, me }) {
  const { data, problems, isLoading, reload } = useData({
    node: `v1/nodes/${encoded(id)}`,
    replicas: url("v1/replicas", { node_id: id }),
  });
  const it = data.node;
  return html`<${Title} title=${id} isLoading=${isLoading}><button onClick=${reload}>Look again</button>
    ${it && me.role !== "viewer" ? html`<${NodeActions} node=${it} reload=${reload} />` : null}<//><${Missing}
    problems=${problems} />
    ${
      it
        ? html`<p>${nodeState(it)} ${it.drain_note || it.cordon_reason || it.order_reason}</p><${Facts} facts=${[
            ["processors", it.cpu_count],
            ["memory", bytes(it.memory_bytes)],
            ["accelerators", it.accelerators.join(", ")],
            ["engines", it.engines.join(", ")],
            ["region, rack", [it.region, it.rack].filter(Boolean).join(", ")],
            ["seen", html`<${When} at=${it.seen_at} />`],
          ]} />`
        : null
    }
    <h2>Replicas</h2><${Table} name="Replicas" rows=${data.replicas?.data} empty="It has none." columns=${REPLICA} />`;
}

export function Scaling(props) {
  if (!props.id) return html`<${Every} ...${props} />`;
  return props.query.view === "day" ? html`<${PoolDay} ...${props} />` : html`<${Pool} ...${props} />`;
}

const NUMBERS = [
  ["wanted", (it) => it.wanted ?? NONE, "number"],
  ["ready", (it) => it.ready ?? NONE, "number"],
  ["starting", (it) => it.booting ?? NONE, "number"],
  ["asleep", (it) => (it.sleepers ? `${it.asleep ?? 0} of ${it.sleepers}` : (it.asleep ?? NONE)), "number"],
  ["bounds", (it) => `${it.replicas_min} to ${it.replicas_max}`],
  [
    "mode",
    (it) =>
      it.pin !== null
        ? html`<${Badge} tone="warn">set to ${it.pin} by ${it.pinned_by}<//>`
        : it.is_paused
          ? html`<${Badge} tone="warn">paused<//>`
          : it.is_on
            ? html`<${Badge} tone="good">scaled<//>`
            : html`<${Badge}>planned only<//>`,
  ],
  ["cause", (it) => words(it.cause || "")],
];

function Every({ me }) {
  const { data, problems, isLoading, reload } = useData({ pools: "v1/scaling", budget: "v1/scaling/budget" });
  const { budget } = data;
  return html`<${Title} title="Scaling" isLoading=${isLoading}><button onClick=${reload}>Look again</button><//>
    <${Missing} problems=${problems} />
    ${budget ? html`<p
      class="hint">Over all pools: ${budget.accelerators === null ? "any number of accelerators"
        : `at most ${count(budget.accelerators)} accelerators`}, ${budget.price === null ? "any price"
        : `at most ${budget.price} an hour`}.</p>` : null}
    <${Table} name="Pools with bounds" rows=${data.pools?.data}
      empty="No pool has bounds: each has the number that was set. The command sluice scaling set gives it some."
      columns=${[["pool", (it) => html`<${Link} to=${["scaling", it.pool_id]}>${it.pool_id}
      <//>`], ...NUMBERS, ["warnings", (it) => (it.warnings || []).join("; ")], ["decided", (it) => (it.decided_at
        ? html`<${When} at=${it.decided_at} />` : NONE)]]} />`;
}

const told = (reason) =>
  typeof reason === "string"
    ? reason
    : reason.text ||
      Object.entries(reason)
        .map(([name, it]) => `${words(name)} ${typeof it === "number" ? count(it) : JSON.stringify(it)}`)
        .join(", ");

function Pool({ id, query, me }) {
  const path = `v1/pools/${encoded(id)}/scaling`;
  const asked = { replicas_min: query.min, replicas_max: query.max, minute_worth: query.worth };
  const { data, problems, isLoading, reload } = useData({
    bounds: path,
    plan: url(`${path}/plan`, asked),
    changes: url(`${path}/changes`, { limit: 100 }),
  });
  const { bounds, plan, changes } = data;
  if (problems.bounds?.status === 404)
    return html`<${Title} title=${id} isLoading=${isLoading} /><${Note}
      tone="warn">This pool is not scaled: it keeps the number of replicas that was set.<//>`;
  return html`<${Title} title=${`Scaling of ${id}`} isLoading=${isLoading}>
    <button onClick=${reload}>Look again</button>${
    bounds && me.role !== "viewer"
      ? html`
      <${Action} label="Set the number" title=${`Set the number of ${id}`}
        says=${`The pool gets this many replicas, whatever the demand is; now it wants ${plan?.wanted ?? "?"} and
          has ${plan?.ready ?? "?"} ready. Replicas that are too many drain first.`} fields=${[
        ["replicas", "Replicas", plan?.wanted ?? 1, "number"],
        ["hours", "For hours (0: until it is lifted)", "1", "number"],
      ]}
        act=${({ replicas, hours }) => write("POST", `${path}/pin`,
          { replicas: Number(replicas), for_s: 3600 * Number(hours) })} done=${reload} />
      ${bounds.is_paused || bounds.pin !== null ? html`<${Action} label="Resume"
        says=${`The plan counts again: it would want ${plan?.wanted ?? "?"} replicas now.`}
        act=${() => write("POST", `${path}/resume`)} done=${reload} />` : html`<${Action} label="Pause"
        says=${`The pool stays at the number it has, whatever the demand is: ${plan?.ready ?? "?"} replicas
          are ready.`} act=${() => write("POST", `${path}/pause`)} done=${reload} />`}`
      : null
  }<//><${Missing} problems=${problems} /><${Views} id=${id} query=${query} />
    ${bounds ? html`<${Table} name="Bounds and decision" rows=${[{ ...plan, ...bounds }]} columns=${NUMBERS} />` : null}
    ${
      plan
        ? html`<h2>Why</h2>${plan.warnings.map((it) => html`<${Note} tone="warn">${it}<//>`)}<ul>
          ${plan.reasons.map((it) => html`<li>${told(it)}</li>`)}</ul>
    <${Facts} facts=${[
      ["demand", count(plan.demand)],
      ["expected", count(plan.expected)],
      ["backlog, s of work", count(plan.backlog_work_s)],
      ["a start takes, s", count(plan.boot_s)],
      ["asleep, and wanted asleep", `${count(plan.asleep)}, ${count(plan.sleepers)}`],
      ["sleepers per replica of the busiest quarter of an hour", bounds ? String(bounds.sleepers_share) : NONE],
      ["sleepers at least", count(bounds?.sleepers_min)],
    ]} />`
        : null
    }
    <h2>With other bounds</h2><p class="hint">A dry run: nothing is changed.</p><${Filters} page="scaling" id=${id}
      query=${query} fields=${[
      ["min", "Minimum"],
      ["max", "Maximum"],
      ["worth", "Worth of a minute"],
    ]} />
    <h2>Changes</h2><${Table} name="Changes" rows=${changes?.data} empty="Its number was never changed." columns=${[
      ["at", (it) => html`<${When} at=${it.changed_at} />`],
      ["from", (it) => it.before, "number"],
      ["to", (it) => it.after, "number"],
      ["cause", (it) => words(it.cause)],
      ["", (it) => it.text],
    ]} />`;
}
