"""Bounds the retries of a worker: enough for a lost fleet, not for a retry storm. Pure."""

# Retries in each period besides, even for a worker with little else to do.
ALWAYS = 64
# Every open request may be tried again so often in this time: it is lost, and the router that takes
# over sends it away once more before it owns the cell.
AGAIN = 2
PERIOD_S = 10.0


class RetryBudget:
    """The retries of this period, counted for each tenant.

    Losing every replica or router costs a retry or two per open request: each tenant's own part
    covers that, whatever others have lost. A tenant draws further retries from a common budget, of
    which no tenant takes more than it leaves to the others. Requests that are lost again and again
    (a poisonous prompt, engines that crash at once) use it up and are then refused. So retries
    never multiply the load of a fleet in trouble.
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
        """Count one open request less."""
        share = self._shares[tenant_id]
        share.open -= 1
        if not share.open and not share.own:
            del self._shares[tenant_id]

    def take(self, tenant_id: str, now_s: float) -> bool:
        """Take one retry of an open request; False when there is none left."""
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
