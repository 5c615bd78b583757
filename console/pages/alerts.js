// Alerts, silences, incidents, and who was told: what fires, who looks at it, and how it ended.
import { html } from "../lib.js";
import { url, useData, write } from "../api.js";
import { count, NONE, words } from "../format.js";
import { Action, Badge, Facts, Filters, Link, Missing, Note, Table, Tabs, Title, When } from "../ui.js";
import { encoded, href } from "../route.js";

const mayWrite = (me) => ["operator", "admin"].includes(me.role);
const RANKS = { 1: "bad", 2: "warn", 3: "plain" };
const Severity = ({ rank }) => html`<${Badge} tone=${RANKS[rank]}>P${rank}<//>`;
const labels = (them) =>
  Object.entries(them)
    .filter(([name]) => name !== "alertname" && name !== "severity")
    .map((it) => it.join("="))
    .join(", ");

// Annotations come from rules, and maybe from others: only addresses of the web become links.
function Runbook({ of }) {
  const where = of.annotations.runbook_url || "";
  if (!where) return NONE;
  return /^https?:/i.test(where)
    ? html`<a href=${where} rel="noreferrer noopener" target="_blank">${where.split("/").pop()}</a>`
    : html`<code>${where}</code>`;
}

function State({ of }) {
  if (!of.is_firing) return html`<${Badge} tone="good">over<//>`;
  if (of.is_silenced) return html`<${Badge}>silenced<//>`;
  if (of.acknowledged_by) return html`<${Badge} tone="warn">acknowledged by ${of.acknowledged_by}<//>`;
  return html`<${Badge} tone="bad">firing<//>`;
}

export function Alerts(props) {
  return props.id ? html`<${OneAlert} ...${props} />` : html`<${All} ...${props} />`;
}

const VIEWS = [
  ["firing", "Firing"],
  ["over", "Over"],
  ["silences", "Silences"],
  ["told", "Who was told"],
];

function All({ query, me }) {
  const view = query.view || "firing";
  const paths = {
    firing: { alerts: url("v1/alerts", { limit: 1000, is_firing: true, name: query.name }) },
    over: { alerts: url("v1/alerts", { limit: 100, is_firing: false, name: query.name, after: query.after }) },
    silences: { silences: url("v1/alert-silences", { limit: 100 }), alerts: url("v1/alerts", { is_firing: true }) },
    told: { told: url("v1/alert-notifications", { limit: 1000 }) },
  }[view] || {};
  const found = useData(paths);
  const { data, problems, isLoading, reload } = found;
  const props = { data, query, me, reload };
  return html`<${Title} title="Alerts" isLoading=${isLoading}><button onClick=${reload}>Look again</button
      ><a class="button" href=${href("incidents")}>Incidents</a>${
        mayWrite(me) ? html`<${Silence} firing=${data.alerts?.data} reload=${reload} />` : null
      }<//>
    <${Tabs} page="alerts" query=${{ name: query.name, view }} name="view" standard="firing" choices=${VIEWS} />
    <${Missing} problems=${problems} />
    ${view === "silences" && data.silences ? html`<${Silences} ...${props} />` : null}
    ${view === "told" && data.told ? html`<${Told} ...${props} />` : null}
    ${view in { firing: 1, over: 1 } && data.alerts ? html`<${List} view=${view} ...${props} />` : null}`;
}

