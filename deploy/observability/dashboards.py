"""Grafana dashboards, described once.

`python deploy/observability/dashboards.py` writes grafana/*.json beside itself. A dashboard is rows
of panels, a panel is a title, a unit and queries; everything else that Grafana wants to have is the
same everywhere. The JSON is committed; a test fails when it is stale.
"""  # noqa: INP001 - a script beside what it makes

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).with_name("grafana")
_COLUMNS, _HEIGHT = 24, 8
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True)
class Query:
    """A query, and how its series are called (Grafana's `{{label}}`)."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time.

    Attributes:
        title: Title of the graph.
        unit: Unit of Grafana: s, percentunit, short, reqps, bytes, celsius, watt.
        queries: One or more queries.
        limit: Value of a line at the objective.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page; `variables` are (name, query of its values)."""

    uid: str
    title: str
    rows: tuple[tuple[Panel, ...], ...]
    variables: tuple[tuple[str, str, str], ...] = ()


def _by(label: str, *exprs: str) -> tuple[Query, ...]:
    return tuple(Query(expr, f"{{{{{label}}}}}") for expr in exprs)


def _quantiles(metric: str, *, by: str = "") -> tuple[Query, ...]:
    labels = f"{by}, le" if by else "le"
    return tuple(
        Query(
            f"histogram_quantile({share}, sum by ({labels})"
            f" (rate({metric}_bucket[$__rate_interval])))",
            f"p{share * 100:g}" + (f" {{{{{by}}}}}" if by else ""),
        )
        for share in (0.5, 0.95, 0.99)
    )


def _rate(series: str, by: str) -> str:
    return f"sum by ({by}) (rate({series}[$__rate_interval]))"


def _rates(series: str, by: str) -> tuple[Query, ...]:
    return _by(by, _rate(series, by))


FLEET = Dashboard(
    "sluice-fleet",
    "Sluice: fleet",
    (
        (
            Panel("Goodput", "percentunit", (Query("llm_goodput_ratio", "goodput"),), 0.85),
            Panel(
                "What requests came to",
                "reqps",
                _rates("llm_goodput_requests_total", "result"),
            ),
            Panel("Aborts", "reqps", _rates("llm_request_aborts_total", "code")),
        ),
        (
            Panel("TTFT", "s", _quantiles("llm_ttft_seconds"), 0.5),
            Panel("TPOT", "s", _quantiles("llm_tpot_seconds"), 0.05),
            Panel("ITL", "s", _quantiles("llm_itl_seconds"), 0.05),
        ),
        (
            Panel("Answers", "reqps", _rates("gateway_requests_total", "status")),
            Panel("Tokens", "short", _rates("gateway_tokens_total", "kind")),
            Panel(
                "Open",
                "short",
                (
                    Query("sum(gateway_open_generations)", "requests"),
                    Query("sum(gateway_open_connections)", "connections"),
                ),
            ),
        ),
        (
            Panel("Wait in routers", "s", _quantiles("router_queue_seconds"), 0.5),
            Panel(
                "Waiting by priority",
                "short",
                _by("priority", "sum by (priority) (llm_queue_depth)"),
            ),
            Panel(
                "Replicas by health", "short", _by("health", "sum by (health) (router_replicas)")
            ),
        ),
        (
            Panel(
                "Lag of event loops, p99",
                "s",
                _by("instance", "instance:gateway_loop_lag_seconds:p99_5m"),
                0.1,
            ),
            Panel(
                "Age of the control state",
                "s",
                _by(
                    "instance",
                    "max by (instance) (gateway_control_age_seconds)",
                    "max by (instance) (router_control_age_seconds)",
                ),
                60,
            ),
            Panel(
                "Servers heard",
                "short",
                (
                    Query("min(gateway_valkey_up)", "Valkey"),
                    Query("min(control_plane_database_up)", "PostgreSQL"),
                    Query("min(telemetry_ready)", "broker and ClickHouse"),
                ),
            ),
        ),
        (
            Panel(
                "Events not yet stored", "short", (Query("sum(telemetry_lag_events)", "messages"),)
            ),
            Panel(
                "Event spools",
                "bytes",
                _by("instance", "sum by (instance) (gateway_event_spool_bytes)"),
            ),
            Panel(
                "Events lost",
                "short",
                (
                    Query(
                        "sum(increase(gateway_events_dropped_total[$__rate_interval]))", "dropped"
                    ),
                    Query(
                        "sum(increase(telemetry_messages_missing_total[$__rate_interval]))",
                        "missing",
                    ),
                    Query(
                        "sum(increase(telemetry_messages_poisoned_total[$__rate_interval]))",
                        "poison",
                    ),
                ),
            ),
        ),
    ),
)

_POOL = '{pool=~"$pool"}'

