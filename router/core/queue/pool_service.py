"""Merges the reports of a pool's other cells into changes of tenants' service.

Reports hold sums, so this is idempotent: a doubled, late or lost report has no lasting effect.
Service before this cell listened, or during an interruption, is not counted: the cell then goes by
its own counts, and there is no jump when reports return.
"""

from collections import OrderedDict
from typing import NamedTuple

from router.core.types.service import ServiceReport

SILENT_S = 5.0  # after this long without a report, the next one is a new beginning
_SOURCES_MAX = 256  # cells of one pool that are heard; the one heard longest ago is forgotten
_ACCOUNTS_MAX = 65_536  # of all sources: about 20 MB
_SMOOTHING = 0.05  # weight of an interval


class Change(NamedTuple):
    """Virtual service of a tenant in one tier of other cells since the last report; may be < 0."""

    priority: int
    tenant_id: str
    service: float


class _Source:
    """The accounts of one cell, as its owner reported them.

    Attributes:
        first: Number of the first report of this epoch without an interruption since; -1: none.
        last: Number of the latest one.
        accounts: (since, service) by tier and tenant, in the order of their changes.
    """

    __slots__ = ("accounts", "epoch", "first", "heard_at", "last")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.first = self.last = -1
        self.heard_at = 0.0
        self.accounts: OrderedDict[tuple[int, str], tuple[int, float]] = OrderedDict()


class PoolService:
    """The known service in the other cells of the pool.

    Attributes:
        interval_s: Recent mean seconds between two reports of a cell.
    """

    __slots__ = ("_sources", "interval_s")

    def __init__(self) -> None:
        self.interval_s = 0.0
        self._sources: OrderedDict[tuple[str, str], _Source] = OrderedDict()

    def hear(self, report: ServiceReport, now: float) -> list[Change]:
        """Take a report; return its news."""
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
        """Return the state of a report's cell; None: the report is of an earlier epoch."""
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
        """Number of other cells with reports."""
        return len(self._sources)