function List({ view, data, query, me, reload }) {
  const rows = data.alerts.data;
  const more = data.alerts.has_more
    ? html`<a href=${href("alerts", "", { ...query, after: rows[rows.length - 1].id })}>Older</a>` : null;
  return html`<${Filters} page="alerts" query=${{ ...query, after: "" }} fields=${[["name", "Name of the rule"]]} />
    <${Table} name="Alerts" rows=${rows} more=${more}
      empty=${view === "firing" ? "Nothing fires." : "Nothing is over that fits."} columns=${[
        ["alert", (it) => html`<${Link} to=${["alerts", it.id]}>${it.name}<//>`],
        ["severity", (it) => html`<${Severity} rank=${it.rank} />`],
        ["state", (it) => html`<${State} of=${it} />`],
        ["says", (it) => it.annotations.summary || ""],
        ["of", (it) => labels(it.labels)],
        ["since", (it) => html`<${When} at=${it.starts_at} />`],
        ...(view === "over" ? [["until", (it) => html`<${When} at=${it.ends_at} />`]] : []),
        ["runbook", (it) => html`<${Runbook} of=${it} />`],
        ["incident", (it) => (it.incident_id ? html`<${Link} to=${["incidents", it.incident_id]}>open<//>` : NONE)],
        ...(mayWrite(me) && view === "firing"
          ? [["", (it) => html`<span class="actions"><${Commands} of=${it} firing=${rows} reload=${reload} /></span>`]]
          : []),
      ]} />`;
}

function Commands({ of, firing, reload }) {
  if (!of.is_firing) return null;
  const acknowledge = ({ note }) => write("POST", `v1/alerts/${encoded(of.id)}/acknowledge`, { note });
  return html`${
    of.acknowledged_by ? null : html`<${Action} label="Acknowledge" title=${`Acknowledge ${of.name}`} act=${acknowledge}
      says=${`Receivers have heard of it. They hear nothing more of this one until it is over. Your name goes into
        the audit log${of.incident_id ? " and into its incident" : ""}; nothing is mended by this.`}
      fields=${[["note", "Note, for whoever looks"]]} done=${reload} />`
  }<${Silence} name=${of.name} firing=${firing} reload=${reload} />`;
}

// A silence by the name of a rule, or by any conditions: NAME=VALUE, NAME!=VALUE, NAME=~PATTERN.
function parsed(text) {
  return text.split(/[\n,]+/).map((it) => it.trim()).filter(Boolean).map((it) => {
    const found = /^(\w+)\s*(=~|!~|!=|=)\s*(.*)$/.exec(it);
    if (!found) throw new Error(`${it}: a condition is NAME=VALUE, NAME!=VALUE, NAME=~PATTERN or NAME!~PATTERN`);
    return { name: found[1], operator: found[2], value: found[3].replace(/^"(.*)"$/, "$1") };
  });
}

function Silence({ name = "", firing, reload }) {
  const much = (firing || []).filter((it) => it.name === name).length;
  const says = name
    ? `${count(much)} alerts of this rule fire now. They, and those to come, tell nobody and open no incident until
      the silence ends. They stay on this page.`
    : `Alerts that fulfil all conditions tell nobody and open no incident until the silence ends;
      ${firing ? `${count(firing.length)} alerts fire now.` : "they stay on this page."}`;
  const act = ({ conditions, hours, reason }) =>
    write("POST", "v1/alert-silences", {
      matchers: parsed(conditions), duration_s: Math.round(3600 * Number(hours)), reason,
    });
  return html`<${Action} label="Silence" title=${name ? `Silence ${name}` : "Silence alerts"} says=${says} act=${act}
    done=${reload} fields=${[
      ["conditions", "Conditions, with commas between", name ? `alertname=${name}` : ""],
      ["hours", "For hours", "2", "number"],
      ["reason", "Why"],
    ]} />`;
}

const fits = (alert, silence) => silence.matchers.every(({ name, operator, value }) => {
  const held = alert.labels[name] ?? "";
  let holds = held === value;
  if (operator.endsWith("~")) try { holds = new RegExp(`^(?:${value})$`).test(held); } catch { return false; }
  return holds !== operator.startsWith("!");
});

function Silences({ data, me, reload }) {
  const now = new Date().toISOString();
  const isOver = (it) => new Date(it.ends_at).toISOString() <= now;
  const much = (it) => (data.alerts?.data || []).filter((alert) => fits(alert, it)).length;
  return html`<${Table} name="Silences" rows=${data.silences.data} empty="There was none." columns=${[
    ["silence", (it) => html`<code>${it.id}</code>`],
    ["conditions", (it) => it.matchers.map((m) => `${m.name}${m.operator}${m.value}`).join(", ")],
    ["why", (it) => it.reason],
    ["by", (it) => it.created_by],
    ["from", (it) => html`<${When} at=${it.starts_at} />`],
    ["until", (it) => html`<${When} at=${it.ends_at} />`],
    ["state", (it) => (isOver(it) ? html`<${Badge}>over<//>`
      : html`<${Badge} tone="warn">silences ${much(it)} now<//>`)],
    ...(mayWrite(me) ? [["", (it) => (isOver(it) ? "" : html`<${Action} label="End" title=${`End ${it.id}`}
      says=${`It ends at once. Of what fires now, ${much(it)} alerts fit it: they tell receivers within seconds, unless
        another silence holds them.`}
      act=${() => write("DELETE", `v1/alert-silences/${encoded(it.id)}`)} done=${reload} />`)]] : []),
  ]} />`;
}

const Told = ({ data }) => html`<${Table} name="Who was told" rows=${data.told.data}
  empty="Nobody was told anything: receivers are those of CONTROL_PLANE__ALERT_RECEIVERS." columns=${[
    ["receiver", (it) => it.receiver],
    ["group", (it) => it.group_key],
    ["of what", (it) => it.status],
    ["state", (it) => html`<${Badge} tone=${{ sent: "good", failed: "bad" }[it.state] || "warn"}>${it.state}<//>`],
    ["tries", (it) => it.attempts, "number"],
    ["at", (it) => html`<${When} at=${it.told_at} />`],
    ["", (it) => it.error],
  ]} />`;

function OneAlert({ id, me }) {
  const { data, problems, isLoading, reload } = useData({
    alert: `v1/alerts/${encoded(id)}`, firing: url("v1/alerts", { is_firing: true }),
  });
  const it = data.alert;
  return html`<${Title} title=${it?.name || id} isLoading=${isLoading}><button onClick=${reload}>Look again</button>${
    it && mayWrite(me) ? html`<${Commands} of=${it} firing=${data.firing?.data} reload=${reload} />` : null
  }<//><${Missing} problems=${problems} />
    ${it ? html`<p><${Severity} rank=${it.rank} /> <${State} of=${it} /> ${it.annotations.summary || ""}</p>
      <p>${it.annotations.description || ""}</p>
      <${Facts} facts=${[
        ["since", html`<${When} at=${it.starts_at} />`],
        [it.is_firing ? "over unless it is reported again by" : "over since", html`<${When} at=${it.ends_at} />`],
        ["acknowledged", it.acknowledged_by && html`${it.acknowledged_by}, <${When} at=${it.acknowledged_at} />`],
        ["note", it.note],
        ["runbook", html`<${Runbook} of=${it} />`],
        ["incident", it.incident_id && html`<${Link} to=${["incidents", it.incident_id]}>${it.incident_id}<//>`],
        ["group", it.group_key],
      ]} />
      <h2>Labels</h2><${Facts} facts=${Object.entries(it.labels)} />` : null}`;
}

