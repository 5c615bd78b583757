// The audit log, quality of answers, and admin keys.
import { html, useState } from "../lib.js";
import { url, useData, write } from "../api.js";
import { count, NONE, time, words } from "../format.js";
import { Action, Badge, Filters, Missing, Secret, Table, Title, When } from "../ui.js";
import { encoded, href } from "../route.js";

function changes({ before, after }) {
  const names = [...new Set([...Object.keys(before || {}), ...Object.keys(after || {})])];
  const text = (value) =>
    value === undefined ? NONE : typeof value === "object" ? JSON.stringify(value) : String(value);
  if (!before || !after) return [];
  return names
    .filter((name) => text(before[name]) !== text(after[name]))
    .map((name) => `${name}: ${text(before[name])} → ${text(after[name])}`);
}

export function Audit({ query }) {
  const { data, problems, isLoading } = useData({
    audit: url("v1/audit", {
      limit: 100,
      actor: query.actor,
      kind: query.kind,
      object_id: query.object,
      since: query.since,
      after: query.after,
    }),
  });
  const found = data.audit;
  const older = found?.has_more
    ? html`<a href=${href("audit", "", { ...query, after: found.data[found.data.length - 1].id })}>Older</a>`
    : null;
  return html`<${Title} title="Audit" isLoading=${isLoading} /><${Filters} page="audit"
    query=${{ ...query, after: "" }} fields=${[
    ["actor", "By (id)"],
    ["kind", "Kind"],
    ["object", "Object"],
    ["since", "Since, as 2030-12-31T00:00:00Z"],
  ]} /><${Missing} problems=${problems} />
    <${Table} name="Audit" rows=${found?.data} empty="Nothing was written that fits." more=${older} columns=${[
      ["at", (it) => html`<${When} at=${it.at} />`],
      [
        "by",
        (it) =>
          html`${it.actor_name ? `${it.actor_name}, ` : ""}<a href=${href("audit", "", { actor: it.actor_id })}>
            ${it.actor_id}</a>`,
      ],
      ["role", (it) => it.actor_role],
      ["did", (it) => it.action],
      ["kind", (it) => it.kind],
      ["object", (it) => html`<a href=${href("audit", "", { object: it.object_id })}>${it.object_id}</a>`],
      [
        "outcome",
        (it) => html`<${Badge} tone=${it.outcome === "done" ? "good" : "bad"}>${words(it.outcome)}<//> ${it.detail}`,
      ],
      [
        "change",
        (it) =>
          it.before || it.after
            ? html`${changes(it).map((text) => html`<div>${text}</div>`)}<details><summary>all of it</summary><pre>
              ${JSON.stringify({ before: it.before, after: it.after }, null, 1)}</pre></details>`
            : "",
      ],
      ["request", (it) => html`<code>${it.request_id}</code>`],
    ]} />`;
}

export function Quality({ id, query, me }) {
  const { data, problems, isLoading, reload } = useData({
    quarantines: url("v1/quarantines", { limit: 100 }),
    results: url("v1/golden-results", { pool_id: query.pool }),
  });
  const mayLift = me.role !== "viewer";
  const rows = data.quarantines?.data.filter((it) => !id || it.id === id);
  return html`<${Title} title="Quality" isLoading=${isLoading}><button onClick=${reload}>Look again</button><//>
    <${Missing} problems=${problems} />
    <h2>Quarantines</h2><${Table} name="Quarantines" rows=${rows} empty="No replica was ever put into quarantine."
      columns=${[
      ["quarantine", (it) => it.id],
      ["replica", (it) => it.replica_id],
      ["pool", (it) => it.pool_id],
      ["why", (it) => it.reason],
      ["since", (it) => html`<${When} at=${it.created_at} />`],
      [
        "state",
        (it) =>
          it.released_at ? html`<${Badge}>lifted by ${it.released_by}<//>` : html`<${Badge} tone="bad">in force<//>`,
      ],
      [
        "evidence",
        (it) => html`<details><summary>all of it</summary><pre>${JSON.stringify(it.evidence, null, 1)}</pre></details>`,
      ],
      ...(mayLift
        ? [
            [
              "",
              (it) =>
                it.released_at
                  ? ""
                  : html`<${Action} label="Lift" title=${`Lift ${it.id}`}
                    says="It was a false alarm: the replica serves again if it still runs,
                      and what it answered no longer speaks against it."
                    act=${() => write("POST", `v1/quarantines/${encoded(it.id)}/release`, {})} done=${reload} />`,
            ],
          ]
        : []),
    ]} />
    <h2>Golden prompts: the last answers</h2><${Filters} page="quality" query=${query} fields=${[["pool", "Pool"]]} />
      <${Table} name="Answers" rows=${data.results?.data} empty="No replica has been asked yet." columns=${[
      ["pool", (it) => it.pool_id],
      ["replica", (it) => it.replica_id],
      ["prompt", (it) => it.asking_id],
      ["asked", (it) => time(it.asked_at_unix_ms)],
      [
        "verdict",
        (it) =>
          it.error
            ? html`<${Badge} tone="bad">${it.error}<//>`
            : it.differs_in
              ? html`<${Badge} tone="bad">differs in ${it.differs_in}<//>`
              : html`<${Badge} tone="good">as the others<//>`,
      ],
      ["deviations", (it) => count(it.deviations), "number"],
      ["right by", (it) => words(it.source || NONE)],
    ]} />`;
}

export function Access({ me }) {
  const { data, problems, isLoading, reload } = useData({ keys: "v1/admin-keys" });
  const [secret, show] = useState("");
  const made = (found) => {
    show(found.key);
    reload();
  };
  const mayWrite = me.role === "admin";
  const make = ({ name, role, tenant, expires }) =>
    write("POST", "v1/admin-keys", {
      name,
      role,
      tenant_id: tenant,
      expires_at_unix_ms: expires ? Date.parse(expires) : 0,
    });
  return html`<${Title} title="Admin keys" isLoading=${isLoading}>${
    mayWrite
      ? html`<${Action} label="Make a key"
        says="It can do what its role may, here and over the admin REST, until it ends. Its text is shown once."
        fields=${[
          ["name", "Name"],
          ["role", "Role: viewer, operator, publisher or admin", "viewer"],
          ["tenant", "Tenant, of a publisher"],
          ["expires", "Ends on (UTC, empty: never)", "", "date"],
        ]} act=${make} done=${made} />`
      : null
  }<//><${Missing} problems=${problems} />
    <${Table} name="Admin keys" rows=${data.keys?.data} empty="There is only the key of the settings." columns=${[
      ["key", (it) => html`<code>${it.id}</code>`],
      ["name", (it) => it.name],
      ["role", (it) => it.role],
      ["tenant", (it) => it.tenant_id],
      ["made", (it) => html`<${When} at=${it.created_at} />`],
      ["ends", (it) => (it.expires_at_unix_ms ? time(it.expires_at_unix_ms) : "never")],
      [
        "state",
        (it) => (it.is_disabled ? html`<${Badge} tone="bad">disabled<//>` : html`<${Badge} tone="good">works<//>`),
      ],
      ...(mayWrite
        ? [
            [
              "",
              (
                it,
              ) => html`<span class="actions"><${Action} label=${it.is_disabled ? "Enable" : "Disable"}
                title=${`${it.is_disabled ? "Enable" : "Disable"} ${it.id}`}
                says=${it.is_disabled ? "It works again at once."
                  : "It is refused at once, and its sessions end; it can be enabled again."}
                  act=${() => write("PATCH", `v1/admin-keys/${encoded(it.id)}`, { is_disabled: !it.is_disabled })}
                  done=${reload} />
        <${Action} label="Revoke" tone="danger" title=${`Revoke ${it.id}`}
          says="It is deleted for good, and its sessions end at once."
          act=${() => write("DELETE", `v1/admin-keys/${encoded(it.id)}`)} done=${reload} /></span>`,
            ],
          ]
        : []),
    ]} />${secret ? html`<${Secret} text=${secret} onClose=${() => show("")} />` : null}`;
}
