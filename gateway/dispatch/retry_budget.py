"""Bounds the retries of a worker, so that it survives a lost fleet without a retry storm. Pure."""

# Retries per period in the common budget, which all tenants share.
ALWAYS = 64
# Retries per period and open request in a tenant's own budget. One is for the loss of the request,
# and one more is for a refusal if the next router does not own the cell yet.
AGAIN = 2
PERIOD_S = 10.0


class RetryBudget:
    """The retries of the current period, counted for each tenant.

    The loss of every replica or router costs one or two retries per open request. Each tenant's own
    budget covers these retries, however many requests other tenants have lost. Further retries use
    a common budget, and no tenant may use more of the common budget than is left in it. Requests
    that are lost again and again (a poisonous prompt, engines that crash at once) exhaust their
    budgets and are then refused. So retries never multiply the load of a fleet in trouble.
    """

    def __init__(self) -> None:
        """Begin a period without retries."""
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
        """Use one retry for an open request, or return False if the budgets are exhausted."""
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
    """The share of one tenant: open requests, own retries, and retries from the common budget."""

    __slots__ = ("open", "own", "shared")

    def __init__(self) -> None:
        self.open = self.own = self.shared = 0