export function Incidents(props) {
  return props.id ? html`<${OneIncident} ...${props} />` : html`<${Every} ...${props} />`;
}

const Open = ({ of }) =>
  of.is_open ? html`<${Badge} tone="bad">open<//>` : html`<${Badge} tone="good">closed by ${of.closed_by}<//>`;

function Every({ query }) {
  const asked = { limit: 100, after: query.after, is_open: query.state === "all" ? "" : "true" };
  const { data, problems, isLoading, reload } = useData({ incidents: url("v1/incidents", asked) });
  const found = data.incidents;
  const more = found?.has_more
    ? html`<a href=${href("incidents", "", { ...query, after: found.data[found.data.length - 1].id })}>Older</a>`
    : null;
  return html`<${Title} title="Incidents" isLoading=${isLoading}><button onClick=${reload}>Look again</button
      ><a class="button" href=${href("alerts")}>Alerts</a><//>
    <${Tabs} page="incidents" query=${{ state: query.state }} name="state" standard="open"
      choices=${[["open", "Open"], ["all", "All"]]} />
    <${Missing} problems=${problems} /><${Table} name="Incidents" rows=${found?.data} more=${more}
      empty="There is none: one opens for an alert of severity P1, and for a rollout that was sent back." columns=${[
        ["incident", (it) => html`<${Link} to=${["incidents", it.id]}>${it.title}<//>`],
        ["state", (it) => html`<${Open} of=${it} />`],
        ["opened", (it) => html`<${When} at=${it.opened_at} />`],
        ["closed", (it) => html`<${When} at=${it.closed_at} />`],
        ["of", (it) => it.key],
        ["what it was", (it) => it.text],
      ]} />`;
}

function OneIncident({ id, me }) {
  const { data, problems, isLoading, reload } = useData({
    incident: `v1/incidents/${encoded(id)}`, alerts: url("v1/alerts", { incident_id: id }),
  });
  const it = data.incident;
  const firing = data.alerts?.data.filter((alert) => alert.is_firing).length ?? 0;
  const tell = (what) => ({ text }) => write("POST", `v1/incidents/${encoded(id)}/${what}`, { text });
  const rollout = it?.key.startsWith("rollout/") ? it.key.slice("rollout/".length) : "";
  return html`<${Title} title=${it?.title || id} isLoading=${isLoading}><button onClick=${reload}>Look again</button>${
    it && mayWrite(me) ? html`<${Action} label="Note" title="Add a note" confirm="Add it" act=${tell("notes")}
        says="It stays in the incident, with your name." fields=${[["text", "Note"]]} done=${reload} />
      ${it.is_open ? html`<${Action} label="Close" title="Close the incident" confirm="Close it" act=${tell("close")}
        says=${`${firing ? `${firing} of its alerts still fire, and go on. ` : "None of its alerts fires. "}It is closed
          for good; when an alert of its group fires anew, another one opens.`}
        fields=${[["text", "What it was, and what was done"]]} done=${reload} />` : null}` : null
  }<//><${Missing} problems=${problems} />
    ${it ? html`<p><${Open} of=${it} /></p>${it.text ? html`<${Note} tone="good">${it.text}<//>` : null}
      <${Facts} facts=${[
        ["opened", html`<${When} at=${it.opened_at} />`],
        ["closed", it.closed_at && html`<${When} at=${it.closed_at} />`],
        ["of", rollout ? html`<${Link} to=${["rollouts", rollout]}>${rollout}<//>` : it.key],
      ]} /><h2>What happened</h2><${Table} name="Events" rows=${it.events} columns=${[
        ["at", (row) => html`<${When} at=${row.at} />`],
        ["event", (row) => words(row.kind)],
        ["by", (row) => row.actor || "itself"],
        ["", (row) => row.text],
      ]} />` : null}
    ${data.alerts ? html`<h2>Its alerts</h2><${Table} name="Alerts" rows=${data.alerts.data} columns=${[
      ["alert", (row) => html`<${Link} to=${["alerts", row.id]}>${row.name}<//>`],
      ["state", (row) => html`<${State} of=${row} />`],
      ["of", (row) => labels(row.labels)],
      ["since", (row) => html`<${When} at=${row.starts_at} />`],
      ["runbook", (row) => html`<${Runbook} of=${row} />`],
    ]} />` : null}`;
}
