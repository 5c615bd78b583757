// Tools that gateways call for models, and the policies by which `auto` chooses a model.
import { html } from "../lib.js";
import { url, useData, write } from "../api.js";
import { bytes, count, NONE, percent, words } from "../format.js";
import { Action, Badge, Facts, Filters, Link, Missing, Table, Title } from "../ui.js";
import { encoded } from "../route.js";

const tenant = (id) => html`<${Link} to=${["tenants", id]}>${id}<//>`;
const some = (names) => names.join(", ") || "all of the tenant's";
const Asks = ({ of }) =>
  of.approval === "always" ? html`<${Badge}>asks first<//>` : html`<${Badge} tone="warn">${words(of.approval)}<//>`;

export function Tools(props) {
  return props.id ? html`<${OneTool} ...${props} />` : html`<${EveryTool} ...${props} />`;
}

function EveryTool({ query }) {
  const { data, problems, isLoading } = useData({
    tools: url("v1/tools", { limit: 1000, owner_tenant_id: query.tenant }),
  });
  return html`<${Title} title="Server tools" isLoading=${isLoading} /><${Filters} page="tools" query=${query}
      fields=${[["tenant", "Tenant"]]} /><${Missing} problems=${problems} />
    <${Table} name="Tools" rows=${data.tools?.data} empty="No tool fits: sluice tools set makes one." columns=${[
      ["tool", (it) => html`<${Link} to=${["tools", it.id]}>${it.id}<//>`],
      ["tenant", (it) => tenant(it.owner_tenant_id)],
      ["name", (it) => html`<code>${it.name}</code>`],
      ["kind", (it) => words(it.kind)],
      ["approval", (it) => html`<${Asks} of=${it} />`],
      ["models", (it) => some(it.models)],
    ]} />`;
}

function OneTool({ id, me }) {
  const path = `v1/tools/${encoded(id)}`;
  const { data, problems, isLoading, reload } = useData({ tool: path });
  const it = data.tool;
  return html`<${Title} title=${id} isLoading=${isLoading}><button onClick=${reload}>Look again</button>${
    it && me.role === "admin" ? html`<${Action} label="Remove" tone="danger" title=${`Remove ${id}`}
      says=${`Within a second no model of ${it.owner_tenant_id} can call ${it.name} any more; requests that name it are
        refused. Calls that run go on to their end. Its secrets are forgotten.`}
      act=${() => write("DELETE", path)} done=${() => (location.hash = "#/tools")} />` : null
  }<//><${Missing} problems=${problems} />
    ${it ? html`<p>${it.description}</p><${Facts} facts=${[
      ["tenant", tenant(it.owner_tenant_id)],
      ["name for models", html`<code>${it.name}</code>`],
      ["kind", words(it.kind)],
      ["called at", html`<code>${it.method.toUpperCase()} ${it.url}</code>`],
      ["approval", html`<${Asks} of=${it} />`],
      ["may be called twice", it.is_idempotent ? "yes" : "no"],
      ["deadline, ms", count(it.timeout_ms)],
      ["largest result", bytes(it.result_bytes_max)],
      ["price of a call, millionths", count(it.price_micros)],
      ["models", some(it.models)],
      ["keys", some(it.keys)],
      ["tools of its server", it.kind === "mcp" ? it.allowed_tools.join(", ") || "all" : NONE],
      ["secret headers", Object.keys(it.secret_headers).join(", ") || NONE],
    ]} /><h2>Parameters</h2><pre>${JSON.stringify(it.parameters, null, 1)}</pre>
    <p class="hint">Secrets are never shown. <code>sluice tools set</code> changes a tool.</p>` : null}`;
}

export function Auto(props) {
  return props.id ? html`<${OnePolicy} ...${props} />` : html`<${EveryPolicy} ...${props} />`;
}

const names = (it) => it.candidates.map((one) => one.model).join(", ");
const Pinned = ({ of }) => (of.pin ? html`<${Badge} tone="warn">${of.pin} answers all<//>` : "chooses");
const price = (it) => (it ? String(it) : "none");

function EveryPolicy() {
  const { data, problems, isLoading } = useData({ policies: url("v1/auto-policies", { limit: 1000 }) });
  return html`<${Title} title="Automatic choice" isLoading=${isLoading} /><${Missing} problems=${problems} />
    <${Table} name="Policies" rows=${data.policies?.data} empty="No tenant has one: sluice auto set makes one."
      columns=${[
        ["tenant", (it) => html`<${Link} to=${["auto", it.id]}>${it.id}<//>`],
        ["state", (it) => html`<${Pinned} of=${it} />`],
        ["models", names],
        ["least quality", (it) => percent(it.quality_min), "number"],
        ["explores", (it) => percent(it.explored_share), "number"],
      ]} />`;
}

function OnePolicy({ id }) {
  const { data, problems, isLoading, reload } = useData({ policy: `v1/auto-policies/${encoded(id)}` });
  const it = data.policy;
  return html`<${Title} title=${`Automatic choice of ${id}`} isLoading=${isLoading}>
      <button onClick=${reload}>Look again</button><//><${Missing} problems=${problems} />
    ${it ? html`<${Facts} facts=${[
      ["tenant", tenant(it.id)],
      ["state", html`<${Pinned} of=${it} />`],
      ["dearest turn", price(it.price_max)],
      ["least quality", percent(it.quality_min)],
      ["price of a second of waiting", price(it.second_price)],
      ["price of a bad answer", price(it.miss_price)],
      ["new conversations that try another model", percent(it.explored_share)],
      ["tiers that wait for a full pool, from priority", count(it.queue_priority_min)],
    ]} /><h2>Models to choose from</h2><${Table} name="Models" rows=${it.candidates} columns=${[
      ["model", (one) => html`<code>${one.model}</code>`],
      ["prompt", (one) => price(one.prompt_price), "number"],
      ["cached prompt", (one) => price(one.cached_price), "number"],
      ["output", (one) => price(one.output_price), "number"],
      ["known quality", (one) => one.published || (one.quality ? percent(one.quality) : NONE)],
    ]} /><p class="hint">Prices are for a million tokens. <code>sluice auto</code> changes a policy, and pins one
      model at once.</p>` : null}`;
}
