"""Chooses the accounts of tenants that a cell reports to the other cells of its pool.

A report holds the accounts that have changed since the last one, the largest changes first. Changes
that do not fit wait, grow, and come later.
"""

from collections.abc import Iterable
from heapq import nlargest

from router.core.queue.tenant_queue import TenantQueue


class ServiceLedger:
    """The accounts of one tier that may have changed since they were reported.

    Attributes:
        reports: Number of the last report.
    """

    __slots__ = ("_changed", "reports")

    def __init__(self) -> None:
        self.reports = 0
        self._changed: dict[TenantQueue, None] = {}

    def open(self, tenant: TenantQueue) -> None:
        """Begin the account of a tenant."""
        tenant.since = self.reports + 1

    def note(self, tenant: TenantQueue) -> None:
        """Note that a tenant is served, or that a charge was corrected."""
        self._changed[tenant] = None

    def keep(self, tenants: Iterable[TenantQueue]) -> None:
        """Drop all accounts but these."""
        kept = set(tenants)
        self._changed = {tenant: None for tenant in self._changed if tenant in kept}

    def recent(self) -> list[TenantQueue]:
        """Return the accounts that may have changed since the last report."""
        return list(self._changed)

    def told(self, tenants: Iterable[TenantQueue], number: int) -> None:
        """Note that report `number` holds these accounts in their present state."""
        self.reports = number
        for tenant in tenants:
            tenant.told = tenant.service
        for tenant in self.recent():
            if not tenant.running and tenant.told == tenant.service:
                del self._changed[tenant]


def largest_changes(tenants: Iterable[TenantQueue], count: int) -> list[TenantQueue]:
    """Return the accounts with the largest changes since they were reported, at most `count`."""
    changed = [tenant for tenant in tenants if tenant.service != tenant.told]
    if len(changed) <= count:
        return changed
    return nlargest(count, changed, key=lambda tenant: abs(tenant.service - tenant.told))
