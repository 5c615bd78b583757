"""Merges several workers' metrics in one page, in which each sample has the label `worker`. Pure.

Sums over workers would be misleading, because sums of counters fall when a worker is replaced, and
sums of gauges may have no meaning. Queries aggregate over workers as they do over replicas.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged(pages: Mapping[str, bytes]) -> bytes:
    """Return one page in the text format from the pages by worker. A page may be empty."""
    families: dict[str, Metric] = {}
    for worker, page in sorted(pages.items()):
        for family in text_string_to_metric_families(page.decode()):
            whole = families.get(family.name)
            if whole is None:
                whole = Metric(family.name, family.documentation, family.type)
                families[family.name] = whole
            for sample in family.samples:
                labels = {**sample.labels, "worker": worker}
                whole.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry)
