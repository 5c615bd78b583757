"""The queue of one cell: tiers by priority, tenants by virtual token counters, requests by arrival.

Inside a tier the tenant that has received least service per weight goes first (VTC: input tokens
count once, output tokens twice). A tenant that returns is lifted to the least counter among the
waiting ones, so that idleness earns no credit.
"""

from collections import OrderedDict
from heapq import heappop, heappush, heapreplace

from router.core.model import Request, Tenant

_TENANTS_KEPT = 1024  # idle ones are forgotten above this, where that changes nothing


class Tier:
    """The waiting requests of one priority."""

    __slots__ = ("_entries", "_floor", "_heap", "retries", "tenants")

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self.retries: OrderedDict[int, Request] = OrderedDict()
        # (counter when listed, tie-break, tenant). Counters only grow, so an entry may be too low
        # but never too high: the top is corrected until it is true.
        self._heap: list[tuple[float, int, Tenant]] = []
        self._entries = 0
        self._floor = 0.0  # counter of the last tenant served

    def tenant(self, tenant_id: str, weight: int) -> Tenant:
        """Return the tenant's entry, made when it is new."""
        tenant = self.tenants.get(tenant_id)
        if tenant is None:
            if len(self.tenants) >= _TENANTS_KEPT:
                self._forget_idle()
            tenant = self.tenants[tenant_id] = Tenant(tenant_id, self._floor)
        tenant.weight = weight
        return tenant

    def push(self, request: Request) -> None:
        """Append a request to its tenant's line."""
        tenant = self.tenant(request.tenant_id, request.weight)
        if not tenant.requests:
            top = self._top()
            tenant.counter = max(tenant.counter, self._floor if top is None else top.counter)
        tenant.requests[request.order] = request
        if not tenant.is_listed:
            tenant.is_listed = True
            self._entries += 1
            heappush(self._heap, (tenant.counter, self._entries, tenant))

    def peek(self) -> Request | None:
        """Return the next request without taking it."""
        if self.retries:
            return next(iter(self.retries.values()))
        top = self._top()
        return None if top is None else next(iter(top.requests.values()))

    def take(self, request: Request) -> Tenant:
        """Remove the request that `peek` returned and charge its tenant for the prompt."""
        tenant = self.tenant(request.tenant_id, request.weight)
        if self.retries.pop(request.order, None) is not None:
            return tenant  # charged when it was dispatched first
        del tenant.requests[request.order]
        self._floor = max(self._floor, tenant.counter)
        tenant.counter += request.prompt_tokens / tenant.weight
        return tenant

    def remove(self, request: Request) -> None:
        """Remove a waiting request, wherever it stands."""
        if self.retries.pop(request.order, None) is None:
            del self.tenants[request.tenant_id].requests[request.order]

    def _top(self) -> Tenant | None:
        heap = self._heap
        while heap:
            counter, entry, tenant = heap[0]
            if not tenant.requests:
                heappop(heap)
                tenant.is_listed = False
            elif counter < tenant.counter:
                heapreplace(heap, (tenant.counter, entry, tenant))
            else:
                return tenant
        return None

    def _forget_idle(self) -> None:
        top = self._top()
        least = self._floor if top is None else top.counter
        self.tenants = {
            key: tenant
            for key, tenant in self.tenants.items()
            if tenant.requests or tenant.is_listed or tenant.counter > least
        }


class FairQueue:
    """All waiting requests of a cell. The caller bounds it by `requests` and `tokens`."""

    __slots__ = ("_priorities", "_tiers", "requests", "tokens")

    def __init__(self) -> None:
        self._tiers: dict[int, Tier] = {}
        self._priorities: list[int] = []  # highest first
        self.requests = 0
        self.tokens = 0  # of prompts

    def _tier(self, priority: int) -> Tier:
        tier = self._tiers.get(priority)
        if tier is None:
            tier = self._tiers[priority] = Tier()
            self._priorities = sorted(self._tiers, reverse=True)
        return tier

    def push(self, request: Request) -> None:
        """Put a new request at the end of its tenant's line."""
        self._tier(request.priority).push(request)
        self.requests += 1
        self.tokens += request.prompt_tokens

    def push_front(self, request: Request) -> None:
        """Put a request that comes back before everybody of its tier, behind earlier returns."""
        self._tier(request.priority).retries[request.order] = request
        self.requests += 1
        self.tokens += request.prompt_tokens

    def peek(self) -> Request | None:
        """Return the request that is served next."""
        for priority in self._priorities:
            request = self._tiers[priority].peek()
            if request is not None:
                return request
        return None

    def take(self, request: Request) -> Tenant:
        """Remove the request that `peek` returned; its tenant is charged."""
        self.requests -= 1
        self.tokens -= request.prompt_tokens
        return self._tiers[request.priority].take(request)

    def remove(self, request: Request) -> None:
        """Remove a request that will not be served."""
        self.requests -= 1
        self.tokens -= request.prompt_tokens
        self._tiers[request.priority].remove(request)

    def drain(self) -> list[Request]:
        """Remove and return everything, in the order of service."""
        out: list[Request] = []
        while (request := self.peek()) is not None:
            self.take(request)
            out.append(request)
        return out

    def waiting(self) -> list[Request]:
        """Return everything that waits, by arrival; for checks, not for decisions."""
        found = [
            request
            for tier in self._tiers.values()
            for line in (tier.retries, *(tenant.requests for tenant in tier.tenants.values()))
            for request in line.values()
        ]
        return sorted(found, key=lambda request: request.order)
