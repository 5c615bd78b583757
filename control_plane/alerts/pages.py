"""Parses the targets to scrape, and the pages of metrics from which rules read samples. Pure."""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from control_plane.promql.series import Sample

JOB, INSTANCE = "job", "instance"
JOBS = ("gateway", "router", "agent", "control-plane", "telemetry")
_ADDRESS = re.compile(r"([a-z-]+)=([\w.-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5})")
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
TARGETS_MAX = 100


@dataclass(frozen=True, slots=True)
class PageTarget:
    """A page of metrics to scrape.

    Attributes:
        address: `HOST:PORT` of the process that serves the page.
        labels: Labels of all series of the page, including `job` and `instance`.
        path: Path of the page.
    """

    address: str
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    path: str = "/metrics"


class TargetsError(ValueError):
    """The targets cannot be parsed. The message names the first wrong target."""


def page_targets(text: str) -> list[PageTarget]:
    """Return the targets of a setting such as `gateway=10.0.0.1:9000,router=10.0.0.2:9001`.

    Raises:
        TargetsError: A target is not of the form JOB=HOST:PORT, or there are more than
            `TARGETS_MAX` targets.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(words) > TARGETS_MAX:
        raise TargetsError(f"at most {TARGETS_MAX} targets; a Prometheus is made for more")
    found: list[PageTarget] = []
    for word in words:
        match = _ADDRESS.fullmatch(word)
        if match is None or match[1] not in JOBS:
            raise TargetsError(f"{word!r} is no JOB=HOST:PORT with a job of {', '.join(JOBS)}")
        found.append(PageTarget(match[2], {JOB: match[1], INSTANCE: match[2]}))
    return found


def engine_targets(rows: Sequence[tuple[str, str, str]]) -> list[PageTarget]:
    """Return the targets for rows of replicas.

    Args:
        rows: Tuples (id, pool, metrics address `HOST:PORT/engines/ID`).
    """
    found: list[PageTarget] = []
    for replica_id, pool_id, metrics_address in rows:
        address, _, path = metrics_address.partition("/")
        labels = {JOB: "engine", INSTANCE: address, "pool": pool_id, "replica": replica_id}
        found.append(PageTarget(address, labels, f"/{path}/metrics"))
    return found


def page_samples(text: str, target: PageTarget, names: Container[str]) -> Iterator[Sample]:
    """Yield the samples that rules read from a page, with the labels of the page's target.

    If the page and its target have the same label, the page's label is renamed as in Prometheus,
    for example to `exported_job`.

    Raises:
        ValueError: The text is not a page of metrics.
    """
    # imported here because the import lasts 30 ms
    from prometheus_client.parser import text_string_to_metric_families

    kept = "\n".join(line for line in text.splitlines() if _is_read(line, names))
    for family in text_string_to_metric_families(f"{kept}\n"):
        for sample in family.samples:
            labels = {
                f"exported_{name}" if name in target.labels else name: value
                for name, value in sample.labels.items()
                if value
            }
            yield sample.name, frozenset({**labels, **target.labels}.items()), float(sample.value)


def _is_read(line: str, names: Container[str]) -> bool:
    found = _METRIC.match(line)
    return found is not None and found[0] in names