POOL = Dashboard(
    "sluice-pool",
    "Sluice: pool",
    (
        (
            Panel(
                "Waiting requests",
                "short",
                _by("priority", f"sum by (priority) (llm_queue_depth{_POOL})"),
            ),
            Panel(
                "Replicas",
                "short",
                _by("state", f"max by (state) (control_plane_replicas_count{_POOL})"),
            ),
            Panel(
                "Output tokens per second",
                "short",
                _by("pool", f"pool:llm_output_tokens:rate1m{_POOL}"),
            ),
        ),
        (
            Panel(
                "KV cache", "percentunit", _by("instance", f"gpu_kv_cache_utilization{_POOL}"), 0.95
            ),
            Panel("Running batch", "short", _by("instance", f"gpu_batch_size{_POOL}")),
            Panel(
                "Prefix cache hits",
                "percentunit",
                (
                    *_by("pool", f"llm_prefix_cache_hit_ratio{_POOL}"),
                    Query(f"pool:llm_prefix_cache_hit_ratio:usual{_POOL}", "{{pool}} usually"),
                ),
                0.3,
            ),
        ),
        (
            Panel(
                "Engine step, p99",
                "s",
                _by(
                    "instance",
                    "histogram_quantile(0.99, sum by (instance, le)"
                    f" (rate(llm_step_seconds_bucket{_POOL}[$__rate_interval])))",
                ),
            ),
            Panel(
                "Preemptions per second",
                "short",
                _by("pool", f"pool:llm_preemptions:rate5m{_POOL}"),
            ),
            Panel(
                "Ends of sequences",
                "reqps",
                _rates(f"llm_sequences_ended_total{_POOL}", "reason"),
            ),
        ),
        (
            Panel("Adapters held", "short", _by("place", f"sum by (place) (llm_adapters{_POOL})")),
            Panel(
                "Adapters changed",
                "short",
                _rates(f"llm_adapter_slot_changes_total{_POOL}", "change"),
            ),
            Panel(
                "Tokens by adapter",
                "short",
                _by(
                    "adapter",
                    f"topk(10, {_rate(f'llm_adapter_tokens_total{_POOL}', 'adapter')})",
                ),
            ),
        ),
        (
            Panel(
                "Accelerator memory",
                "bytes",
                _by("instance", "sum by (instance) (agent_accelerator_memory_used_bytes)"),
            ),
            Panel(
                "Accelerator power",
                "watt",
                _by("instance", "sum by (instance) (agent_accelerator_power_watts)"),
            ),
            Panel(
                "Accelerator temperature",
                "celsius",
                _by("instance", "max by (instance) (agent_accelerator_temperature_celsius)"),
            ),
        ),
    ),
    (("pool", "control_plane_replicas_count", "pool"),),
)

_TENANT = '{tenant=~"$tenant"}'
_GOOD = '{tenant=~"$tenant", result="good"}'

TENANT = Dashboard(
    "sluice-tenant",
    "Sluice: busiest tenants",
    (
        (
            Panel(
                "Requests",
                "reqps",
                _rates(f"gateway_tenant_requests_total{_TENANT}", "tenant"),
            ),
            Panel(
                "Goodput",
                "percentunit",
                _by(
                    "tenant",
                    f"sum by (tenant) (rate(gateway_tenant_requests_total{_GOOD}[5m]))"
                    f" / sum by (tenant) (rate(gateway_tenant_requests_total{_TENANT}[5m]))",
                ),
                0.85,
            ),
        ),
        (
            Panel(
                "Prompt tokens",
                "short",
                _by(
                    "tenant",
                    _rate(
                        'gateway_tenant_tokens_total{tenant=~"$tenant", kind="prompt"}', "tenant"
                    ),
                ),
            ),
            Panel(
                "Output tokens",
                "short",
                _by(
                    "tenant",
                    _rate(
                        'gateway_tenant_tokens_total{tenant=~"$tenant", kind="output"}', "tenant"
                    ),
                ),
            ),
        ),
        (
            Panel(
                "Refused for limits",
                "reqps",
                _by(
                    "code",
                    _rate(
                        'gateway_requests_total{code=~"rate_limit_.*|tenant_queue_full"}', "code"
                    ),
                ),
            ),
            Panel(
                "Decided without Valkey",
                "reqps",
                _rates("gateway_limit_local_decisions_total", "instance"),
            ),
        ),
    ),
    (("tenant", "gateway_tenant_tokens_total", "tenant"),),
)

