"""Generates reference pages of settings, metrics and errors from the code, for `make docs`.

The meaning of a setting is written once, under `Attributes:` in its class. The meaning of a metric
is written at its declaration. A test compares the pages with the output of this module.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from pydantic.fields import FieldInfo

import control_plane.metrics
import gateway.metrics
import gateway.server.operations
import replica.agent.metrics
import replica.host.metrics
import router.metrics
import telemetry.metrics
from cli.settings_table import SETTINGS, accepted, descriptions
from cli.stack.listeners import LISTENERS
from cli.stack.openings import OPENINGS
from sluice.errors import POLICIES, EngineRefusal, ErrorEvidence

_UNITS = {
    "s": "seconds",
    "share": "ratio",
    **{unit: unit for unit in ("tokens", "requests", "bytes", "days")},
}
_SETTINGS_HEAD = """# Settings

Every process reads its settings once, from the environment. Three mistakes end it at once, with
one line each and status 2. They are an unknown name with a service's prefix, a missing setting
without a default, and a value out of its range. `sluice up` sets all settings by itself.
`sluice config check [SERVICE] [--env-file FILE]` reports the same before a start, with the allowed
values; `sluice config show` prints the settings in force. Neither prints a secret.
`python -m control_plane.migrate` and `python -m telemetry.migrate` read the database's settings of
their service and accept the others.
"""
_SETTINGS_TAIL = """
## The command `sluice`

| setting | default | meaning |
| --- | --- | --- |
| `SLUICE_HOME` | `.sluice` | Folder of the local stack, and of contexts |
| `SLUICE_CONTEXT` | empty | As `--context`: the addresses and the key of `contexts/NAME.env` there, instead of all that follow |
| `SLUICE_ADMIN_URL`, `SLUICE_TELEMETRY_URL`, `SLUICE_ADMIN_KEY` | the stack's `env` file | Whom the commands on the [administration](admin-api.md), `requests`, `usage` and `explain` ask, and as who |
| `PG_BIN` | binaries of the wheel | Folder of another PostgreSQL with `initdb` and `postgres` |
"""  # noqa: E501 - a row of a table
_METRICS_HEAD = """# Metrics

