"""Counters by tenant that stay few: the busiest tenants by name, all others together."""

from collections.abc import Iterable
from heapq import nlargest
from operator import itemgetter

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.objectives import Result

OTHER = "other"
NAMED_MAX = 20
_KINDS = ("prompt", "output")
_KNOWN_MAX = 5_000  # tenants whose use is remembered between scrapes; a scrape looks at all
_FADE = 0.5  # of what was used before, per scrape
_EDGE = 2.0  # a tenant takes another's series when it uses this many times as much


class _Series:
    __slots__ = ("results", "tokens")

    def __init__(self) -> None:
        self.results = dict.fromkeys(Result, 0)
        self.tokens = dict.fromkeys(_KINDS, 0)


class TenantSeries(Collector):
    """Requests and tokens of the busiest tenants.

    A tenant that becomes busy gets a series that begins at 0, what it used before stays in `other`;
    one that loses its series goes on in `other`. So `increase` of all series is what was used.
    """

    def __init__(self, named_max: int = NAMED_MAX) -> None:
        """Prepare; nobody has a series yet."""
        self._named_max = named_max
        self._named: dict[str, _Series] = {}
        self._other = _Series()
        self._recent: dict[str, float] = {}

    def count(
        self, tenant_id: str, result: Result | None, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Count a request that ended; its result is none when goodput leaves it out."""
        series = self._named.get(tenant_id, self._other)
        if result is not None:
            series.results[result] += 1
        series.tokens["prompt"] += prompt_tokens
        series.tokens["output"] += output_tokens
        recent = self._recent
        if tenant_id in recent or len(recent) < _KNOWN_MAX:
            recent[tenant_id] = recent.get(tenant_id, 0.0) + prompt_tokens + output_tokens + 1.0

    def _choose(self) -> None:
        """Give series to those that were busiest of late, and forget a part of the past."""
        recent, named = self._recent, self._named
        busiest = nlargest(self._named_max, recent.items(), key=itemgetter(1))
        for tenant_id, used in busiest:
            if tenant_id in named:
                continue
            if len(named) >= self._named_max:
                least = min(named, key=lambda it: recent.get(it, 0.0))
                if used < _EDGE * recent.get(least, 0.0):
                    break
                del named[least]
            named[tenant_id] = _Series()
        self._recent = {it: used * _FADE for it, used in recent.items() if used >= 1.0}

    def describe(self) -> Iterable[Metric]:
        """Name the families, without a look at the tenants."""
        return self._families()

    def collect(self) -> Iterable[Metric]:
        """Yield both families, and choose anew who has a series.

        Those that lose theirs now are shown once more, and the new ones with 0, so that no increase
        is missed.
        """
        shown = dict(self._named)
        self._choose()
        shown.update(self._named)
        requests, tokens = families = self._families()
        for tenant_id, series in (*shown.items(), (OTHER, self._other)):
            for result, count in series.results.items():
                requests.add_metric([tenant_id, result.value], count)
            for kind, count in series.tokens.items():
                tokens.add_metric([tenant_id, kind], count)
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
