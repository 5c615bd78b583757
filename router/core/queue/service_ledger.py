"""Chooses the accounts of tenants that a cell reports to the other cells of its pool.

A report contains the accounts with the largest changes since they were last reported. An account
that does not fit is reported later, when its accumulated change is among the largest.
"""

from collections.abc import Iterable
from heapq import nlargest

from router.core.queue.tenant_queue import TenantQueue


class ServiceLedger:
    """The accounts of one tier that may have changed since they were last reported.

    Attributes:
        reports: Number of the last report.
    """

    __slots__ = ("_changed", "reports")

    def __init__(self) -> None:
        self.reports = 0
        self._changed: dict[TenantQueue, None] = {}

    def open(self, tenant: TenantQueue) -> None:
        """Open the account of a tenant, which the next report contains for the first time."""
        tenant.since = self.reports + 1

    def note(self, tenant: TenantQueue) -> None:
        """Mark a tenant's account as changed, by service or by a corrected charge."""
        self._changed[tenant] = None

    def keep(self, tenants: Iterable[TenantQueue]) -> None:
        """Drop all accounts except the accounts of the given tenants."""
        kept = set(tenants)
        self._changed = {tenant: None for tenant in self._changed if tenant in kept}

    def recent(self) -> list[TenantQueue]:
        """Return all accounts that may have changed since their last report."""
        return list(self._changed)

    def note_reported(self, tenants: Iterable[TenantQueue], number: int) -> None:
        """Record that report `number` contains the current state of the given accounts."""
        self.reports = number
        for tenant in tenants:
            tenant.reported = tenant.service
        for tenant in self.recent():
            if not tenant.running and tenant.reported == tenant.service:
                del self._changed[tenant]


def largest_changes(tenants: Iterable[TenantQueue], count: int) -> list[TenantQueue]:
    """Return the accounts that changed most since their last report, at most `count` of them."""
    changed = [tenant for tenant in tenants if tenant.service != tenant.reported]
    if len(changed) <= count:
        return changed
    return nlargest(count, changed, key=lambda tenant: abs(tenant.service - tenant.reported))