ROLLOUT = Dashboard(
    "sluice-rollout",
    "Sluice: rollouts and quality",
    (
        (
            Panel(
                "Rollouts", "short", _by("phase", "max by (phase) (control_plane_rollouts_count)")
            ),
            Panel(
                "Requests by arm",
                "reqps",
                _rates("gateway_rollout_requests_total", "arm"),
            ),
            Panel(
                "Age of the evidence",
                "s",
                (Query("max(control_plane_rollout_evidence_age_seconds)", "oldest"),),
                120,
            ),
        ),
        (
            Panel(
                "Sent back",
                "short",
                _by("cause", "sum by (cause) (increase(control_plane_rollbacks_total[1h]))"),
            ),
            Panel(
                "Copies for shadow stages",
                "reqps",
                _rates("gateway_copies_total", "fate"),
            ),
            Panel(
                "Replicas put in quarantine",
                "short",
                (Query("sum(increase(control_plane_quarantines_total[1h]))", "replicas"),),
            ),
        ),
        (
            Panel(
                "Golden prompts asked",
                "reqps",
                _rates("agent_golden_askings_total", "result"),
            ),
            Panel(
                "Deviations",
                "reqps",
                _rates("control_plane_quality_deviations_total", "difference"),
            ),
            Panel(
                "Quality alerts",
                "short",
                _by("alert", "max by (alert) (control_plane_quality_alerts_count)"),
            ),
        ),
        (
            Panel("Chunks moved", "Bps", _rates("agent_chunk_bytes_total", "way")),
            Panel(
                "Artifacts on nodes",
                "short",
                _by("instance", "sum by (instance) (agent_artifacts)"),
            ),
            Panel("Starts of engines, p95", "s", _quantiles("agent_engine_start_seconds")[1:2]),
        ),
    ),
)

COST = Dashboard(
    "sluice-cost",
    "Sluice: cost",
    (
        (
            Panel(
                "Replicas that are paid",
                "short",
                _by("pool", f"pool:llm_replicas_paid:avg5m{_POOL}"),
            ),
            Panel("Of these busy", "short", _by("pool", f"pool:llm_replicas_busy:avg5m{_POOL}")),
            Panel(
                "Idle share", "percentunit", _by("pool", f"pool:llm_replicas_idle:ratio_5m{_POOL}")
            ),
        ),
        (
            Panel(
                "Cost per hour, by the price list of telemetry",
                "short",
                (Query(f"pool:llm_cost_per_hour:avg5m{_POOL}", "{{pool}} {{currency}}"),),
            ),
            Panel(
                "Of this idle",
                "short",
                (
                    Query(
                        f"pool:llm_cost_per_hour:avg5m{_POOL} * on (pool) group_left ()"
                        " pool:llm_replicas_idle:ratio_5m",
                        "{{pool}} {{currency}}",
                    ),
                ),
            ),
            Panel(
                "Cost per 1M output tokens, idle time included",
                "short",
                (
                    Query(
                        f"1e6 * pool:llm_cost_per_hour:avg5m{_POOL} / on (pool) group_left ()"
                        " (3600 * sum by (pool) (rate(llm_output_tokens_total[5m])) > 0)",
                        "{{pool}} {{currency}}",
                    ),
                ),
            ),
        ),
        (
            Panel(
                "Replica-hours of the last day",
                "short",
                _by(
                    "pool",
                    f"sum by (pool) (increase(llm_replica_seconds_total{_POOL}[1d])) / 3600",
                ),
            ),
            Panel(
                "Of these starting or failed",
                "short",
                _by(
                    "pool",
                    "sum by (pool) (increase(llm_replica_seconds_total"
                    '{pool=~"$pool", state="reserved"}[1d])) / 3600',
                ),
            ),
            Panel(
                "Output tokens per replica-second",
                "short",
                _by(
                    "pool",
                    f"sum by (pool) (rate(llm_output_tokens_total{_POOL}[5m]))"
                    " / (pool:llm_replicas_paid:avg5m > 0)",
                ),
            ),
        ),
    ),
    (("pool", "llm_replica_seconds_total", "pool"),),
)

DASHBOARDS: Sequence[Dashboard] = (FLEET, POOL, TENANT, ROLLOUT, COST)


def rendered(dashboard: Dashboard) -> str:
    """Return the JSON that Grafana imports."""
    panels: list[dict[str, Any]] = []
    for row_number, row in enumerate(dashboard.rows):
        width = _COLUMNS // len(row)
        for column, panel in enumerate(row):
            place = {"x": column * width, "y": row_number * _HEIGHT, "w": width, "h": _HEIGHT}
            panels.append(_panel(len(panels) + 1, panel, place))
    page = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["sluice"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source(), *map(_variable, dashboard.variables)]},
        "panels": panels,
    }
    return json.dumps(page, indent=1, sort_keys=True) + "\n"


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(variable: tuple[str, str, str]) -> dict[str, Any]:
    name, metric, label = variable
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": f"label_values({metric}, {label})",
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}}
    if panel.limit is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.limit}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["custom"]["thresholdsStyle"] = {"mode": "line"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def main() -> None:
    """Write all files, and remove those that nothing describes any more."""
    for file in GRAFANA.glob("*.json"):
        file.unlink()
    for dashboard in DASHBOARDS:
        (GRAFANA / f"{dashboard.uid}.json").write_text(rendered(dashboard))


if __name__ == "__main__":
    main()
