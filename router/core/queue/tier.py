"""A tier: the turn of its tenants, and its share of the cell's service."""

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

OUTPUT_SERVICE = 2.0  # of an output token; one of the prompt is 1
SHARE_MIN = 0.01  # of every tier that waits, whatever is reserved for it: no tier starves
_DEBT_MEMORY_S = 10.0  # service beyond the share is forgotten with this time constant
_LARGEST_FADES = 0.99  # per dispatch of the cell
_CREDIT_REQUESTS = 2.0  # mean ones; kept by a tenant whose queue was briefly empty
_SERVICE_PRIOR = 512.0  # of a request, until some have ended
_OUTPUT_PRIOR = 128.0  # tokens per dispatch, until some have ended
_SMOOTHING = 0.02
# The most that a tenant loses here for its service elsewhere: so much of this tier's turns, or so
# many mean requests. Where requests are long, `LAG_S` alone would forget the cost of one or two.
LAG_S = 3.0
LAG_REQUESTS = 4.0
_TENANTS_KEPT = 1024  # idle ones are forgotten above this, where that changes nothing


class Tier:
    """The waiting requests of one priority.

    Tenants by virtual counters: the least goes first; one that returns is lifted to the least among
    the waiting ones (the last one served when none waits), so that idleness earns nothing. A tenant
    with running requests was not idle: it keeps a credit of a few requests, for the service that
    others got while its queue was briefly empty.

    Service in other cells of the pool counts like service here, but puts a tenant behind the others
    by at most `LAG_S` and `LAG_REQUESTS`: older service elsewhere does not count against it.

    Attributes:
        totals: Service so far, and uncached tokens that wait; its tenants keep the sums.
        credit: Service that the tier may claim before higher ones. While it waits it earns its
            share of all service of the cell; its own service is paid from it.
        requests: Number of waiting requests.
        tokens: Prompt tokens of the waiting requests.
        ledger: Accounts to report to other cells.
    """

    __slots__ = (
        *("priority", "is_preemptible", "share", "totals", "credit", "ledger"),
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
        self.credit = 0.0
        self.requests = self.tokens = 0
        self._tenants: dict[str, TenantQueue] = {}
        self._tenants_max = _TENANTS_KEPT
        # (counter when listed, number of the listing, tenant). Counters grow while listed, so an
        # entry may be too low but never too high: the top is corrected until it is true. A counter
        # that falls gets a new listing.
        self._heap: list[tuple[float, int, TenantQueue]] = []
        self._listings = 0
        self._last: TenantQueue | None = None  # served
        self._behind: list[TenantQueue] = []  # their heads were set aside during this look-ahead
        self._looked_at: dict[TenantQueue, None] = {}
        self._output_mean, self._service_mean = _OUTPUT_PRIOR, _SERVICE_PRIOR
        self._debt_at = self._largest = 0.0
        self._backlog_estimate: BacklogEstimate | None = None
        self.ledger = ServiceLedger()
        self._virtual_time = VirtualTime()
        self._provisions: dict[TenantQueue, Provision] = {}
        self._cells = 0  # of the pool, beside this one
        self._memory_s = MEMORY_MIN_S  # of provisions

    # --- in and out -------------------------------------------------------------------------

    def push(self, request: Request, *, is_new: bool) -> None:
        """Add a request; a returning one goes before its tenant's others."""
        self.look_no_further()
        if not self.requests:
            self.credit = min(self.credit, 0.0)  # waiting earns credit, being away does not
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
        """Remove a request that is dispatched and charge its tenant, once, for the prompt."""
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
            KeyError: The request does not wait here.
        """
        tenant = self._tenants[request.tenant_id]
        tenant.remove(request)
        self._changed(request, -1)
        return tenant

    def reprice(self, request: Request, uncached_tokens: int) -> None:
        """Change the predicted cost of a waiting request."""
        self._tenants[request.tenant_id].reprice(request, uncached_tokens)

    def settle(self, dispatch: Dispatch) -> None:
        """Correct the charge of a request at its end to the computed tokens, and learn from it."""
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
            return  # repeated work is paid once, as first predicted
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
            tenant = TenantQueue(tenant_id, self.totals)  # `push` lifts it
            self._tenants[tenant_id] = tenant
            self.ledger.open(tenant)
        return tenant

    def _lift(self, tenant: TenantQueue) -> None:
        top = self._top() or self._last
        if top is not None:
            credit = self.lift_credit / tenant.weight if tenant.running else 0.0
            _move(tenant, max(tenant.counter, top.counter - credit))

    @property
    def lift_credit(self) -> float:
        """Service that a tenant with running requests may lack when its queue fills again."""
        return _CREDIT_REQUESTS * self._service_mean

    def _list(self, tenant: TenantQueue) -> None:
        self._listings += 1
        tenant.listing = self._listings
        heappush(self._heap, (tenant.counter, tenant.listing, tenant))

    def _top(self) -> TenantQueue | None:
        """Return the listed tenant with the least counter and a request to offer."""
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
        """Drop idle tenants that would be lifted anyway; a growing limit keeps this rare."""
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
        """Return the requests and prompt tokens of a tenant that wait."""
        tenant = self._tenants.get(tenant_id)
        return (0, 0) if tenant is None else (tenant.requests, tenant.tokens)

    # --- other cells ------------------------------------------------------------------------

    def serve_elsewhere(
        self, services: Iterable[tuple[str, float]], cells: int, interval_s: float, now: float
    ) -> None:
        """Count virtual service of tenants in other cells of the pool.

        `cells` report, each at `interval_s`. A tenant that is unknown here is not affected.
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
        """Let provisions follow the service in this cell, and lapse."""
        self.look_no_further()
        turn, lag = self._turn(now)
        for tenant, provision in list(self._provisions.items()):
            change = provision.follow(tenant.service, self._cells, self._memory_s, now)
            self._shift(tenant, change, turn, lag)
            if provision.is_over:
                del self._provisions[tenant]

    def _turn(self, now: float) -> tuple[float, float]:
        """Return the counter of the tenant whose turn it is, and its growth in `LAG_S`."""
        self._virtual_time.sample(self.totals.served, now)
        top = self._top() or self._last
        turn = 0.0 if top is None else top.counter
        return turn, LAG_S * self._virtual_time.pace

    def _shift(self, tenant: TenantQueue, service: float, turn: float, lag: float) -> None:
        """Charge service elsewhere up to the limit, or return it, but no further than a turn."""
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
        """Return the next request; during a look-ahead the next one not looked at.

        A look-ahead sees one request of every tenant, in order, then their second ones.
        """
        tenant = self._top()
        while tenant is None and self._behind:
            if self._behind[0].has_candidate:
                tenant = self._behind[0]
            else:
                self._behind.pop(0)
        return None if tenant is None else tenant.head(now)

    def look_further(self, request: Request) -> None:
        """Set aside the result of `head`."""
        tenant = self._tenants[request.tenant_id]
        tenant.hide(request)
        self._looked_at[tenant] = None
        if tenant.listing:
            tenant.listing = 0  # its entry is dead
        else:
            self._behind.pop(0)
        self._behind.append(tenant)

    def look_no_further(self) -> None:
        """End a look-ahead: all requests return to their places."""
        if self._looked_at:
            for tenant in self._looked_at:
                tenant.unhide()
                if tenant.requests and not tenant.listing:
                    self._list(tenant)
            self._looked_at.clear()
            self._behind.clear()

    # --- the tier's share -------------------------------------------------------------------

    def cost(self, request: Request) -> float:
        """Return the service that a request will take, by the mean output of the tier."""
        prompt = 0 if request.is_charged else request.uncached_tokens
        return prompt + OUTPUT_SERVICE * self._output_mean

    def earn(self, service: float, now: float) -> None:
        """Note service of the cell to any tier; old debt is dropped."""
        if self.credit < 0.0:
            self.credit *= math.exp((self._debt_at - now) / _DEBT_MEMORY_S)
        self._debt_at = now
        self._largest = max(service, _LARGEST_FADES * self._largest)
        if self.requests:
            self.credit += self.share * service

    def pay(self, service: float) -> None:
        """Note service to this tier, after `earn`. Credit is not saved up for a burst."""
        self.credit = min(self.credit, 2.0 * self._largest) - service

    # --- estimates --------------------------------------------------------------------------

    def before(
        self, tenant_id: str, weight: int, uncached_tokens: int, now: float
    ) -> tuple[float, float]:
        """Estimate the requests and uncached tokens served before a request that came now."""
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
        # The picture may be a little old.
        return min(requests + others[0], self.requests), min(
            tokens + others[1], self.totals.uncached_tokens
        )

    def cheapest_to_lose(self, now: float) -> Request | None:
        """Return the last request of the tenant whose waiting work would be done last."""
        if not self.requests:
            return None
        tenant = self._picture(now).last_served()
        if tenant is None:  # all of the picture have gone, others came
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
        """Return all waiting requests; for checks and for the end, not for decisions."""
        return [request for tenant in self._tenants.values() for request in tenant.waiting()]


def _move(tenant: TenantQueue, counter: float) -> None:
    """Set a tenant's counter for a reason other than service in this cell."""
    tenant.elsewhere += counter - tenant.counter
    tenant.counter = counter
