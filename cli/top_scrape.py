"""Scraped metrics, and rates from two consecutive scrapes, without I/O.

A series has the labels of its target (`instance`, for engines also `pool`). So a restart or loss
of one process is not mistaken for a counter that decreased.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf, isfinite

Labels = frozenset[tuple[str, str]]
INSTANCE = "instance"
_TOOK_S_MIN = 1e-3


@dataclass(frozen=True)
class Scrape:
    """The values of a scrape by name and labels. Each series has the label `instance`.

    Attributes:
        at_s: Time of the scrape in seconds, on any monotonic clock.
        silent: Pages that did not answer, each with the reason.
    """

    at_s: float
    values: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()

    @cached_property
    def instances(self) -> frozenset[str]:
        """The targets that have answered."""
        labels = (labels for series in self.values.values() for labels in series)
        return frozenset(value for one in labels for name, value in one if name == INSTANCE)


def parse(text: str, target: Mapping[str, str]) -> Iterator[tuple[str, Labels, float]]:
    """Yield the samples of one page in Prometheus' text format, with the labels of its target.

    Raises:
        ValueError: The text is not a page of metrics.
    """
    # costs 30 ms, so it is imported only where it is needed
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if isfinite(sample.value):
                labels = frozenset({**sample.labels, **target}.items())
                yield sample.name, labels, float(sample.value)


def gathered(
    at_s: float, samples: Iterable[tuple[str, Labels, float]], silent: Iterable[str] = ()
) -> Scrape:
    """Return a scrape with these samples."""
    values: dict[str, dict[Labels, float]] = {}
    for name, labels, value in samples:
        values.setdefault(name, {})[labels] = value
    return Scrape(at_s, values, tuple(silent))


@dataclass(frozen=True)
class ScrapeChange:
    """Two scrapes, the earlier one first."""

    before: Scrape
    after: Scrape

    @property
    def took_s(self) -> float:
        """Seconds between the scrapes, or 0 if the interval is too short for a rate."""
        took_s = self.after.at_s - self.before.at_s
        return took_s if took_s >= _TOOK_S_MIN else 0.0

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the sum of increases per second of series with these labels, None if unknown."""
        return next(iter(self.rates(name, **labels).values()), None)

    def rates(self, name: str, *by: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Return increases per second, summed by some labels. A missing label counts as empty."""
        if not self.took_s:
            return {}
        return {key: it / self.took_s for key, it in self._increases(name, by, labels).items()}

    def gauges(self, name: str, *by: str, **labels: str) -> dict[tuple[str, ...], list[float]]:
        """Return the values of the later scrape, grouped by some labels."""
        found: dict[tuple[str, ...], list[float]] = {}
        for key, value in _matching(self.after, name, labels):
            found.setdefault(_group(key, by), []).append(value)
        return found

    def quantiles(
        self, name: str, shares: Iterable[float], *by: str
    ) -> dict[tuple[str, ...], list[float | None]]:
        """Return quantiles of a histogram's values between the scrapes, grouped by some labels."""
        buckets: dict[tuple[str, ...], dict[float, float]] = {}
        for (*group, edge), count in self._increases(f"{name}_bucket", (*by, "le"), {}).items():
            found = buckets.setdefault(tuple(group), {})
            found[float(edge)] = found.get(float(edge), 0.0) + count
        wanted = list(shares)
        return {
            group: [quantile(counts, share) for share in wanted]
            for group, counts in buckets.items()
        }

    def _increases(
        self, name: str, by: tuple[str, ...], labels: Mapping[str, str]
    ) -> dict[tuple[str, ...], float]:
        earlier = self.before.values.get(name, {})
        found: dict[tuple[str, ...], float] = {}
        for key, now in _matching(self.after, name, labels):
            then = earlier.get(key)
            if then is None and dict(key).get(INSTANCE) not in self.before.instances:
                continue  # a new target's first count has no earlier count, so its rate is unknown
            # A counter that decreased was reset to 0, and a new counter began at 0.
            group = _group(key, by)
            grown = now if then is None or now < then else now - then
            found[group] = found.get(group, 0.0) + max(0.0, grown)
        return found


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of a histogram, linear within a bucket, or None for an empty histogram.

    Args:
        counts: Number of values at or below each edge. The scrapes of processes differ in time, so
            a count may be lower than that of a lower edge. Then the largest count so far is used.
        share: The quantile, from 0 to 1.
    """
    edges = sorted(counts)
    total = max(counts.values(), default=0.0)
    if total <= 0 or not edges:
        return None
    wanted, below = share * total, 0.0
    for low, high in pairwise([0.0, *edges]):
        upto = max(below, counts[high])
        if upto >= wanted and upto > below:
            if high == inf:
                return low or None  # above the last edge, only the lower bound is known
            return low + (high - low) * (wanted - below) / (upto - below)
        below = upto
    return edges[-1] if edges[-1] != inf else (edges[-2] if len(edges) > 1 else None)


def _matching(
    scrape: Scrape, name: str, labels: Mapping[str, str]
) -> Iterator[tuple[Labels, float]]:
    wanted = labels.items()
    for key, value in scrape.values.get(name, {}).items():
        if wanted <= key:
            yield key, value


def _group(key: Labels, by: tuple[str, ...]) -> tuple[str, ...]:
    labels = dict(key)
    return tuple(labels.get(name, "") for name in by)
