"""The queue of one cell with all waiting requests, in the order of service.

Tiers are served by priority, with one exception. A waiting lower tier receives at least its
reserved share (`Tier.balance`) of the cell's service, and at least `SHARE_MIN`. Service is the
number of computed tokens, in which an output token has double weight. So a tier's first request
starts at the latest after cost(request) / share of the cell's service. Within a tier, virtual token
counters, which cover all replicas of the cell, decide between tenants (`router.core.queue.tier`).
Within a tenant, requests have the order of `router.core.queue.tenant_queue`.

A tenant is charged for uncached prompt tokens at the dispatch, and for output tokens as the engine
reports them. At the request's end the charge is corrected to the tokens that the engine has
computed. A request that never ran is not charged, and a request that was lost and retried is
charged once.

A tenant's counter also includes service in the other cells of the pool, as reported by them.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import attrgetter

from router.core.queue.pool_service import PoolService
from router.core.queue.service_ledger import largest_changes
from router.core.queue.tenant_queue import TenantQueue
from router.core.queue.tier import SHARE_MIN, Tier
from router.core.types.request import Dispatch, Request
from router.core.types.service import ServiceReport, TenantService

__all__ = ["FairQueue", "TenantQueue", "Tier"]


class FairQueue:
    """The queue of a cell, which the caller bounds by `requests` and `tokens`.

    After each `take` of a request the caller must call either `push_front` or `settle`, exactly
    once. `push_front` queues the request again, and `settle` is for a request that has ended.

    Attributes:
        requests: Number of waiting requests.
        tokens: Prompt tokens of the waiting requests.
        reports: Number of the last report to other cells.
        pool: Service in the other cells of the pool.
    """

    __slots__ = ("_descending", "_now", "_tiers", "pool", "reports", "requests", "tokens")

    def __init__(self) -> None:
        self._tiers: dict[int, Tier] = {}
        self._descending: list[Tier] = []  # the highest priority first
        self._now = 0.0  # time of the last peek
        self.requests = 0
        self.tokens = 0
        self.reports = 0
        self.pool = PoolService()

    # --- in and out -------------------------------------------------------------------------

    def push(self, request: Request, now: float) -> None:
        """Queue a new request."""
        del now
        self._push(request, is_new=True)

    def push_front(self, request: Request, now: float) -> None:
        """Queue a taken request again, ahead of its tenant's other requests.

        The request is served first because its tenant has already been charged for the prompt.
        """
        del now
        self._push(request, is_new=False)

    def _push(self, request: Request, *, is_new: bool) -> None:
        tier = self._tiers.get(request.priority)
        if tier is None:
            tier = self._tiers[request.priority] = Tier(request.priority)
            tier.ledger.reports = self.reports
            self._descending = sorted(self._tiers.values(), key=lambda tier: -tier.priority)
        tier.push(request, is_new=is_new)
        self._count(request, 1)

    def take(self, request: Request, now: float) -> TenantQueue:
        """Remove a request for dispatch, charge its tier and tenant, and return the tenant."""
        tier = self._tiers[request.priority]
        service = tier.cost(request)
        for other in self._descending:
            other.earn(service, now)
        tier.pay(service)
        self._count(request, -1)
        return tier.take(request, now)

    def remove(self, request: Request) -> None:
        """Remove a waiting request that has ended, and refund an unused charge.

        Raises:
            KeyError: The request is not in the queue.
        """
        tier = self._tiers[request.priority]
        tier.remove(request)
        tier.give_back(request)
        self._count(request, -1)

    def settle(self, dispatch: Dispatch) -> None:
        """Correct the charge of a request that ends with this dispatch."""
        self._tiers[dispatch.request.priority].settle(dispatch)

    def reprice(self, request: Request, uncached_tokens: int) -> None:
        """Set the predicted uncached tokens of a waiting request, and reorder the request."""
        self._tiers[request.priority].reprice(request, uncached_tokens)

    def _count(self, request: Request, count: int) -> None:
        self.requests += count
        self.tokens += count * request.prompt_tokens

    # --- other cells ------------------------------------------------------------------------

    def report(self, accounts_max: int, now: float) -> list[TenantService]:
        """Start a new report, and return the accounts that changed most since they were reported.

        Args:
            accounts_max: Most accounts in the report.
            now: Time, in seconds.
        """
        self.reports += 1
        for tier in self._descending:
            tier.follow_provisions(now)
        tiers = {tenant: tier for tier in self._descending for tenant in tier.ledger.recent()}
        chosen = largest_changes(tiers, accounts_max)
        services = self._services(chosen, tiers)
        for tier in self._descending:
            tier.ledger.note_reported((one for one in chosen if tiers[one] is tier), self.reports)
        return services

    def recent(self, accounts_max: int) -> list[TenantService]:
        """Return the accounts with recent changes, for a cell that starts to receive reports."""
        tiers = {tenant: tier for tier in self._descending for tenant in tier.ledger.recent()}
        return self._services(list(tiers)[:accounts_max], tiers)

    @staticmethod
    def _services(
        tenants: Iterable[TenantQueue], tiers: Mapping[TenantQueue, Tier]
    ) -> list[TenantService]:
        return [
            TenantService(tiers[one].priority, one.tenant_id, one.since, one.service)
            for one in tenants
        ]

    def hear(self, report: ServiceReport, now: float) -> None:
        """Apply a report of another cell of the pool to the tenants' counters."""
        changes = sorted(self.pool.hear(report, now), key=attrgetter("priority"))
        for priority, group in groupby(changes, key=attrgetter("priority")):
            tier = self._tiers.get(priority)
            if tier is not None:
                services = ((change.tenant_id, change.service) for change in group)
                tier.serve_elsewhere(services, self.pool.cells, self.pool.interval_s, now)

    # --- order ------------------------------------------------------------------------------

    def peek(self, now: float) -> Request | None:
        """Return the next request in the order of service, and stop skipping requests."""
        self._now = now
        for tier in self._descending:
            tier.look_no_further()
        return self._first()

    def skip(self, request: Request) -> Request | None:
        """Skip the result of `peek` or `skip` until the next `peek`, and return the next request.

        While requests are skipped, all tenants of a tier offer their first request before any
        tenant offers its second request.
        """
        self._tiers[request.priority].look_further(request)
        return self._first()

    def _first(self) -> Request | None:
        highest: Request | None = None
        for tier in self._descending:
            if not tier.requests or (highest is not None and tier.balance <= 0.0):
                continue
            head = tier.head(self._now)
            if head is None:
                continue
            if highest is None:
                highest = head
            elif tier.balance >= tier.cost(head):
                return head
        return highest

    def drain(self) -> list[Request]:
        """Empty the queue without charges. Return its requests by descending tier, then arrival."""
        out = sorted(self.waiting(), key=lambda request: (-request.priority, request.order))
        for request in out:
            self.remove(request)
        return out

    def waiting(self) -> list[Request]:
        """Return all requests by arrival, for checks, as the call is too slow for decisions."""
        found = [request for tier in self._descending for request in tier.waiting()]
        return sorted(found, key=lambda request: request.order)

    def depths(self) -> list[tuple[int, int]]:
        """Return (priority, waiting requests) of every tier that has ever had a request."""
        return [(tier.priority, tier.requests) for tier in self._descending]

    def backlogs(self) -> Iterable[tuple[int, int, int]]:
        """Yield (priority, waiting requests, uncached tokens) of every tier that has requests."""
        for tier in self._descending:
            if tier.requests:
                yield tier.priority, tier.requests, tier.totals.uncached_tokens

    # --- estimates --------------------------------------------------------------------------

    def tenant_load(self, priority: int, tenant_id: str) -> tuple[int, int]:
        """Return how many requests and prompt tokens of a tenant wait in one tier."""
        tier = self._tiers.get(priority)
        return (0, 0) if tier is None else tier.load(tenant_id)

    def waiting_below(self, priority: int) -> tuple[int, int]:
        """Return how many requests and prompt tokens wait in all tiers below `priority`."""
        lower = [tier for tier in self._descending if tier.priority < priority]
        return sum(tier.requests for tier in lower), sum(tier.tokens for tier in lower)

    def ahead(
        self, priority: int, tenant_id: str, weight: int, uncached_tokens: int, now: float
    ) -> tuple[int, int]:
        """Estimate the requests and uncached tokens served before a request that arrives now.

        The estimate omits later requests that would overtake the request.
        """
        tier = self._tiers.get(priority)
        own = (0.0, 0.0) if tier is None else tier.before(tenant_id, weight, uncached_tokens, now)
        requests, tokens = own
        share = SHARE_MIN if tier is None else tier.share
        for other in self._descending:
            if other.priority > priority:
                # The tier's reserved share means that only a part of the higher tiers' work
                # precedes.
                limit = (tokens + uncached_tokens) * (1.0 - share) / share
            elif other.priority < priority:
                limit = (tokens + uncached_tokens) * other.share
            else:
                continue
            part = min(1.0, limit / max(1, other.totals.uncached_tokens))
            requests += part * other.requests
            tokens += part * other.totals.uncached_tokens
        return round(requests), round(tokens)

    def cheapest_to_lose(self, below_priority: int, now: float) -> Request | None:
        """Return the waiting request below `below_priority` to shed first, or None if none waits.

        Preemptible tiers lose requests first, then the lowest tier. Within the tier, the request is
        the latest request of the tenant whose work would be served last.
        """
        lower = [t for t in self._descending if t.priority < below_priority and t.requests]
        if not lower:
            return None
        return min(lower, key=lambda t: (not t.is_preemptible, t.priority)).cheapest_to_lose(now)
