"""A snapshot of the waiting work of a tier's tenants in virtual time, made at intervals.

In virtual time, a tenant's waiting work is an interval. The interval begins at the tenant's
counter, and its length is the work divided by the tenant's weight. The tier serves all intervals in
ascending order. So the work ahead of a point in virtual time is a piecewise linear function, which
bisection evaluates. A snapshot may be slightly out of date. It is used only for estimates and for
the choice of a request to shed, not for the order of service.
"""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from router.core.queue.tenant_queue import TenantQueue

FRESH_S = 0.25  # longest use of a snapshot in seconds, because counters change with every token


class BacklogEstimate:
    """The intervals in virtual time of all tenants with waiting work.

    The construction costs O(n log n) for n tenants.

    Attributes:
        made_at: Time at which the estimate was made.
        changes: Number of changes of the queue since `made_at`, updated by the tier.
    """

    __slots__ = (
        "_losers",
        "_output",
        "_points",
        "_slopes",
        "_spans",
        "_sums",
        "changes",
        "made_at",
    )

    def __init__(self, tenants: Sequence[TenantQueue], output_service: float, now: float) -> None:
        self.made_at = now
        self.changes = 0
        self._output = output_service
        self._spans: dict[TenantQueue, tuple[float, float, int, int]] = {}
        # Each entry is a point in virtual time, and the changes of the slopes of requests and
        # tokens there.
        edges: list[tuple[float, float, float]] = []
        for tenant in tenants:
            first, end = tenant.counter, finish_tag(tenant, output_service)
            requests, tokens = tenant.requests, tenant.uncached_tokens
            # A request is dispatched at the start of its part of the interval. So on average half a
            # request is dispatched earlier than by the linear function.
            half = (end - first) / (2 * requests)
            first, end = first - half, end - half
            self._spans[tenant] = (first, end, requests, tokens)
            rates = (requests / (end - first), tokens / (end - first))
            edges.append((first, rates[0], rates[1]))
            edges.append((end, -rates[0], -rates[1]))
        edges.sort()
        self._points = [edge[0] for edge in edges]
        self._slopes: list[tuple[float, float]] = []
        self._sums: list[tuple[float, float]] = []
        at = requests_sum = tokens_sum = requests_slope = tokens_slope = 0.0
        for point, requests_rate, tokens_rate in edges:
            requests_sum += requests_slope * (point - at)
            tokens_sum += tokens_slope * (point - at)
            requests_slope += requests_rate
            tokens_slope += tokens_rate
            at = point
            self._sums.append((requests_sum, tokens_sum))
            self._slopes.append((requests_slope, tokens_slope))
        # A request of the tenant whose work would be served last is shed first.
        self._losers = [
            (-finish_tag(tenant, output_service), number, tenant)
            for number, tenant in enumerate(tenants)
        ]
        heapify(self._losers)

    def before(self, point: float, without: TenantQueue | None) -> tuple[float, float]:
        """Return the requests and uncached tokens that are served before a point in virtual time.

        The work of the tenant `without` is omitted.
        """
        index = bisect_right(self._points, point) - 1
        if index < 0:
            return 0.0, 0.0
        past = point - self._points[index]
        requests = self._sums[index][0] + self._slopes[index][0] * past
        tokens = self._sums[index][1] + self._slopes[index][1] * past
        span = None if without is None else self._spans.get(without)
        if span is not None:
            part = min(1.0, max(0.0, (point - span[0]) / (span[1] - span[0])))
            requests -= part * span[2]
            tokens -= part * span[3]
        return max(0.0, requests), max(0.0, tokens)

    def last_served(self) -> TenantQueue | None:
        """Return the tenant whose waiting work would be served last, or None if no work waits."""
        losers = self._losers
        while losers:
            tag, number, tenant = losers[0]
            if not tenant.requests:
                heappop(losers)
                continue
            true_tag = -finish_tag(tenant, self._output)
            if true_tag <= tag:
                return tenant
            heapreplace(losers, (true_tag, number, tenant))
        return None


def finish_tag(tenant: TenantQueue, output_service: float) -> float:
    """Return the value of a tenant's counter once all its waiting work has been served."""
    service = tenant.uncached_tokens + output_service * tenant.requests
    return tenant.counter + max(1.0, service) / tenant.weight
