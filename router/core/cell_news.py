"""Decides when gateways are sent cell states.

Changed states are sent soon. All states are sent at intervals.
"""

from collections.abc import Collection, Iterable, Mapping

from router.core.cell import CellBook
from router.core.tier_gates import TierGates
from router.core.types.request import ConnectedGateway, Request

_ALONE_FACTOR = 1.5  # broadcast intervals after which a changed state is sent without tokens
_RECITAL_S = 1.0  # least seconds between two broadcasts of all states
_URGENT_S = 0.02  # least seconds between two broadcasts while a tier's gate is about to close


class CellNews:
    """The broadcasts of cell states to gateways, at most one per interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._told_at = self._recited_at = float("-inf")
        self._gates: dict[str, TierGates] = {}  # gates by cell, only for cells with recent refusals
        self._is_urgent = False

    def refused(self, cell: CellBook, request: Request, retry_after_s: float, now: float) -> None:
        """Record that admission refused a request for lack of capacity."""
        gates = self._gates.setdefault(cell.cell_id, TierGates())
        if gates.refused(request, retry_after_s, now):
            cell.is_dirty = self._is_urgent = True

    def fitted(self, request: Request) -> None:
        """Record that a request was admitted."""
        if (gates := self._gates.get(request.cell_id)) is not None:
            gates.fitted(request)

    def turned_away(self, cell: CellBook, priority: int, requests: int, now: float) -> None:
        """Record that gateways refused requests because of a cell's gates."""
        if (gates := self._gates.get(cell.cell_id)) is not None:
            gates.turned_away(priority, requests, cell, now)

    def due_at(self) -> float:
        """Return the time at which a changed state is sent in a message without tokens.

        While frames arrive, a tick runs earlier, and the state is sent along with tokens.
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
        """Add the states of changed cells to gateways' batches.

        Every `_RECITAL_S` seconds, the states of all cells are added.
        """
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
                    state.tier_gates.extend(gates.messages(cell, len(gateways), now))
                    if gates.is_empty:
                        del self._gates[cell.cell_id]
                if state == cell.sent_state and not everything:
                    continue
                cell.sent_state = state
                for gateway in gateways:
                    gateway.batch.cells.append(state)


def _report_sketch(cell: CellBook, gateways: Iterable[ConnectedGateway]) -> None:
    for part in cell.fleet.sketch.news(cell.cell_id, cell.epoch):
        for gateway in gateways:
            gateway.batch.sketches.append(part)
