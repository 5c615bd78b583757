"""Bounds a worker's retries, so that the loss of many replicas causes no retry storm. Pure."""

# Retries per period in the common budget, which all tenants share.
ALWAYS = 64
# Retries per period in a tenant's own budget, for each open request of the tenant. The first is for
# the loss of the request. The second is needed if the next router does not own the cell yet.
AGAIN = 2
PERIOD_S = 10.0


class RetryBudget:
    """The retries of the current period, counted for each tenant.

    The loss of every replica or router costs one or two retries per open request. Each tenant's own
    budget covers these retries, regardless of the losses of other tenants. Further retries use the
    common budget. From that budget, a tenant may use at most as many retries as remain for others.
    A request that is lost repeatedly, for example because its prompt crashes engines, exhausts the
    budgets and is refused. So retries never multiply the requests to a failing fleet.
    """

    def __init__(self) -> None:
        """Begin the first period."""
        self._shares: dict[str, _Share] = {}
        self._shared = 0
        self._began_at_s = 0.0
        self.refused = 0

    @property
    def tenants(self) -> int:
        """Number of tenants with open requests, or with retries in this period."""
        return len(self._shares)

    def opened(self, tenant_id: str) -> None:
        """Count one more open request."""
        share = self._shares.get(tenant_id)
        if share is None:
            self._shares[tenant_id] = share = _Share()
        share.open += 1

    def closed(self, tenant_id: str) -> None:
        """Subtract one open request."""
        share = self._shares[tenant_id]
        share.open -= 1
        if not share.open and not share.own:
            del self._shares[tenant_id]

    def take(self, tenant_id: str, now_s: float) -> bool:
        """Use one retry for an open request, or return False if no budget has a retry left."""
        if now_s - self._began_at_s >= PERIOD_S:
            self._begin_period(now_s)
        share = self._shares[tenant_id]
        if share.own < AGAIN * share.open:
            share.own += 1
        elif share.shared < ALWAYS - self._shared:
            share.shared += 1
            self._shared += 1
        else:
            self.refused += 1
            return False
        return True

    def _begin_period(self, now_s: float) -> None:
        self._began_at_s = now_s
        self._shared = 0
        self._shares = {tenant: share for tenant, share in self._shares.items() if share.open}
        for share in self._shares.values():
            share.own = share.shared = 0


class _Share:
    """Counts of one tenant: open requests, own retries, and retries from the common budget."""

    __slots__ = ("open", "own", "shared")

    def __init__(self) -> None:
        self.open = self.own = self.shared = 0
