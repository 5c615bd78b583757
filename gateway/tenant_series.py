"""Counters of the busiest tenants, and one for all other tenants, to bound the time series."""

import time
from collections.abc import Callable, Iterable
from heapq import nlargest
from operator import itemgetter

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.objectives import ObjectiveResult

OTHER = "other"
NAMED_MAX = 20
_KINDS = ("prompt", "output")
# Maximum number of tenants whose usage is recorded, because each choice of series scans all of it.
_KNOWN_MAX = 5_000
_CHOOSE_S = 15.0  # seconds between choices of tenants, however often the metrics are scraped
_FADE = 0.5  # factor by which each choice reduces the recorded usage
_EDGE = 2.0  # a tenant takes over another's series only at this multiple of the other's usage
# Seconds for which a new series is shown at 0. A reader that scrapes at least this often reads the
# start value of each series.
_ANNOUNCED_S = 30.0
# Seconds for which an ended series is shown unchanged. A reader that scrapes at least this often
# reads the last value of each series.
_LEAVING_S = 300.0


class _Series:
    __slots__ = ("results", "tokens")

    def __init__(self) -> None:
        self.results = dict.fromkeys(ObjectiveResult, 0)
        self.tokens = dict.fromkeys(_KINDS, 0)


class TenantSeries(Collector):
    """Requests and tokens of the busiest tenants.

    A tenant that becomes busy receives a series, which is shown at 0 for a while before it counts
    requests. If a tenant loses its series, later requests are counted in `other`, and the old
    series is shown unchanged for some minutes. So the sum of `increase` over all series is exact
    for every reader that scrapes often enough.
    """

    def __init__(
        self, named_max: int = NAMED_MAX, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without a series for any tenant."""
        self._named_max = named_max
        self._clock = clock
        self._choice_at_s = clock()
        self._announced: dict[str, float] = {}  # time from which a series counts, by tenant
        self._named: dict[str, _Series] = {}
        # Ended series of at most `named_max` tenants, each with the time until which it is shown.
        self._leaving: dict[str, tuple[_Series, float]] = {}
        self._other = _Series()
        self._recent: dict[str, float] = {}

    def count(
        self, tenant_id: str, result: ObjectiveResult | None, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Count a request that ended. The result is None if goodput excludes the request."""
        series = self._named.get(tenant_id, self._other)
        if result is not None:
            series.results[result] += 1
        series.tokens["prompt"] += prompt_tokens
        series.tokens["output"] += output_tokens
        recent = self._recent
        if tenant_id in recent or len(recent) < _KNOWN_MAX:
            recent[tenant_id] = recent.get(tenant_id, 0.0) + prompt_tokens + output_tokens + 1.0

    def _advance(self) -> None:
        """Start announced series, remove ended series, and choose tenants, if the time has come."""
        now_s = self._clock()
        for tenant_id in [it for it, until_s in self._announced.items() if until_s <= now_s]:
            del self._announced[tenant_id]
            self._named[tenant_id] = _Series()
        for tenant_id in [it for it, (_, until_s) in self._leaving.items() if until_s <= now_s]:
            del self._leaving[tenant_id]
        if now_s >= self._choice_at_s:
            self._choice_at_s = now_s + _CHOOSE_S
            self._choose(now_s)

    def _choose(self, now_s: float) -> None:
        """Announce series for the tenants that were busiest recently, and reduce recorded usage."""
        recent, named, leaving = self._recent, self._named, self._leaving
        busiest = nlargest(self._named_max, recent.items(), key=itemgetter(1))
        for tenant_id, used in busiest:
            if tenant_id in named or tenant_id in self._announced:
                continue
            back, _ = leaving.get(tenant_id, (None, now_s))
            if len(named) + len(self._announced) >= self._named_max:
                least = min(named, key=lambda it: recent.get(it, 0.0), default=None)
                if least is None or used < _EDGE * recent.get(least, 0.0):
                    break
                if back is None and len(leaving) >= self._named_max:
                    continue
                leaving[least] = named.pop(least), now_s + _LEAVING_S
            if back is None:
                self._announced[tenant_id] = now_s + _ANNOUNCED_S
            else:  # the tenant's old series is still shown, so it continues
                del leaving[tenant_id]
                named[tenant_id] = back
        self._recent = {it: used * _FADE for it, used in recent.items() if used >= 1.0}

    def describe(self) -> Iterable[Metric]:
        """Return the metric families without values, by which the registry checks names."""
        return self._families()

    def collect(self) -> Iterable[Metric]:
        """Return the families of requests and tokens. Tenants are first chosen anew if due."""
        self._advance()
        shown = {_label(it): series for it, (series, _) in self._leaving.items()}
        shown |= {_label(it): _Series() for it in self._announced}
        shown |= {_label(it): series for it, series in self._named.items()}
        requests, tokens = families = self._families()
        for label, series in (*shown.items(), (OTHER, self._other)):
            for result, count in series.results.items():
                requests.add_metric([label, result.value], count)
            for kind, count in series.tokens.items():
                tokens.add_metric([label, kind], count)
        return families

    @staticmethod
    def _families() -> tuple[CounterMetricFamily, CounterMetricFamily]:
        return (
            CounterMetricFamily(
                "gateway_tenant_requests",
                f"Requests of the {NAMED_MAX} tenants that were busiest of late, and of all `other`"
                " ones, by what they count as in goodput",
                labels=("tenant", "result"),
            ),
            CounterMetricFamily(
                "gateway_tenant_tokens",
                f"Tokens of the {NAMED_MAX} tenants that were busiest of late, and of all `other`"
                " ones: prompt or output",
                labels=("tenant", "kind"),
            ),
        )


class Without(Collector):
    """A registry's metrics without those that have a tenant as label."""

    def __init__(self, tenants: TenantSeries, registry: Collector) -> None:
        """Read from `registry`, in which `tenants` must be registered."""
        self._named = {family.name for family in tenants.describe()}
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        """Return the families that are not labelled by tenant."""
        return (it for it in self._registry.collect() if it.name not in self._named)


def _label(tenant_id: str) -> str:
    """Return a tenant's label. Since `other` is reserved, it becomes `_other`, and so on."""
    return f"_{tenant_id}" if tenant_id.lstrip("_") == OTHER else tenant_id
