// The newest requests, and one request: where its time went, and why it ran where it ran.
import { html } from "../lib.js";
import { url, useData } from "../api.js";
import { count, NONE, ms, short, us, words } from "../format.js";
import { Badge, Facts, Filters, Link, Missing, Note, Table, Title, When } from "../ui.js";
import { encoded } from "../route.js";

const STATUSES = [
  ["", "any"],
  ["200-399", "ended well"],
  ["400-499", "refused"],
  ["500-599", "failed"],
];
const tone = (status) => (status >= 500 ? "bad" : status >= 400 ? "warn" : "good");

export function Requests(props) {
  return props.id ? html`<${One} ...${props} />` : html`<${Newest} ...${props} />`;
}

function Newest({ query }) {
  const { tenant, key, model, status, since } = query;
  const { data, problems, isLoading, reload } = useData({
    requests: url("data/requests", { tenant, key, model, status, since, limit: 100 }),
  });
  const rows = data.requests?.data;
  return html`<${Title} title="Requests" isLoading=${isLoading}><button onClick=${reload}>Look again</button><//>
    <${Filters} page="requests" query=${query} fields=${[
      ["tenant", "Tenant"],
      ["key", "Key"],
      ["model", "Model"],
      ["status", "Outcome", STATUSES],
      ["since", "Since (UTC)"],
    ]} />
    <${Missing} problems=${problems} />
    <${Table} name="Requests" rows=${rows} empty="No request fits."
      more=${rows?.length === 100 ? "The newest 100; narrow it to see others." : ""} columns=${[
      ["received", (it) => html`<${When} at=${it.received_at} />`],
      [
        "request",
        (it) => html`<${Link} to=${["requests", it.request_id, { tenant: it.tenant_id }]}>${it.request_id}<//>`,
      ],
      ["tenant", (it) => html`<${Link} to=${["tenants", it.tenant_id]}>${it.tenant_id}<//>`],
      ["model", (it) => it.model],
      ["outcome", (it) => html`<${Badge} tone=${tone(it.status)}>${words(it.outcome)}<//>`],
      ["prompt", (it) => count(it.prompt_tokens), "number"],
      ["answer", (it) => count(it.output_tokens), "number"],
      ["TTFT", (it) => (it.ttft_us ? us(it.ttft_us) : NONE), "number"],
      ["total", (it) => us(it.total_us), "number"],
    ]} />`;
}

// Lengths follow one another: what they have in common is one axis. [name, from, to, is inner].
function lengths(it) {
  const load = it.load_us || 0;
  return [
    ["queue", it.queue_us],
    ["adapter load", load],
    ["batch", Math.max(0, it.engine_queue_us - load)],
    ["prefill", it.prefill_us],
  ];
}

function chain(found, at, until, parts, inner) {
  let now = at;
  for (const [name, length] of parts) {
    const end = Math.min(now + length, until);
    if (end > now) found.push([name, now, end, inner]);
    now = Math.max(now, end);
  }
  return now;
}

export function stages(row, attempts) {
  const found = [];
  const total = Math.max(row.total_us, row.ttft_us, row.gateway_us);
  if (attempts.length > 1) {
    found.push(["gateway", 0, Math.min(row.gateway_us, attempts[0].submitted_us), false]);
    for (const it of attempts) {
      const end = Math.max(it.submitted_us, it.ended_us);
      found.push([`${row.choices > 1 ? `answer ${it.part}, ` : ""}attempt ${it.number}`, it.submitted_us, end, false]);
      const first = it.first_us || end;
      const now = it.replica_id ? chain(found, it.submitted_us, first, lengths(it), true) : it.submitted_us;
      if (first > now) found.push([it.first_us ? "first token" : "no token", now, first, true]);
      if (it.first_us && end > first) found.push(["decode", first, end, true]);
    }
    return found;
  }
  const first = row.is_stream && row.ttft_us ? row.ttft_us : total;
  const now = chain(
    found,
    0,
    first,
    [["gateway", row.gateway_us || total], ...(row.replica_id && !row.resumes ? lengths(row) : [])],
    false,
  );
  if (first > now)
    found.push([row.replica_id ? (first === total ? "decode" : "first token") : "not placed", now, first, false]);
  if (total > first) found.push(["decode", first, total, false]);
  return found;
}

function Timeline({ row, attempts }) {
  const bars = stages(row, attempts);
  const total = Math.max(1, ...bars.map((it) => it[2]));
  const said = bars.map(([name, from, to]) => `${name} ${us(to - from)}`).join(", ");
  return html`<svg class="timeline" viewBox="0 0 800 ${bars.length * 22 + 4}" role="img"
    aria-label=${`Timeline: ${said}`}>
    ${bars.map(
      (
        [name, from, to, inner],
        at,
      ) => html`<g transform="translate(0 ${at * 22})"><text x=${inner ? 12 : 0} y="15">${name}</text>
      <rect class=${inner ? "inner" : ""} x=${120 + (from / total) * 560} y="4"
        width=${Math.max(2, ((to - from) / total) * 560)} height="14" rx="2" /><text x="690" y="15">${us(to - from)}
        </text></g>`,
    )}</svg>`;
}

function One({ id, query, me }) {
  const { data, problems, isLoading, reload } = useData({
    request: url(`data/requests/${encoded(id)}`, { tenant: query.tenant }),
  });
  const found = data.request;
  return html`<${Title} title=${id} isLoading=${isLoading}><button onClick=${reload}>Look again</button><//>
    <${Missing} problems=${problems} />${found ? html`<${Told} found=${found} me=${me} />` : null}`;
}

function Told({ found, me }) {
  const { request: row, attempts } = found;
  const seesFleet = me.role !== "publisher";
  return html`<p><${Badge} tone=${tone(row.status)}>${words(row.outcome)} ${row.status || ""}<//> received <${When}
    at=${row.received_at} />
    ${row.total_us ? `, took ${us(row.total_us)}` : ""}${row.resumes
      ? `, resumed ${row.resumes} times: its client saw a pause` : ""}</p>
    ${found.is_settled ? null : html`<${Note}
      tone="warn">Its gateway was lost; only routers have reported it so far.<//>`}
    <h2>Where its time went</h2><${Timeline} row=${row} attempts=${attempts} />
    ${row.is_stream ? null : html`<p
      class="hint">Not streamed: when the client could have had the first token is not known.</p>`}
    <h2>What it was</h2><${Facts} facts=${[
      ["tenant", html`<${Link} to=${["tenants", row.tenant_id]}>${row.tenant_id}<//>`],
      ["key", row.key_id],
      ["tier", row.tier_id],
      ["endpoint", row.endpoint + (row.is_stream ? ", streamed" : "")],
      ["model", html`<${Link} to=${["models", row.model]}>${row.model}<//>`],
      ["asked for", row.requested_model === row.model ? "" : row.requested_model],
      ["release", row.release],
      [
        "rollout",
        row.rollout_id ? html`<${Link} to=${["rollouts", row.rollout_id]}>${row.rollout_id}<//> ${row.arm}` : "",
      ],
      ["prompt", `${count(row.prompt_tokens)} tokens, ${count(row.cached_tokens)} of them cached`],
      ["answer", `${count(row.output_tokens)} tokens${row.choices > 1 ? ` in ${row.choices} answers` : ""}`],
      ["longest pause", row.itl_max_us ? us(row.itl_max_us) : ""],
      ["base", html`<code title=${row.base_digest}>${short(row.base_digest)}</code>`],
      [
        "adapter",
        row.adapter_digest ? html`<code title=${row.adapter_digest}>${short(row.adapter_digest)}</code>` : "",
      ],
      ["trace", row.trace_id],
      ["event", row.event_id],
    ]} />
    ${seesFleet ? html`<h2>Where it ran</h2><${Facts}
      facts=${["gateway", "router", "cell", "pool", "replica"].map((name) => [name, row[`${name}_id`]])} />` : null}
    ${
      attempts.length
        ? html`<h2>Attempts, and why there</h2><${Table} name="Attempts" rows=${attempts} columns=${[
            ["attempt", (it) => `${it.part}.${it.number}`],
            ["replica", (it) => it.replica_id || "no replica"],
            ["router", (it) => it.router_id],
            ["tokens", (it) => count(it.output_tokens), "number"],
            ["cached", (it) => count(it.cached_tokens), "number"],
            [
              "predicted TTFT",
              (it) => (it.decision?.predicted_ttft_ms ? ms(it.decision.predicted_ttft_ms) : NONE),
              "number",
            ],
            ["outcome", (it) => `${words(it.outcome)}${it.reason ? `: ${it.reason}` : ""}`],
            [
              "decision",
              (it) =>
                html`<details><summary>all of it</summary><pre>${JSON.stringify(it.decision, null, 1)}</pre></details>`,
            ],
          ]} />`
        : null
    }
    ${
      found.closings.length
        ? html`<h2>Closed by routers</h2><${Table} name="Closings" rows=${found.closings} columns=${[
            ["router", (it) => it.router_id],
            ["replica", (it) => it.replica_id],
            ["tokens", (it) => count(it.output_tokens), "number"],
            ["told", (it) => html`<${When} at=${it.ingested_at} />`],
          ]} />`
        : null
    }
    ${
      found.copies.length
        ? html`<h2>Copies for shadow stages</h2><${Table} name="Copies" rows=${found.copies} columns=${[
            ["model", (it) => it.model],
            ["release", (it) => it.release],
            ["outcome", (it) => it.outcome],
            ["total", (it) => us(it.total_us), "number"],
          ]} />`
        : null
    }
    ${found.others.length ? html`<p class="hint">
      ${found.others.length} earlier requests have the same id; clients choose ids.</p>` : null}`;
}
