"""Merges the reports of a pool's other cells into changes of the tokens that tenants received.

Reports contain totals, so a repeated, late or lost report has no lasting effect. Service before the
first report, or during an interruption of the reports, is ignored. So the counters do not jump when
reports resume. During an interruption the cell uses its own counts.
"""

from collections import OrderedDict
from typing import NamedTuple

from router.core.types.service import ServiceReport

SILENT_S = 5.0  # seconds without a report, after which the next report only sets a new baseline
_SOURCES_MAX = 256  # most cells with stored reports, above which the oldest is dropped
_ACCOUNTS_MAX = 65_536  # accounts of all cells together, about 20 MB
_SMOOTHING = 0.05  # weight of a new interval in the mean interval between reports


class Change(NamedTuple):
    """The change of a tenant's virtual service in one tier of another cell between two reports.

    The change is negative if a charge was refunded.
    """

    priority: int
    tenant_id: str
    service: float


class _Source:
    """The accounts of one cell, as its owner reported them.

    Attributes:
        first: Number of the first report of this epoch since the last interruption, or -1 if no
            such report has arrived.
        last: Number of the latest report.
        accounts: (since, service) by tier and tenant, in the order of their changes.
    """

    __slots__ = ("accounts", "epoch", "first", "heard_at", "last")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.first = self.last = -1
        self.heard_at = 0.0
        self.accounts: OrderedDict[tuple[int, str], tuple[int, float]] = OrderedDict()


class PoolService:
    """The service that tenants received in the other cells of the pool, from reports.

    Attributes:
        interval_s: Recent mean seconds between two reports of a cell.
    """

    __slots__ = ("_sources", "interval_s")

    def __init__(self) -> None:
        self.interval_s = 0.0
        self._sources: OrderedDict[tuple[str, str], _Source] = OrderedDict()

    def hear(self, report: ServiceReport, now: float) -> list[Change]:
        """Record a report, and return the changes of tenants' service since the last report."""
        source = self._source(report, now)
        if source is None or report.number <= source.last:
            return []
        if source.first < 0 or now - source.heard_at > SILENT_S:
            source.accounts.clear()
            source.first = report.number
        else:
            self.interval_s += _SMOOTHING * (now - source.heard_at - self.interval_s)
        source.last, source.heard_at = report.number, now
        changes: list[Change] = []
        for priority, tenant_id, since, service in report.accounts:
            key = (priority, tenant_id)
            known = source.accounts.pop(key, None)
            source.accounts[key] = (since, service)
            if known is not None and known[0] == since:
                change = service - known[1]
            else:
                change = service if since > source.first else 0.0
            if change:
                changes.append(Change(priority, tenant_id, change))
        accounts_max = _ACCOUNTS_MAX // len(self._sources)
        while len(source.accounts) > accounts_max:
            source.accounts.popitem(last=False)
        return changes

    def _source(self, report: ServiceReport, now: float) -> _Source | None:
        """Return the record of a report's cell, or None if the report has an outdated epoch."""
        key = (report.owner, report.cell_id)
        source = self._sources.get(key)
        if source is not None and report.epoch < source.epoch:
            return None
        if source is None or report.epoch > source.epoch:
            source = self._sources[key] = _Source(report.epoch)
            source.heard_at = now
        self._sources.move_to_end(key)
        if len(self._sources) > _SOURCES_MAX:
            self._sources.popitem(last=False)
        return source

    @property
    def cells(self) -> int:
        """Number of other cells that have sent reports."""
        return len(self._sources)
