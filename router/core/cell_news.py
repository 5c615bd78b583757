"""Decides when gateways get the states of cells: after changes, and all of them at intervals."""

from collections.abc import Collection, Iterable, Mapping

from router.core.cell import CellBook
from router.core.tier_gates import TierGates
from router.core.types.request import ConnectedGateway, Request

_ALONE_FACTOR = 1.5  # a state waits so much longer for other news to come with
_RECITAL_S = 1.0  # all states are repeated this often
_URGENT_S = 0.02  # a tier that has no room any more is told as soon as that


class CellNews:
    """The broadcasts of cell states to gateways, at most one per interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._told_at = self._recited_at = float("-inf")
        self._gates: dict[str, TierGates] = {}  # by cell, while any is known
        self._is_urgent = False

    def refused(self, cell: CellBook, request: Request, retry_after_s: float, now: float) -> None:
        """Note that a cell had no room for a request."""
        if request.adapter and cell.fleet.residency.is_cold(request.adapter):
            return  # there may be room for all others
        gates = self._gates.setdefault(cell.cell_id, TierGates())
        if gates.refused(request, retry_after_s, now):
            cell.is_dirty = self._is_urgent = True

    def fitted(self, request: Request) -> None:
        """Note that a cell had room for a request."""
        if (gates := self._gates.get(request.cell_id)) is not None:
            gates.fitted(request)

    def turned_away(self, cell: CellBook, priority: int, requests: int, now: float) -> None:
        """Note that gateways refused requests by what they heard of a cell."""
        if (gates := self._gates.get(cell.cell_id)) is not None:
            gates.turned_away(priority, requests, cell, now)

    def due_at(self) -> float:
        """Return when a changed state is sent even without other messages.

        While there are frames, a tick comes before: the state leaves with its tokens.
        """
        wait_s = _URGENT_S if self._is_urgent else _ALONE_FACTOR * self._interval_s
        return self._told_at + wait_s

    def tell(
        self,
        cells: Mapping[str, CellBook],
        gateways: Collection[ConnectedGateway],
        now: float,
        *,
        may_recite: bool,
        is_draining: bool,
    ) -> None:
        """Add the states of changed cells to the gateways' batches, or of all cells."""
        everything = may_recite and now - self._recited_at >= _RECITAL_S
        if everything:
            self._recited_at = now
            self._gates = {key: it for key, it in self._gates.items() if key in cells}
        elif now < self._told_at + (_URGENT_S if self._is_urgent else self._interval_s):
            return
        self._is_urgent = False
        for cell in cells.values():
            if cell.is_dirty or everything:
                cell.is_dirty = False
                self._told_at = now
                _report_sketch(cell, gateways)
                state = cell.state(now, is_draining=is_draining)
                if (gates := self._gates.get(cell.cell_id)) is not None:
                    state.tier_gates.extend(gates.told(cell, len(gateways), now))
                    if gates.is_empty:
                        del self._gates[cell.cell_id]
                if state == cell.told and not everything:
                    continue
                cell.told = state
                for gateway in gateways:
                    gateway.batch.cells.append(state)


def _report_sketch(cell: CellBook, gateways: Iterable[ConnectedGateway]) -> None:
    for part in cell.fleet.sketch.news(cell.cell_id, cell.epoch):
        for gateway in gateways:
            gateway.batch.sketches.append(part)
