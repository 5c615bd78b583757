"""Decides when gateways get the states of cells: after changes, and all of them at intervals."""

from collections.abc import Iterable

from router.core.cell import CellBook
from router.core.types.request import ConnectedGateway

_ALONE_FACTOR = 1.5  # a state waits so much longer for other news to come with
_RECITAL_S = 1.0  # all states are repeated this often


class CellNews:
    """The broadcasts of cell states to gateways, at most one per interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._told_at = self._recited_at = float("-inf")

    def due_at(self) -> float:
        """Return when a changed state is sent even without other messages.

        While there are frames, a tick comes before: the state leaves with its tokens.
        """
        return self._told_at + _ALONE_FACTOR * self._interval_s

    def tell(
        self,
        cells: Iterable[CellBook],
        gateways: Iterable[ConnectedGateway],
        now: float,
        *,
        may_recite: bool,
        is_draining: bool,
    ) -> None:
        """Add the states of changed cells to the gateways' batches, or of all cells."""
        everything = may_recite and now - self._recited_at >= _RECITAL_S
        if everything:
            self._recited_at = now
        elif now - self._told_at < self._interval_s:
            return
        for cell in cells:
            if cell.is_dirty or everything:
                cell.is_dirty = False
                self._told_at = now
                state = cell.state(now, is_draining=is_draining)
                if state == cell.told and not everything:
                    continue
                cell.told = state
                for gateway in gateways:
                    gateway.batch.cells.append(state)
