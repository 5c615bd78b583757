// Models, aliases and adapters; one model with its releases; and where a name is.
import { html } from "../lib.js";
import { url, useData, write } from "../api.js";
import { bytes, count, short, words } from "../format.js";
import { Action, Badge, Facts, Filters, Link, Missing, Table, Tabs, Title, When } from "../ui.js";
import { encoded, go, href } from "../route.js";
import { holds, nextPage } from "./tenants.js";

const VIEWS = [
  ["models", "Models"],
  ["aliases", "Aliases"],
  ["adapters", "Adapters"],
];

export function Models(props) {
  return props.id ? html`<${One} ...${props} />` : html`<${All} ...${props} />`;
}

function All({ query }) {
  const view = query.view || "models";
  const { data, problems, isLoading } = useData({ list: url(`v1/${view}`, { limit: 1000, after: query.after }) });
  const columns = {
    models: [
      ["model", (it) => html`<${Link} to=${["models", it.id]}>${it.id}<//>`],
      ["release", (it) => it.release],
      ["before", (it) => it.previous_release],
      ["owner", (it) => it.owner_tenant_id || "everybody"],
      ["pool", (it) => it.pool_id],
      ["base", (it) => html`<code title=${it.base_digest}>${short(it.base_digest)}</code>`],
      ["adapter", (it) => html`<code title=${it.adapter_digest}>${short(it.adapter_digest)}</code>`],
    ],
    aliases: [
      ["alias", (it) => it.id],
      ["stands for", (it) => html`<${Link} to=${["models", it.target.split("@")[0]]}>${it.target}<//>`],
      ["owner", (it) => it.owner_tenant_id || "everybody"],
    ],
    adapters: [
      ["adapter", (it) => html`<code title=${it.digest}>${short(it.digest)}</code>`],
      ["promoted in", (it) => it.promoted.join(", ")],
      ["releases", (it) => it.releases.join(", ")],
      ["size", (it) => bytes(it.size_bytes), "number"],
      ["tenants", (it) => (it.is_public ? "everybody" : it.tenant_ids.join(", "))],
      ["on nodes", (it) => count(it.node_count), "number"],
      ["uploaded", (it) => (it.created_at ? html`<${When} at=${it.created_at} />` : "no")],
    ],
  }[view];
  const rows = data.list?.data.filter(holds(query, "id", "digest", "target", "owner_tenant_id"));
  return html`<${Title} title="Models" isLoading=${isLoading} /><${Tabs} page="models" query=${{ view }} name="view"
    standard="models" choices=${VIEWS} />
    <${Filters} page="models" query=${query} fields=${[
      ["q", "Name or digest, on this page"],
      ["after", "After id"],
    ]} /><${Missing} problems=${problems} />
    <${Table} key=${view} name=${words(view)} rows=${isLoading ? null : rows} columns=${columns}
      more=${nextPage("models", query, data.list)} />`;
}

const nameOf = (release) => release.id.slice(release.id.lastIndexOf("@") + 1);

function One({ id, me }) {
  const { data, problems, isLoading, reload } = useData({
    model: `v1/models/${encoded(id)}`,
    releases: url("v1/releases", { model_id: id }),
    rollouts: url("v1/rollouts", { model_id: id, limit: 20 }),
  });
  const { model, releases, rollouts } = data;
  const mayWrite = me.role === "admin" || (me.role === "publisher" && model?.owner_tenant_id === me.tenant_id);
  const live = rollouts?.data.find((it) => it.is_live);
  const goBack = live
    ? `The rollout of ${live.canary} is aborted: all requests go to ${live.control}, at once.`
    : `The model stands for ${model?.previous_release || "the release before"} again, at once, for all requests
      that come. Requests that run end where they are.`;
  return html`<${Title} title=${id} isLoading=${isLoading}><a class="button"
    href=${href("requests", "", { model: id })}>Requests</a><a class="button"
    href=${href("usage", "", { model: id })}>Usage</a>
      ${mayWrite && (live || model?.previous_release) ? html`<${Action} label="Go back" tone="danger"
        title=${`Go back: ${id}`} says=${goBack} act=${() => write("POST", `v1/models/${encoded(id)}/rollback`, {})}
        done=${reload} />` : null}<//>
    <${Missing} problems=${problems} />
    ${
      model
        ? html`<${Facts} facts=${[
            ["stands for", model.release],
            ["stood for before", model.previous_release],
            ["owner", model.owner_tenant_id || "everybody"],
            ["pool", model.pool_id],
            ["base", html`<code>${model.base_digest}</code>`],
            ["adapter", model.adapter_digest ? html`<code>${model.adapter_digest}</code>` : ""],
          ]} />`
        : null
    }
    ${
      releases
        ? html`<h2>Releases</h2><${Table} name="Releases" rows=${releases.data} columns=${[
            ["release", nameOf],
            ["", (it) => (nameOf(it) === model?.release ? html`<${Badge} tone="good">now<//>` : "")],
            ["pool", (it) => it.pool_id || "none serves it"],
            ["adapter", (it) => html`<code title=${it.adapter_digest}>${short(it.adapter_digest)}</code>`],
            ...(mayWrite && !live
              ? [
                  [
                    "",
                    (it) =>
                      nameOf(it) === model?.release
                        ? ""
                        : html`<${Action} label="Roll out" title=${`Roll out ${it.id}`}
                          says=${`The release takes over the requests of ${id} in the stages of its plan, is compared
                            with ${model?.release} in each, and is sent back by itself when it is worse.`}
        act=${() => write("POST", "v1/rollouts", { model_id: id, release: nameOf(it) })}
          done=${(found) => go("rollouts", found.id)} />`,
                  ],
                ]
              : []),
          ]} />`
        : null
    }
    ${
      rollouts
        ? html`<h2>Rollouts</h2><${Table} name="Rollouts" rows=${rollouts.data} empty="There was none." columns=${[
            ["rollout", (it) => html`<${Link} to=${["rollouts", it.id]}>${it.id}<//>`],
            ["canary", (it) => it.canary],
            ["control", (it) => it.control],
            ["phase", (it) => words(it.phase)],
            ["why", (it) => it.explanation || it.problem],
          ]} />`
        : null
    }`;
}

// Where a name is: tenants, models and aliases whose id or name holds it, of the first 1,000 each.
export function Search({ query }) {
  const { data, problems, isLoading } = useData({ tenants: "v1/tenants", models: "v1/models", aliases: "v1/aliases" });
  const found = [
    ...(data.tenants?.data.filter(holds(query, "id", "name")) || []).map((it) => [
      "tenant",
      it.id,
      it.name,
      ["tenants", it.id],
    ]),
    ...(data.models?.data.filter(holds(query, "id", "adapter_digest", "base_digest")) || []).map((it) => [
      "model",
      it.id,
      it.release,
      ["models", it.id],
    ]),
    ...(data.aliases?.data.filter(holds(query, "id")) || []).map((it) => [
      "alias",
      it.id,
      it.target,
      ["models", it.target.split("@")[0]],
    ]),
  ];
  const q = query.q || "";
  return html`<${Title} title=${`Names with ${q}`} isLoading=${isLoading} /><${Missing} problems=${problems} />
    <${Table} name="Found"
      rows=${isLoading ? null : [...found, ["request, if it is an id", q, "", ["requests", q]],
        ["rollout, if it is an id", q, "", ["rollouts", q]]]} columns=${[
      ["what", (it) => it[0]],
      ["id", (it) => html`<${Link} to=${it[3]}>${it[1]}<//>`],
      ["", (it) => it[2]],
    ]} />`;
}
