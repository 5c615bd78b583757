"""Orders the tenants of one tier, and measures the tier's share of the cell's service."""

import math
from collections.abc import Iterable
from heapq import heappop, heappush, heapreplace

from router.core.queue.backlog_estimate import FRESH_S, BacklogEstimate
from router.core.queue.provision import MEMORY_MIN_S, Provision, memory_s
from router.core.queue.service_ledger import ServiceLedger
from router.core.queue.tenant_queue import TenantQueue
from router.core.queue.virtual_time import VirtualTime
from router.core.types.account import TierTotals
from router.core.types.request import Dispatch, Request

OUTPUT_SERVICE = 2.0  # service of one output token, in units of one uncached prompt token
SHARE_MIN = 0.01  # least share of every waiting tier, so that no tier starves
_DEBT_MEMORY_S = 10.0  # time constant with which service beyond the share is forgotten, in seconds
_LARGEST_FADES = 0.99  # decay per dispatch of the largest service that one dispatch needed
_ALLOWANCE_REQUESTS = 2.0  # allowance of a tenant whose queue was briefly empty, in mean requests
_SERVICE_PRIOR = 512.0  # assumed service per request, until some requests have ended
_OUTPUT_PRIOR = 128.0  # assumed output tokens per dispatch, until some dispatches have ended
_SMOOTHING = 0.02
# Limit of a tenant's disadvantage in this cell because of service in other cells. The limit is the
# progress of the tier's virtual time in `LAG_S` seconds, or `LAG_REQUESTS` mean requests if that is
# more. Where requests are long, `LAG_S` alone would not cover the cost of one or two requests.
LAG_S = 3.0
LAG_REQUESTS = 4.0
_TENANTS_KEPT = 1024  # tenants above which idle tenants without an effect on the order are dropped


