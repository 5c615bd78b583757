"""The waiting work of a tier's tenants in virtual time: a snapshot, taken at intervals.

In virtual time the waiting work of a tenant spans from its counter to its counter plus that work
over its weight, and the tier serves these spans from the left. So the work ahead of a point is a
piecewise linear function, found by bisection. Snapshots may be a little old: they are for estimates
and for the choice of a request to shed, not for the order of service.
"""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from router.core.queue.tenant_queue import TenantQueue

FRESH_S = 0.25  # counters move with every token: a picture is not used for longer


class BacklogEstimate:
    """The spans of the tenants that had work waiting when it was made; O(n log n) to make.

    Attributes:
        made_at: Time at which it was made.
        changes: Pushes, takes and removals since; counted by the tier.
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
        edges: list[tuple[float, float, float]] = []  # at, change of both slopes
        for tenant in tenants:
            first, end = tenant.counter, finish_tag(tenant, output_service)
            requests, tokens = tenant.requests, tenant.uncached_tokens
            # A request goes when its tenant's counter has its turn: half of one goes before.
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
        # The tenant whose work ends last is the first to lose some.
        self._losers = [
            (-finish_tag(tenant, output_service), number, tenant)
            for number, tenant in enumerate(tenants)
        ]
        heapify(self._losers)

    def before(self, point: float, without: TenantQueue | None) -> tuple[float, float]:
        """Return the requests and uncached tokens of others that are served before `point`."""
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
        """Return the tenant whose waiting work would be done last; None: no work is left."""
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
    """Return the tenant's counter when all of its present work will have been served."""
    service = tenant.uncached_tokens + output_service * tenant.requests
    return tenant.counter + max(1.0, service) / tenant.weight
