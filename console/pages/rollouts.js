// Rollouts: where each stands, what it has seen, and what people may do.
import { html } from "../lib.js";
import { url, useData, write } from "../api.js";
import { count, NONE, percent, span, time, words } from "../format.js";
import { Action, Badge, Bar, Facts, Filters, Link, Missing, Note, Table, Title, When } from "../ui.js";
import { encoded } from "../route.js";

export const toneOf = (phase) =>
  ({ done: "good", paused: "warn", rolled_back: "bad", aborted: "bad", halted: "bad" })[phase] || "plain";
export function Rollouts(props) {
  return props.id ? html`<${One} ...${props} />` : html`<${All} ...${props} />`;
}

function All({ query }) {
  const { data, problems, isLoading } = useData({
    rollouts: url("v1/rollouts", { limit: 100, model_id: query.model, phase: query.phase, after: query.after }),
  });
  return html`<${Title} title="Rollouts" isLoading=${isLoading} /><${Filters} page="rollouts" query=${query} fields=${[
    ["model", "Model"],
    ["phase", "Phase"],
  ]} /><${Missing} problems=${problems} />
    <${Table} name="Rollouts" rows=${data.rollouts?.data} empty="There is no rollout that fits." columns=${[
      ["rollout", (it) => html`<${Link} to=${["rollouts", it.id]}>${it.id}<//>`],
      ["model", (it) => html`<${Link} to=${["models", it.model_id]}>${it.model_id}<//>`],
      ["canary", (it) => it.canary],
      ["control", (it) => it.control],
      ["phase", (it) => html`<${Badge} tone=${toneOf(it.phase)}>${words(it.phase)}<//>`],
      ["stage", (it) => (it.stage < 0 ? NONE : `${it.stage + 1} of ${it.stages}`)],
      ["share", (it) => `${it.share_percent} %`, "number"],
      ["begun", (it) => html`<${When} at=${it.started_at} />`],
      ["why", (it) => it.explanation || it.problem],
    ]} />`;
}

const rate = (side) => (side.total ? side.bad / side.total : null);
// The interval that holds the true share with 95 % (Wilson's).
function interval({ bad, total }) {
  if (!total) return NONE;
  const z = 1.96,
    p = bad / total,
    scale = 1 + (z * z) / total;
  const middle = (p + (z * z) / (2 * total)) / scale,
    half = (z / scale) * Math.sqrt((p * (1 - p)) / total + (z * z) / (4 * total * total));
  return `${percent(p, 2)} (${(100 * Math.max(0, middle - half)).toFixed(2)}–${(100 * Math.min(1,
    middle + half)).toFixed(2)})`;
}

const Gates = ({ name, gates }) =>
  html`<${Table} name=${name} rows=${gates} empty="Nothing was counted yet." columns=${[
    ["gate", (it) => words(it.metric)],
    ["canary: bad of all", (it) => `${count(it.canary.bad)} of ${count(it.canary.total)}`, "number"],
    ["share, 95 % interval", (it) => interval(it.canary), "number"],
    ["control: bad of all", (it) => `${count(it.control.bad)} of ${count(it.control.total)}`, "number"],
    ["share, 95 % interval", (it) => interval(it.control), "number"],
    [
      "evidence that it is worse",
      (it) =>
        html`<${Bar} share=${it.e_value_log10 / it.e_value_needed_log10}
          label=${`10^${it.e_value_log10} of 10^${it.e_value_needed_log10} needed`} />${" "}
            ${it.e_value_log10 >= it.e_value_needed_log10 ? html`<${Badge} tone="bad">worse<//>` : ""}`,
    ],
    ["would be seen from", (it) => (it.detectable_percent === null ? NONE : `${it.detectable_percent} %`), "number"],
  ]} />`;

function One({ id, me }) {
  const { data, problems, isLoading, reload } = useData({
    rollout: `v1/rollouts/${encoded(id)}`,
    events: url(`v1/rollouts/${encoded(id)}/events`, { limit: 1000 }),
  });
  const it = data.rollout;
  return html`<${Title} title=${it ? `${it.model_id}: ${it.control} → ${it.canary}` : id} isLoading=${isLoading}>
    <button onClick=${reload}>Look again</button>${it ? html`<${Commands} it=${it} me=${me}
    reload=${reload} />` : null}<//><${Missing} problems=${problems} />
    ${it ? html`<${Told} it=${it} />` : null}
    ${
      data.events
        ? html`<h2>What happened</h2><${Table} name="Events" rows=${[...data.events.data].reverse()} columns=${[
            ["at", (row) => html`<${When} at=${row.at} />`],
            ["event", (row) => words(row.event)],
            ["by", (row) => row.actor_id || "itself"],
            ["phase", (row) => words(row.phase)],
            ["stage", (row) => (row.stage < 0 ? NONE : row.stage + 1), "number"],
            ["share", (row) => `${row.share_percent} %`, "number"],
            ["detail", (row) => row.detail],
          ]} />`
        : null
    }`;
}

function Commands({ it, me, reload }) {
  const mayControl =
    ["operator", "admin"].includes(me.role) || (me.role === "publisher" && it.owner_tenant_id === me.tenant_id);
  const mayWrite = me.role === "admin" || (me.role === "publisher" && it.owner_tenant_id === me.tenant_id);
  if (!it.is_live) return null;
  const tell = (command, body) => () => write("POST", `v1/rollouts/${encoded(it.id)}/${command}`, body);
  const share = it.share_percent;
  const next = it.plan.stages?.[it.stage + 1];
  return html`${mayWrite && it.phase === "planned" ? html`<${Action} label="Start"
    says=${`Requests of ${it.model_id} begin to go to ${it.canary}, as the first stage says.`} act=${tell("start")}
    done=${reload} />` : null}
    ${mayWrite && ["running", "shadow"].includes(it.phase) ? html`<${Action} label="Promote"
      says=${`Stage ${it.stage + 1} ends now, before its time: the evidence so far is all there
        is (${count(it.sample)} requests of ${count(it.sample_needed)}). ${next
        ? `Stage ${it.stage + 2} begins when the fleet is ready for it.`
        : `${it.canary} then gets all requests.`} No stage is left out.`} act=${tell("promote", { stage: it.stage })}
        done=${reload} />` : null}
    ${mayControl && ["running", "shadow"].includes(it.phase) ? html`<${Action} label="Pause"
      says=${`The share stays at ${share} %: canary keeps its requests, and no stage begins. A rollout that is paused
        for too long goes back by itself.`} act=${tell("pause")} done=${reload} />` : null}
    ${mayControl && it.phase === "paused" ? html`<${Action} label="Resume"
      says="The stage goes on, and is compared again." act=${tell("resume")} done=${reload} />` : null}
    ${mayControl ? html`<${Action} label="Abort" tone="danger" title=${`Abort ${it.id}`}
      says=${`All requests of ${it.model_id} go to ${it.control} again, at once: that is ${share} % of them. Requests
        that run end where they are. The rollout is over; a new one begins anew.`} act=${tell("abort")}
        done=${reload} />` : null}`;
}

function Told({ it }) {
  const stages = it.plan.stages || [];
  const isOver = !it.is_live;
  return html`<p><${Badge} tone=${toneOf(it.phase)}>${words(it.phase)}<//> ${it.explanation}</p>
    ${it.problem ? html`<${Note}>${it.problem}<//>` : null}
    ${stages.length ? html`<ol class="stages">${stages.map((stage, at) => html`<li
      class=${at < it.stage || (isOver && toneOf(it.phase) === "good") ? "past" : at === it.stage
        ? (toneOf(it.phase) === "bad" ? "failed" : "now") : ""}>${stage.share_percent} %${stage.is_shadow ? ", copies"
        : ""}<br />${span(stage.duration_min_s)}</li>`)}</ol>` : null}
    <${Facts} facts=${[
      ["waits for", it.waiting_for],
      ["watched", `${span(it.watched_s)} of ${span(it.watched_needed_s)}`],
      ["requests of canary", `${count(it.sample)} of ${count(it.sample_needed)} needed`],
      ["requests of control", count(it.control_sample)],
      ["this stage may end in", it.stage_left_s === null ? "" : span(it.stage_left_s)],
      ["evidence until", it.evidence_until_unix_ms ? `${time(it.evidence_until_unix_ms)} UTC` : ""],
      ["owner", it.owner_tenant_id || "nobody"],
      ["begun", it.started_at ? html`<${When} at=${it.started_at} />` : "not yet"],
      ["ended", it.ended_at ? html`<${When} at=${it.ended_at} />` : ""],
    ]} />
    <h2>Canary against control, in this stage</h2><${Gates} name="Gates" gates=${it.gates} />
    ${it.past_stages.map((past) => html`<details>
      <summary>Stage ${past.stage + 1}, ${span(past.watched_s)}, ${count(past.sample)} requests of canary</summary>
      <${Gates} name=${`Gates of stage ${past.stage + 1}`} gates=${past.gates} /></details>`)}
    ${
      it.trials.length
        ? html`<h2>Trials</h2><${Table} name="Trials" rows=${it.trials} columns=${[
            ["node", (row) => row.node_id],
            [
              "result",
              (row) => (row.code ? html`<${Badge} tone="bad">${row.code}<//>` : html`<${Badge} tone="good">loaded<//>`),
            ],
            ["", (row) => row.message],
          ]} />`
        : null
    }`;
}