class Tier:
    """The waiting requests of one priority.

    Each tenant has a virtual counter of its service, and the tenant with the least counter is
    served first. When an idle tenant queues a request, its counter is raised to the least counter
    of the waiting tenants. If none waits, the counter of the tenant served last is used. So idle
    time earns no advantage. A tenant with running requests was not idle. So it has an allowance of
    some requests, for the service of other tenants while its queue was briefly empty.

    Service in other cells of the pool is charged like service in this cell. But that charge puts a
    tenant behind others by at most `LAG_S` or `LAG_REQUESTS`. So older service in other cells is
    ignored.

    Attributes:
        totals: Total service, and waiting uncached tokens, which the tenants update.
        balance: Service that the tier may claim before higher tiers. While the tier has waiting
            requests, its share of the cell's service is credited, and its own service debited.
        requests: Number of waiting requests.
        tokens: Prompt tokens of the waiting requests.
        ledger: Accounts to report to other cells.
    """

    __slots__ = (
        *("priority", "is_preemptible", "share", "totals", "balance", "ledger"),
        *("requests", "tokens"),
        *("_tenants", "_tenants_max", "_heap", "_listings", "_last"),
        *(
            "_behind",
            "_looked_at",
            "_output_mean",
            "_service_mean",
            "_debt_at",
            "_largest",
            "_backlog_estimate",
            "_virtual_time",
            "_provisions",
            "_cells",
            "_memory_s",
        ),
    )

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.is_preemptible = False
        self.share = SHARE_MIN
        self.totals = TierTotals()
        self.balance = 0.0
        self.requests = self.tokens = 0
        self._tenants: dict[str, TenantQueue] = {}
        self._tenants_max = _TENANTS_KEPT
        # Entries are (counter when listed, number of the listing, tenant). A listed tenant's
        # counter may grow, so an entry's counter may be too low but never too high. The top entry
        # is corrected until it is accurate. A tenant whose counter falls is listed again.
        self._heap: list[tuple[float, int, TenantQueue]] = []
        self._listings = 0
        self._last: TenantQueue | None = None  # the tenant served last
        self._behind: list[TenantQueue] = []  # tenants whose first request this look-ahead skipped
        self._looked_at: dict[TenantQueue, None] = {}
        self._output_mean, self._service_mean = _OUTPUT_PRIOR, _SERVICE_PRIOR
        self._debt_at = self._largest = 0.0
        self._backlog_estimate: BacklogEstimate | None = None
        self.ledger = ServiceLedger()
        self._virtual_time = VirtualTime()
        self._provisions: dict[TenantQueue, Provision] = {}
        self._cells = 0  # number of other cells in the pool
        self._memory_s = MEMORY_MIN_S  # time constant of provisions

    # --- arrivals and removals --------------------------------------------------------------

    def push(self, request: Request, *, is_new: bool) -> None:
        """Add a request. A request that is not new precedes its tenant's other requests."""
        self.look_no_further()
        if not self.requests:
            self.balance = min(self.balance, 0.0)  # a tier saves service only while requests wait
        self.is_preemptible = request.is_preemptible
        self.share = max(SHARE_MIN, request.reserved_permille / 1000)
        tenant = self._tenant(request.tenant_id)
        tenant.weight = request.weight
        if not tenant.requests:
            self._lift(tenant)
        if is_new:
            tenant.push(request)
        else:
            tenant.running -= 1
            tenant.push_front(request)
        if not tenant.listing:
            self._list(tenant)
        self._changed(request, 1)

    def take(self, request: Request, now: float) -> TenantQueue:
        """Remove a request for dispatch, and charge its tenant unless the prompt was charged."""
        tenant = self.remove(request)
        tenant.running += 1
        self._last = tenant
        self._virtual_time.reach(tenant.counter)
        self.ledger.note(tenant)
        if not request.is_charged:
            request.is_charged = True
            request.charged_tokens = request.uncached_tokens
            tenant.counter += request.charged_tokens / tenant.weight
            self.totals.served += request.charged_tokens
        provision = self._provisions.get(tenant)
        if provision is not None:
            change = provision.follow(tenant.service, self._cells, self._memory_s, now)
            _move(tenant, tenant.counter + change)
            if change < 0.0 and tenant.listing:
                self._list(tenant)
        return tenant

    def remove(self, request: Request) -> TenantQueue:
        """Remove a waiting request.

        Raises:
            KeyError: The request is not in this tier's queue.
        """
        tenant = self._tenants[request.tenant_id]
        tenant.remove(request)
        self._changed(request, -1)
        return tenant

    def reprice(self, request: Request, uncached_tokens: int) -> None:
        """Set the predicted uncached tokens of a waiting request."""
        self._tenants[request.tenant_id].reprice(request, uncached_tokens)

    def settle(self, dispatch: Dispatch) -> None:
        """Correct an ended request's charge to the computed tokens, and update the tier's means."""
        request = dispatch.request
        tenant = self._tenants[request.tenant_id]
        assert tenant is dispatch.account, "a tenant with a running request is kept"
        tenant.running -= 1
        has_run = dispatch.is_placed or dispatch.emitted > 0
        if has_run:
            self._output_mean += _SMOOTHING * (dispatch.emitted - self._output_mean)
            service = request.charged_tokens + OUTPUT_SERVICE * dispatch.emitted
            self._service_mean += _SMOOTHING * (service - self._service_mean)
        if request.attempts or request.preemptions or request.prefilled_on:
            return  # repeated work is charged only once, by its first prediction
        computed = dispatch.prompt_tokens - dispatch.cached_tokens if has_run else 0
        self._correct(tenant, request, computed)

    def give_back(self, request: Request) -> None:
        """Refund the charge of a requeued request that ends without output."""
        if request.is_charged and not request.output:
            self._correct(self._tenant(request.tenant_id), request, 0)

    def _correct(self, tenant: TenantQueue, request: Request, computed: int) -> None:
        more = computed - request.charged_tokens
        request.charged_tokens = computed
        self.totals.served += more
        tenant.counter += more / tenant.weight
        self.ledger.note(tenant)
        if more < 0 and tenant.listing:
            self._list(tenant)

    def _changed(self, request: Request, count: int) -> None:
        self.requests += count
        self.tokens += count * request.prompt_tokens
        if self._backlog_estimate is not None:
            self._backlog_estimate.changes += 1

    # --- tenants ----------------------------------------------------------------------------

    def _tenant(self, tenant_id: str) -> TenantQueue:
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            if len(self._tenants) >= self._tenants_max:
                self._forget_idle()
            tenant = TenantQueue(tenant_id, self.totals)  # `push` raises its counter
            self._tenants[tenant_id] = tenant
            self.ledger.open(tenant)
        return tenant

    def _lift(self, tenant: TenantQueue) -> None:
        top = self._top() or self._last
        if top is not None:
            allowance = self.return_allowance / tenant.weight if tenant.running else 0.0
            _move(tenant, max(tenant.counter, top.counter - allowance))

    @property
    def return_allowance(self) -> float:
        """Lead in service that a tenant keeps whose queue was briefly empty while requests ran."""
        return _ALLOWANCE_REQUESTS * self._service_mean

    def _list(self, tenant: TenantQueue) -> None:
        self._listings += 1
        tenant.listing = self._listings
        heappush(self._heap, (tenant.counter, tenant.listing, tenant))

    def _top(self) -> TenantQueue | None:
        """Return the tenant with the least counter among tenants with a request to offer."""
        heap = self._heap
        while heap:
            counter, listing, tenant = heap[0]
            if listing != tenant.listing:
                heappop(heap)
            elif not tenant.has_candidate:
                heappop(heap)
                tenant.listing = 0
            elif counter < tenant.counter:
                heapreplace(heap, (tenant.counter, listing, tenant))
            else:
                return tenant
        return None

    def _forget_idle(self) -> None:
        """Drop idle tenants whose counters a new request would raise anyway.

        The limit grows with the number of remaining tenants, so that this linear scan stays rare.
        """
        top = self._top() or self._last
        least = 0.0 if top is None else top.counter
        self._tenants = {
            key: tenant
            for key, tenant in self._tenants.items()
            if tenant.requests or tenant.running or tenant.listing or tenant.counter > least
        }
        self._tenants_max = max(_TENANTS_KEPT, 2 * len(self._tenants))
        self.ledger.keep(self._tenants.values())
        kept = set(self._tenants.values())
        self._provisions = {key: one for key, one in self._provisions.items() if key in kept}

    def load(self, tenant_id: str) -> tuple[int, int]:
        """Return a tenant's waiting requests and their prompt tokens."""
        tenant = self._tenants.get(tenant_id)
        return (0, 0) if tenant is None else (tenant.requests, tenant.tokens)

    # --- other cells ------------------------------------------------------------------------

    def serve_elsewhere(
        self, services: Iterable[tuple[str, float]], cells: int, interval_s: float, now: float
    ) -> None:
        """Charge tenants for their virtual service in other cells of the pool.

        Args:
            services: Tenants, each with the change of its service elsewhere. Tenants without an
                account in this tier are ignored.
            cells: Number of other cells that send reports.
            interval_s: Mean seconds between two reports of a cell.
            now: Time, in seconds.
        """
        self._cells = cells
        self._memory_s = memory_s(interval_s)
        self.look_no_further()
        turn, lag = self._turn(now)
        for tenant_id, service in services:
            tenant = self._tenants.get(tenant_id)
            if tenant is not None:
                provision = self._provisions.get(tenant)
                if provision is None:
                    provision = self._provisions[tenant] = Provision(tenant.service, now)
                self._shift(tenant, provision.settle(service), turn, lag)

    def follow_provisions(self, now: float) -> None:
        """Update all provisions by the service in this cell and the passed time."""
        self.look_no_further()
        turn, lag = self._turn(now)
        for tenant, provision in list(self._provisions.items()):
            change = provision.follow(tenant.service, self._cells, self._memory_s, now)
            self._shift(tenant, change, turn, lag)
            if provision.is_over:
                del self._provisions[tenant]

    def _turn(self, now: float) -> tuple[float, float]:
        """Return the counter of the tenant to serve next, and that counter's growth in `LAG_S`."""
        self._virtual_time.sample(self.totals.served, now)
        top = self._top() or self._last
        turn = 0.0 if top is None else top.counter
        return turn, LAG_S * self._virtual_time.pace

    def _shift(self, tenant: TenantQueue, service: float, turn: float, lag: float) -> None:
        """Charge a tenant for service elsewhere, up to the limit, or refund such a charge.

        A refund lowers the counter at most to the counter of the tenant to serve next.
        """
        before = tenant.counter
        limit = turn + max(lag, LAG_REQUESTS * self._service_mean / tenant.weight)
        if service >= 0.0:
            _move(tenant, max(before, min(before + service, limit)))
        else:
            _move(tenant, max(before + service, min(before, turn)))
            if tenant.listing:
                self._list(tenant)

    # --- order ------------------------------------------------------------------------------

    def head(self, now: float) -> Request | None:
        """Return the next request that the current look-ahead has not skipped.

        A look-ahead examines the first request of every tenant, then the second requests, and so
        on.
        """
        tenant = self._top()
        while tenant is None and self._behind:
            if self._behind[0].has_candidate:
                tenant = self._behind[0]
            else:
                self._behind.pop(0)
        return None if tenant is None else tenant.head(now)

    def look_further(self, request: Request) -> None:
        """Skip the result of `head` until the look-ahead ends."""
        tenant = self._tenants[request.tenant_id]
        tenant.hide(request)
        self._looked_at[tenant] = None
        if tenant.listing:
            tenant.listing = 0  # invalidates the tenant's heap entry
        else:
            self._behind.pop(0)
        self._behind.append(tenant)

    def look_no_further(self) -> None:
        """End a look-ahead, so that `head` can return all requests again."""
        if self._looked_at:
            for tenant in self._looked_at:
                tenant.unhide()
                if tenant.requests and not tenant.listing:
                    self._list(tenant)
            self._looked_at.clear()
            self._behind.clear()

    # --- the tier's share -------------------------------------------------------------------

    def cost(self, request: Request) -> float:
        """Return the predicted service of a request, by the tier's mean output."""
        prompt = 0 if request.is_charged else request.uncached_tokens
        return prompt + OUTPUT_SERVICE * self._output_mean

    def earn(self, service: float, now: float) -> None:
        """Credit this tier with its share of the service of any tier, and reduce old debt."""
        if self.balance < 0.0:
            self.balance *= math.exp((self._debt_at - now) / _DEBT_MEMORY_S)
        self._debt_at = now
        self._largest = max(service, _LARGEST_FADES * self._largest)
        if self.requests:
            self.balance += self.share * service

    def pay(self, service: float) -> None:
        """Debit this tier for service, after `earn`, and bound its balance to prevent bursts."""
        self.balance = min(self.balance, 2.0 * self._largest) - service

    # --- estimates --------------------------------------------------------------------------

    def before(
        self, tenant_id: str, weight: int, uncached_tokens: int, now: float
    ) -> tuple[float, float]:
        """Estimate the requests and uncached tokens served before a request that arrives now."""
        if not self.requests:
            return 0.0, 0.0
        tenant = self._tenants.get(tenant_id)
        requests = tokens = 0.0
        top = self._top() or self._last
        counter = 0.0 if top is None else top.counter
        if tenant is not None:
            counter = tenant.counter if tenant.requests else max(counter, tenant.counter)
            requests, tokens = tenant.before(uncached_tokens, now)
        if tenant is not None and tenant.requests == self.requests:
            return requests, tokens  # no other tenant waits
        output = OUTPUT_SERVICE * self._output_mean
        turn = counter + (tokens + output * requests) / weight
        others = self._picture(now).before(turn, tenant)
        # The estimate may be slightly out of date, so its results are capped.
        return min(requests + others[0], self.requests), min(
            tokens + others[1], self.totals.uncached_tokens
        )

    def cheapest_to_lose(self, now: float) -> Request | None:
        """Return the last request of the tenant whose waiting work would be served last."""
        if not self.requests:
            return None
        tenant = self._picture(now).last_served()
        if tenant is None:  # all requests of the estimate have left, and others arrived
            self._backlog_estimate = None
            tenant = self._picture(now).last_served()
        return None if tenant is None else tenant.last()

    def _picture(self, now: float) -> BacklogEstimate:
        estimate = self._backlog_estimate
        if (
            estimate is None
            or now - estimate.made_at > FRESH_S
            or 4 * estimate.changes > len(self._heap)
        ):
            waiting = [tenant for tenant in self._tenants.values() if tenant.requests]
            estimate = BacklogEstimate(waiting, OUTPUT_SERVICE * self._output_mean, now)
            self._backlog_estimate = estimate
        return estimate

    def waiting(self) -> list[Request]:
        """Return all waiting requests, for checks and `drain`, because the call is slow."""
        return [request for tenant in self._tenants.values() for request in tenant.waiting()]


def _move(tenant: TenantQueue, counter: float) -> None:
    """Set a tenant's counter for a reason other than service in this cell."""
    tenant.elsewhere += counter - tenant.counter
    tenant.counter = counter
