// Tenants, one tenant with its keys, and what may be done to them.
import { html, useState } from "../lib.js";
import { url, useData, write } from "../api.js";
import { count, NONE, time } from "../format.js";
import { Action, Badge, Bar, Facts, Filters, Link, Missing, Secret, Table, Title, When } from "../ui.js";
import { encoded, href } from "../route.js";

export function Tenants(props) {
  return props.id ? html`<${One} ...${props} />` : html`<${All} ...${props} />`;
}

// Some 1,000 rows at a time: the next page is one of its own, and the URL says which.
export const nextPage = (page, query, list) =>
  list?.has_more
    ? html`<a
      href=${href(page, "", { ...query, after: list.data[list.data.length - 1].id })}>The
        next ${count(list.data.length)}</a>`
    : null;
export const holds =
  (query, ...names) =>
  (row) =>
    !query.q ||
    names.some((name) =>
      String(row[name] ?? "")
        .toLowerCase()
        .includes(query.q.toLowerCase()),
    );

function All({ query, me }) {
  const { data, problems, isLoading } = useData({ tenants: url("v1/tenants", { limit: 1000, after: query.after }) });
  const rows = data.tenants?.data.filter(holds(query, "id", "name"));
  return html`<${Title} title="Tenants" isLoading=${isLoading} /><${Filters} page="tenants" query=${query} fields=${[
    ["q", "Id or name, on this page"],
    ["after", "After id"],
  ]} /><${Missing} problems=${problems} />
    <${Table} name="Tenants" rows=${rows} empty="No tenant fits." more=${nextPage("tenants", query, data.tenants)}
      columns=${[
      ["tenant", (it) => html`<${Link} to=${["tenants", it.id]}>${it.id}<//>`],
      ["name", (it) => it.name],
      ["tier", (it) => it.tier_id],
      ["weight", (it) => it.weight, "number"],
      [
        "state",
        (it) => (it.is_disabled ? html`<${Badge} tone="bad">disabled<//>` : html`<${Badge} tone="good">active<//>`),
      ],
      ["limits of its own", (it) => limits(it.limits)],
    ]} />`;
}

const limits = (them) =>
  Object.entries(them || {})
    .map(([name, it]) => `${name} ${count(it)}`)
    .join(", ") || NONE;

function One({ id, me }) {
  const to = new Date(Math.ceil(Date.now() / 3600000) * 3600000);
  const from = new Date(to - 86400000);
  const { data, problems, isLoading, reload } = useData({
    tenant: `v1/tenants/${encoded(id)}`,
    keys: `v1/tenants/${encoded(id)}/keys`,
    usage: url("data/usage", { tenant: id, granularity: "hour", from: from.toISOString(), to: to.toISOString() }),
  });
  const [secret, show] = useState("");
  const { tenant, keys, usage } = data;
  const mayWrite = me.role === "admin";
  const used = {};
  for (const row of usage?.data || []) {
    const of = (used[row.key_id] ??= { requests: 0, tokens: 0, last: "", top: 0 });
    of.requests += row.requests;
    of.tokens += row.prompt_tokens + row.output_tokens;
    of.top = Math.max(of.top, (row.prompt_tokens + row.output_tokens) / 60);
    if (row.start > of.last) of.last = row.start;
  }
  const made = (found) => {
    show(found.key);
    reload();
  };
  const path = `v1/tenants/${encoded(id)}/keys`;
  return html`<${Title} title=${tenant?.name || id} isLoading=${isLoading}>
      <a class="button" href=${href("requests", "", { tenant: id })}>Requests</a><a class="button"
        href=${href("usage", "", { tenant: id })}>Usage</a><a class="button"
        href=${href("budgets", "", { tenant: id })}>Budgets</a>
      ${
        mayWrite && tenant
          ? html`<${Action} label=${tenant.is_disabled ? "Enable" : "Disable"}
            tone=${tenant.is_disabled ? "" : "danger"} title=${`${tenant.is_disabled ? "Enable" : "Disable"} ${id}`}
            done=${reload}
        says=${tenant.is_disabled ? `Its ${keys?.data.length ?? "?"} keys work again within a second.`
          : `Within a second, gateways refuse all ${keys?.data.length ?? "?"} keys of this tenant. Requests that run
          end normally. Nothing is deleted.`}
        act=${() => write("PUT", `v1/tenants/${encoded(id)}`,
          { ...tenant, id: undefined, is_disabled: !tenant.is_disabled })} />`
          : null
      }<//>
    <${Missing} problems=${problems} />
    ${
      tenant
        ? html`<${Facts} facts=${[
            ["id", html`<code>${tenant.id}</code>`],
            ["tier", tenant.tier_id],
            ["weight", tenant.weight],
            ["limits of its own", limits(tenant.limits)],
            [
              "pins",
              Object.entries(tenant.pins)
                .map((it) => it.join("@"))
                .join(", "),
            ],
            [
              "fallbacks",
              Object.entries(tenant.fallbacks)
                .map((it) => it.join(" → "))
                .join(", "),
            ],
            [
              "state",
              tenant.is_disabled ? html`<${Badge} tone="bad">disabled<//>` : html`<${Badge} tone="good">active<//>`,
            ],
          ]} />`
        : null
    }
    ${
      keys
        ? html`<header class="title"><h2>Keys</h2><div class="actions">${
            mayWrite
              ? html`<${Action} label="Make a key"
                says="The new key works within a second, with the tenant's limits. Its text is shown once."
                fields=${[["expires", "Ends on (UTC, empty: never)", "", "date"]]}
        act=${({ expires }) => write("POST", path, { expires_at_unix_ms: expires ? Date.parse(expires) : 0 })}
          done=${made} />`
              : null
          }</div></header>
    <${Table} name="Keys" rows=${keys.data} empty="This tenant has no key." columns=${[
      ["key", (it) => html`<code>${it.id}</code>`],
      ["made", (it) => html`<${When} at=${it.created_at} />`],
      ["ends", (it) => (it.expires_at_unix_ms ? time(it.expires_at_unix_ms) : "never")],
      [
        "state",
        (it) =>
          it.is_disabled
            ? html`<${Badge} tone="bad">disabled<//>`
            : it.expires_at_unix_ms && it.expires_at_unix_ms < Date.now()
              ? html`<${Badge} tone="warn">ended<//>`
              : html`<${Badge} tone="good">works<//>`,
      ],
      ["last used (hour, UTC)", (it) => (used[it.id]?.last ? time(used[it.id].last).slice(0, 16) : "not in a day")],
      ["requests, 24 h", (it) => count(used[it.id]?.requests || 0), "number"],
      ["tokens, 24 h", (it) => count(used[it.id]?.tokens || 0), "number"],
      [
        "limits",
        (it) => limits(Object.fromEntries(me.limits.filter((name) => it[name]).map((name) => [name, it[name]]))),
      ],
      [
        "tokens a minute, top hour",
        (it) =>
          it.tpm
            ? html`<${Bar} share=${(used[it.id]?.top || 0) / it.tpm}
              label=${`${Math.round(used[it.id]?.top || 0)} of ${it.tpm}`} />`
            : NONE,
      ],
      ...(mayWrite
        ? [
            [
              "",
              (it) =>
                html`<span class="actions"><${KeyActions} path=${`${path}/${it.id}`} it=${it} used=${used[it.id]}
                  made=${made} reload=${reload} /></span>`,
            ],
          ]
        : []),
    ]} />`
        : null
    }
    ${secret ? html`<${Secret} text=${secret} onClose=${() => show("")} />` : null}`;
}

function KeyActions({ path, it, used, made, reload }) {
  const much = `In the last 24 h it had ${count(used?.requests || 0)} requests.`;
  return html`<${Action} label="Rotate" title=${`Rotate ${it.id}`}
    says=${`A new key with the same limits is made and shown once. The old one ends after the grace. ${much}`}
    fields=${[["hours", "Grace, in hours", "24", "number"]]}
      act=${({ hours }) => write("POST", `${path}/rotate`, { grace_s: Math.round(3600 * Number(hours)) })}
        done=${made} />
    <${Action} label=${it.is_disabled ? "Enable" : "Disable"}
      title=${`${it.is_disabled ? "Enable" : "Disable"} ${it.id}`}
      says=${it.is_disabled ? "It works again within a second."
        : `Gateways refuse it within a second; it can be enabled again. ${much}`} act=${() => write("PATCH", path,
        { is_disabled: !it.is_disabled })} done=${reload} />
    <${Action} label="Revoke" tone="danger" title=${`Revoke ${it.id}`}
      says=${`It is deleted, for good, and gateways refuse it within a second. ${much}`}
      act=${() => write("DELETE", path)} done=${reload} />`;
}
