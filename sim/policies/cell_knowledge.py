"""The data of simulated gateways about the blocks that cells have cached."""

from collections.abc import Sequence
from enum import StrEnum

from gateway.dispatch.prefix_board import PrefixBoard
from sim.pool import SimPool


class CellKnowledge(StrEnum):
    """The kind of data that gateways have about the cached blocks of cells."""

    SKETCHES = "sketches"  # the sketches of the product
    EXACT = "exact"  # one index over all cells, exact and always current
    AFFINITY = "affinity"  # no data, so long prompts are placed by a hash of their prefix


class ExactBoard(PrefixBoard):
    """The pool's own index in place of the cells' sketches."""

    def __init__(self, pool: SimPool, cells: Sequence[str]) -> None:
        super().__init__()
        self._pool = pool
        self._cells = cells

    def __len__(self) -> int:
        """Return the number of cells."""
        return len(self._cells)

    def holders(self, hashes: Sequence[int], cell_ids: Sequence[str]) -> tuple[int, list[str]]:
        """Return the most cached blocks of any cell, and the cells that have cached that many."""
        depths = dict.fromkeys(cell_ids, 0)
        for replica, depth in enumerate(self._pool.hits(hashes)):
            cell_id = self._cells[replica % len(self._cells)]
            if cell_id in depths:
                depths[cell_id] = max(depths[cell_id], depth)
        most = max(depths.values())
        return most, [cell_id for cell_id in cell_ids if depths[cell_id] == most]


def board_of(knowledge: CellKnowledge, pool: SimPool, cells: Sequence[str]) -> PrefixBoard | None:
    """Return the prefix board of gateways, or None for gateways without data about cells."""
    match knowledge:
        case CellKnowledge.SKETCHES:
            return PrefixBoard()
        case CellKnowledge.EXACT:
            return ExactBoard(pool, cells)
        case CellKnowledge.AFFINITY:
            return None
