"""The `PrefixBoard` of each pool with several cells, filled from the routers' sketches."""

from collections.abc import Callable, Iterable, Sequence

from gateway.dispatch.cell_choice import CellView, Wish, choose
from gateway.dispatch.prefix_board import PrefixBoard
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire

_MARKS_MAX = 8192  # accepted marks per message, four times as many as routers send


class PrefixBoards:
    """The prefix boards by pool. A pool with one cell needs no board."""

    def __init__(self, cells_of: Callable[[str], Sequence[control.Cell]]) -> None:
        """Start without sketches.

        Args:
            cells_of: Returns the cells of a pool.
        """
        self._cells_of = cells_of
        self._boards: dict[str, PrefixBoard] = {}
        self._pools: dict[str, str] = {}  # pool id by cell id, for pools with several cells

    def follow(self, pool_ids: Iterable[str]) -> None:
        """Drop the boards and sketches of pools and cells that no longer exist."""
        self._pools.clear()
        for pool_id in pool_ids:
            cells = self._cells_of(pool_id)
            if len(cells) > 1:
                self._pools.update((cell.id, pool_id) for cell in cells)
        for pool_id in self._boards.keys() - set(self._pools.values()):
            del self._boards[pool_id]
        for pool_id, board in self._boards.items():
            board.retain([cell.id for cell in self._cells_of(pool_id)])

    def learn(self, sketch: wire.CellSketch) -> None:
        """Add a part of a cell's sketch, unless its pool is unknown or has only one cell."""
        pool_id = self._pools.get(sketch.cell_id)
        if pool_id is not None and len(sketch.marks) <= _MARKS_MAX:
            board = self._boards.setdefault(pool_id, PrefixBoard())
            board.learn(sketch.cell_id, sketch.epoch, sketch.generation, sketch.marks[:])

    def choose(self, pool_id: str, cells: Sequence[CellView], wish: Wish) -> CellView:
        """Return the cell of a pool for a request, and record that it will cache the prompt."""
        board = self._boards.get(pool_id)
        cell, known = choose(cells, wish, board)
        if board is not None and not wish.session:
            board.sent(cell.cell_id, wish.hashes, known)
        return cell