Each process answers `GET /metrics` on its HTTP address in Prometheus' text format. Labels come from
closed sets. Requests and replicas are never labels, tenants only as the busiest ones and `other`,
models only as the 20 busiest.
Rules and dashboards on them are in [alerts](alerts.md). Gateways with several workers tell
of all of them at their [operations address](operations.md#operations-address).
"""
_METRICS_COLUMNS = ("metric", "type", "labels", "meaning")
_ENGINE_HEAD = """
## Engine

At `/engines/REPLICA/metrics` of the agent, besides Triton's own, with the labels `model` and
`version`. The agent reads them from the loopback: Triton itself asks nobody for a secret there.
Metrics that begin with `nv_` bear TensorRT-LLM's names.

"""
_ERRORS_BEGIN, _ERRORS_END = "<!-- errors: made by `make docs` -->", "<!-- end of errors -->"
_SOCKETS_BEGIN = "<!-- sockets: made by `make docs` -->"
_SOCKETS_END = "<!-- end of sockets -->"
_OPENINGS_BEGIN = "<!-- ports: made by `make docs` -->"
_OPENINGS_END = "<!-- end of ports -->"
ERROR_COLUMNS = {
    "moves": "moves",
    "is_asked_again": "asked again",
    "is_costly_again": "costly",
    "is_tried_elsewhere": "elsewhere",
    "ends_absence": "absence",
    "lets_stand_in": "stand-in",
    "is_passed_over": "passed over",
    "goes_to_control": "control",
    "is_charged": "charged",
    "is_failure": "failure",
    "is_abort": "abort",
    "is_of_engine": "of engines",
    "is_of_health": "health",
    "is_demand": "demand",
    "spares_adapter": "trial",
}
_GENERATED = "\nMade from the code by `make docs`; do not edit.\n"


def settings_page() -> str:
    """Return docs/config.md.

    Raises:
        LookupError: A setting has no description in its class.
    """
    parts = [_SETTINGS_HEAD, _GENERATED]
    for service, owner in SETTINGS.items():
        prefix = str(owner.model_config.get("env_prefix", ""))
        described = descriptions(owner)
        rows: list[tuple[str, ...]] = []
        for name, field in owner.model_fields.items():
            if name not in described:
                raise LookupError(f"{owner.__qualname__}.{name} is not under Attributes:")
            facts = (accepted(field), _default(field), _unit(name), described[name])
            rows.append((f"`{prefix}{name.upper()}`", *facts))
        parts.append(f"\n## {service.capitalize()}\n\n")
        parts.append(_table(("setting", "type, range", "default", "unit", "meaning"), rows))
    return "".join((*parts, _SETTINGS_TAIL))


class Declared(NamedTuple):
    """A declared metric. Of a histogram, `edges` has the upper bounds of its buckets."""

    process: str
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    edges: tuple[float, ...] = ()


def declared_metrics() -> list[Declared]:
    """Return all metrics of all processes, by process and name."""
    found = [
        metric
        for process, registry in _registries().items()
        for metric in sorted(_metrics(process, registry))
    ]
    engine = replica.host.metrics.FAMILIES
    return found + sorted(
        Declared("engine", it.name, it.kind.value, it.labels, it.text, it.buckets) for it in engine
    )


def metrics_page() -> str:
    """Return docs/metrics.md."""
    parts = [_METRICS_HEAD, _GENERATED]
    declared = declared_metrics()
    for process in dict.fromkeys(metric.process for metric in declared):
        is_engine = process == "engine"
        parts.append(_ENGINE_HEAD if is_engine else f"\n## {process.capitalize()}\n\n")
        rows = [
            (f"`{it.name}`", it.kind, ", ".join(f"`{label}`" for label in it.labels), it.text)
            for it in declared
            if it.process == process
        ]
        parts.append(_table(_METRICS_COLUMNS, rows))
    return "".join(parts)


def _registries() -> dict[str, CollectorRegistry]:
    gateway_metrics = gateway.metrics.GatewayMetrics()
    gateway_metrics.follow(dict.fromkeys(gateway.metrics.FOLLOWED_NAMES, float))
    parents = gateway.server.operations.WorkersCollector(list, {"ended": 0})
    gateway_metrics.registry.register(parents)
    return {
        "gateway": gateway_metrics.registry,
        "router": router.metrics.RouterMetrics().registry,
        "agent": replica.agent.metrics.AgentMetrics().registry,
        "control plane": control_plane.metrics.ControlPlaneMetrics().registry,
        "telemetry": telemetry.metrics.TelemetryMetrics().registry,
    }


def _metrics(process: str, registry: CollectorRegistry) -> Iterable[Declared]:
    # The library shows label names only on samples, and there are none before the first value.
    for collector in registry._collector_to_names:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        names: Iterable[str] = getattr(collector, "_labelnames", ())
        bounds: Iterable[float] = getattr(collector, "_upper_bounds", ())
        for family in collector.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            samples = [dict.fromkeys(it.labels) for it in family.samples[:1]]
            labels = tuple(names) or tuple(label for it in samples for label in it)
            edges = [float(it.labels["le"]) for it in family.samples if "le" in it.labels]
            yield Declared(
                process,
                name,
                family.type,
                tuple(label for label in labels if label != "le"),
                family.documentation,
                tuple(edge for edge in edges or bounds if edge != float("inf")),
            )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|").rstrip(".") for cell in line) + " |\n"
        for line in lines
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default()
    if value is None:
        return "empty"
    text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
    if isinstance(value, bool):
        text = text.lower()
    return f"`{text}`" if text else "empty"


def _unit(name: str) -> str:
    if name.endswith("_bytes_per_second"):
        return "bytes/second"
    return next((_UNITS[word] for word in reversed(name.split("_")) if word in _UNITS), "")


def overload_page(text: str) -> str:
    """Return docs/overload.md with a new table of errors.

    Args:
        text: Present page, with a table between the two marks.
    """
    head, _, rest = text.partition(_ERRORS_BEGIN)
    _, _, tail = rest.partition(_ERRORS_END)
    columns = ("code", "status", "type", *ERROR_COLUMNS.values(), "from engine", "release")
    rows = (
        (
            f"`{code}`",
            str(policy.status),
            f"`{policy.kind}`",
            *("yes" if getattr(policy, name) else "" for name in ERROR_COLUMNS),
            "" if policy.from_engine is EngineRefusal.REQUEST else policy.from_engine,
            "" if policy.release is ErrorEvidence.NONE else policy.release,
        )
        for code, policy in POLICIES.items()
    )
    return f"{head}{_ERRORS_BEGIN}\n{_table(columns, rows)}{_ERRORS_END}{tail}"


def security_page(text: str) -> str:
    """Return docs/security.md with new tables of sockets and of ports.

    Args:
        text: Present page, with each table between its two marks.
    """
    text = _with_openings(text)
    head, _, rest = text.partition(_SOCKETS_BEGIN)
    _, _, tail = rest.partition(_SOCKETS_END)
    columns = ("process", "socket", "protocol", "for", "known by", "a stranger gets")
    rows = (
        (it.process, it.name, it.protocol, it.callers, str(it.secret), it.stranger)
        for it in LISTENERS
    )
    return f"{head}{_SOCKETS_BEGIN}\n{_table(columns, rows)}{_SOCKETS_END}{tail}"


def _with_openings(text: str) -> str:
    head, _, rest = text.partition(_OPENINGS_BEGIN)
    _, _, tail = rest.partition(_OPENINGS_END)
    columns = ("where", "service", "port", "for", "known by", "reached from")
    rows = (
        (it.deployment, it.service, it.port_text, it.purpose, str(it.secret), ", ".join(it.callers))
        for it in OPENINGS
    )
    return f"{head}{_OPENINGS_BEGIN}\n{_table(columns, rows)}{_OPENINGS_END}{tail}"


def main() -> None:
    """Write the pages into docs/ of the current directory."""
    Path("docs/config.md").write_text(settings_page())
    Path("docs/metrics.md").write_text(metrics_page())
    overload = Path("docs/overload.md")
    overload.write_text(overload_page(overload.read_text()))
    security = Path("docs/security.md")
    security.write_text(security_page(security.read_text()))


if __name__ == "__main__":
    main()
