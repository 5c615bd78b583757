// Rules on texts, by set: what acts, what is in shadow; and batches of requests with their progress.
import { html } from "../lib.js";
import { url, useData, write } from "../api.js";
import { count, NONE, time, words } from "../format.js";
import { Action, Badge, Bar, Facts, Filters, Link, Missing, Table, Title, When } from "../ui.js";
import { encoded, href } from "../route.js";

export function Rules(props) {
  return props.id ? html`<${OneSet} ...${props} />` : html`<${Sets} ...${props} />`;
}

const Acting = ({ of }) => {
  if (!of.active_version) return html`<${Badge} tone="warn">version ${of.version} in shadow, none acts<//>`;
  return of.active_version === of.version
    ? html`<${Badge} tone="good">version ${of.version} acts<//>`
    : html`<${Badge} tone="warn">version ${of.active_version} acts, ${of.version} is in shadow<//>`;
};

function Sets({ query }) {
  const { data, problems, isLoading } = useData({
    sets: url("v1/guard-sets", { limit: 1000, owner_tenant_id: query.tenant }),
  });
  return html`<${Title} title="Rules on texts" isLoading=${isLoading} /><${Filters} page="rules" query=${query}
      fields=${[["tenant", "Tenant"]]} /><${Missing} problems=${problems} />
    <${Table} name="Rule sets" rows=${data.sets?.data} columns=${[
      ["set", (it) => html`<${Link} to=${["rules", it.id]}>${it.id}<//>`],
      ["tenant", (it) => html`<${Link} to=${["tenants", it.owner_tenant_id]}>${it.owner_tenant_id}<//>`],
      ["rules", (it) => count(it.rules.length), "number"],
      ["state", (it) => html`<${Acting} of=${it} />`],
      ["models", (it) => it.models.join(", ") || "all of the tenant's"],
      ["keys", (it) => it.keys.join(", ") || "all of the tenant's"],
    ]} />`;
}

const FIELDS = ["owner_tenant_id", "models", "keys", "rules"];

function OneSet({ id, me }) {
  const { data, problems, isLoading, reload } = useData({ set: `v1/guard-sets/${encoded(id)}` });
  const it = data.set;
  const act = (version) => () => write("PUT", `v1/guard-sets/${encoded(id)}`, {
    ...Object.fromEntries(FIELDS.map((name) => [name, it[name]])), active_version: version,
  });
  const found = ({ words: them, named, expression }) =>
    them.length ? `${count(them.length)} words: ${them.slice(0, 20).join(", ")}` : named || expression;
  const whose = it ? `requests of ${it.owner_tenant_id}${it.models.length ? ` to ${it.models.join(", ")}` : ""}` : "";
  return html`<${Title} title=${id} isLoading=${isLoading}><button onClick=${reload}>Look again</button>${
    it && me.role === "admin" ? html`${it.active_version !== it.version ? html`<${Action} label="Let it act"
        title=${`Version ${it.version} of ${id} acts`} act=${act(it.version)} done=${reload}
        says=${`Its ${it.rules.length} rules act on all ${whose} within a second: they cut, replace or refuse texts.
          Until now they were only counted.`} />` : null}
      ${it.active_version ? html`<${Action} label="Stop" tone="danger" title=${`Stop ${id}`} act=${act(0)}
        done=${reload}
        says=${`No rule of this set acts on ${whose} any more, within a second. They go on being counted.`} />` : null}`
      : null
  }<//><${Missing} problems=${problems} />
    ${it ? html`<p><${Acting} of=${it} /></p><${Facts} facts=${[
      ["tenant", it.owner_tenant_id], ["models", it.models.join(", ") || "all"], ["keys", it.keys.join(", ") || "all"],
    ]} /><h2>Rules of version ${it.version}</h2><${Table} name="Rules" rows=${it.rules} columns=${[
      ["rule", (rule) => rule.id],
      ["does", (rule) => words(rule.action)],
      ["finds", (rule) => html`<code>${found(rule)}</code>`],
      ["in", (rule) => rule.targets.map(words).join(", ")],
      ["puts", (rule) => rule.replacement || NONE],
    ]} /><p class="hint"><code>sluice guard</code> writes rules; metrics count what each finds.</p>` : null}`;
}

const TONES = { completed: "good", failed: "bad", expired: "bad", cancelled: "warn" };
const STATES = ["", "validating", "in_progress", "finalizing", "completed", "failed", "expiring", "expired",
  "cancelling", "cancelled"];
const Status = ({ of }) => html`<${Badge} tone=${TONES[of.status] || "plain"}>${words(of.status)}<//>`;
const Progress = ({ of }) => (of.total ? html`<${Bar} share=${(of.completed + of.failed) / of.total}
  label=${`${count(of.completed + of.failed)} of ${count(of.total)} lines are done`} />` : NONE);

export function Batches(props) {
  return props.id ? html`<${OneBatch} ...${props} />` : html`<${Every} ...${props} />`;
}

function Every({ query }) {
  const asked = { limit: 100, tenant: query.tenant, status: query.status, before: query.before };
  const { data, problems, isLoading, reload } = useData({ batches: url("data/batches", asked) });
  const found = data.batches;
  const more = found?.has_more ? html`<a
    href=${href("batches", "", { ...query, before: found.data[found.data.length - 1].number })}>Older</a>` : null;
  return html`<${Title} title="Batches" isLoading=${isLoading}><button onClick=${reload}>Look again</button><//>
    <${Filters} page="batches" query=${{ ...query, before: "" }}
      fields=${[["tenant", "Tenant"], ["status", "Status", STATES]]} /><${Missing} problems=${problems} />
    <${Table} name="Batches" rows=${found?.data} more=${more} empty="No batch fits." columns=${[
      ["batch", (it) => html`<${Link} to=${["batches", it.id]}>${it.id}<//>`],
      ["tenant", (it) => html`<${Link} to=${["tenants", it.tenant_id]}>${it.tenant_id}<//>`],
      ["status", (it) => html`<${Status} of=${it} />`],
      ["done", (it) => html`<${Progress} of=${it} />`],
      ["lines", (it) => count(it.total), "number"],
      ["failed", (it) => count(it.failed), "number"],
      ["asks for", (it) => it.endpoint],
      ["made", (it) => time(it.created_at_unix_ms)],
      ["ends at the latest", (it) => time(it.expires_at_unix_ms)],
    ]} />`;
}

function OneBatch({ id }) {
  const { data, problems, isLoading, reload } = useData({ batch: `data/batches/${encoded(id)}` });
  const it = data.batch;
  return html`<${Title} title=${id} isLoading=${isLoading}><button onClick=${reload}>Look again</button><//>
    <${Missing} problems=${problems} />
    ${it ? html`<p><${Status} of=${it} /> <${Progress} of=${it} /></p><${Facts} facts=${[
      ["tenant", html`<${Link} to=${["tenants", it.tenant_id]}>${it.tenant_id}<//>`],
      ["key", html`<code>${it.key_id}</code>`],
      ["lines", count(it.total)], ["answered", count(it.completed)], ["failed", count(it.failed)],
      ["asks for", it.endpoint],
      ["input", html`<code>${it.input_file_id}</code>`],
      ["answers", it.output_file_id && html`<code>${it.output_file_id}</code>`],
      ["errors", it.error_file_id && html`<code>${it.error_file_id}</code>`],
      ["ends at the latest", time(it.expires_at_unix_ms)],
    ]} /><h2>What happened</h2><${Table} name="Statuses"
      rows=${[["made", it.created_at_unix_ms], ...Object.entries(it.reached_at_unix_ms)].sort((a, b) => a[1] - b[1])}
      columns=${[
        ["at", (row) => html`<${When} at=${new Date(row[1]).toISOString()} />`],
        ["status", (row) => words(row[0])],
      ]} /><p class="hint">It goes on when this page is closed. Its tenant cancels it
      over <code>/v1/batches</code>.</p>` : null}`;
}
