"""Sketches of the prompts that one pool's cells cache, for the search of the best cell. Pure.

The best cell for a prompt has cached its longest prefix. A mark is a short hash of a prompt's first
blocks (`sluice.prefix_marks`), and routers report marks of the prompts that they have placed.

A cell's marks belong to two generations. When the router begins a new generation, the older one is
forgotten, because its prompts are no longer cached. Each generation has a Bloom filter, and all
filters of the pool share one transposed table. A row holds the bits of all filters at one position.
So a few rows suffice to test a mark against all cells at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sluice.prefix_marks import floored, mark_at, rungs

# Bits of a row's index. With 2,048 marks per generation, one in 170,000 tests of an absent mark is
# a false positive.
_ROWS_BITS = 16
_ROWS_MASK = (1 << _ROWS_BITS) - 1
_AT_SHIFT = 64 - _ROWS_BITS
_PROBES = 8
# Columns per cell, one per generation. Two generations are in use. The other columns let several
# forgotten generations be cleared together, because clearing rewrites all rows.
_COLUMNS = 4
# Maximum number of marks in one generation of a cell. The cell's router reports at most 2,048 of
# them. The others are for prompts that this worker has sent since the generation began.
_MARKS_MAX = 4096
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class SketchSlot:
    """The columns of a cell's sketch in the table.

    Attributes:
        shift: First column of the cell.
        epoch: Epoch of the cell's owner, which counts the changes of the owning router.
        generation: The router's number of the younger generation of marks.
        turns: Number of generations begun here after the first. The younger generation has the
            column `turns` modulo `_COLUMNS`.
        marks: Number of marks added to the younger generation.
    """

    shift: int
    epoch: int = 0
    generation: int = 0
    turns: int = 0
    marks: int = 0

    def column(self, turns: int) -> int:
        """Return the bit of the column whose generation began when `turns` had the given value."""
        return 1 << (self.shift + turns % _COLUMNS)

    @property
    def columns(self) -> int:
        """The bits of all columns of the cell."""
        return ((1 << _COLUMNS) - 1) << self.shift


class PrefixBoard:
    """The sketches of one pool's cells."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._slots: dict[str, SketchSlot] = {}
        self._living = 0  # bits of the columns in use
        self._retired = 0  # bits of columns whose generation is forgotten but not yet cleared

    def __len__(self) -> int:
        """Return the number of cells with a sketch."""
        return len(self._slots)

    # --- reports of cells --------------------------------------------------------------------

    def learn(self, cell_id: str, epoch: int, generation: int, marks: Sequence[int]) -> None:
        """Add the marks that a router reports about a cell.

        A new owner of the cell reports only prompts that it has placed itself. The marks of the
        former owner become the older generation, because the replicas still cache those prompts.
        """
        slot = self._slots.get(cell_id)
        if slot is None:
            slot = self._add(cell_id, epoch, generation)
        elif (epoch, generation) == (slot.epoch, slot.generation - 1):
            return  # a repeated report of the older generation, whose marks are in the table
        elif (epoch, generation) != (slot.epoch, slot.generation):
            self._turn(slot)
            slot.epoch, slot.generation = epoch, generation
        self._mark(slot, marks)

    def sent(self, cell_id: str, hashes: Sequence[int], known: int) -> None:
        """Add the marks of a prompt that is sent to a cell, before the cell's router reports them.

        Args:
            cell_id: Id of the cell. A cell without a sketch is ignored.
            hashes: First eight bytes of the hash of each block.
            known: Number of the prompt's leading blocks that the cell's sketch already has.
        """
        slot = self._slots.get(cell_id)
        if slot is not None:
            depths = [it for it in (*rungs(len(hashes)), floored(len(hashes))) if it > known]
            self._mark(slot, [mark_at(hashes, depth) for depth in depths])

    def retain(self, cell_ids: Iterable[str]) -> None:
        """Drop the sketches of all cells except the given ones."""
        for cell_id in self._slots.keys() - set(cell_ids):
            columns = self._slots.pop(cell_id).columns
            self._living &= ~columns
            self._retired |= columns

    def _add(self, cell_id: str, epoch: int, generation: int) -> SketchSlot:
        if not self._rows:
            self._rows = [0] * (1 << _ROWS_BITS)
        taken = {slot.shift for slot in self._slots.values()}
        shifts = range(0, _COLUMNS * len(taken) + 1, _COLUMNS)
        shift = next(it for it in shifts if it not in taken)
        slot = self._slots[cell_id] = SketchSlot(shift, epoch, generation)
        self._use(slot)
        return slot

    def _turn(self, slot: SketchSlot) -> None:
        oldest = slot.column(slot.turns - 1)
        self._living &= ~oldest
        self._retired |= oldest
        slot.turns += 1
        slot.marks = 0
        self._use(slot)

    def _use(self, slot: SketchSlot) -> None:
        """Use the column of a slot's younger generation, after clearing its forgotten marks."""
        column = slot.column(slot.turns)
        if column & self._retired:
            keep = ~self._retired
            self._rows = [row & keep for row in self._rows]
            self._retired = 0
        self._living |= column

    def _mark(self, slot: SketchSlot, marks: Sequence[int]) -> None:
        room = _MARKS_MAX - slot.marks
        rows, bit = self._rows, slot.column(slot.turns)
        slot.marks += min(room, len(marks))
        for mark in marks[:room]:
            for position in _positions(mark):
                rows[position] |= bit

    # --- look-up ----------------------------------------------------------------------------

    def holders(self, hashes: Sequence[int], cell_ids: Sequence[str]) -> tuple[int, list[str]]:
        """Return the longest cached prefix of a prompt in any cell, and the cells that cache it.

        Args:
            hashes: First eight bytes of the hash of each block.
            cell_ids: The cells that may be chosen.

        Returns:
            The prefix's length in blocks, and the cells that cache this prefix. If no cell caches
                any block, the length is 0 and all cells are returned.
        """
        slots = self._slots
        cells = {1 << slots[it].shift: it for it in cell_ids if it in slots}
        depth, left = self._search(hashes, sum(cells)) if cells else (0, 0)
        if not depth:
            return 0, list(cell_ids)
        found: list[str] = []
        while left:
            bit = left & -left
            found.append(cells[bit])
            left ^= bit
        return depth, found

    def _search(self, hashes: Sequence[int], left: int) -> tuple[int, int]:
        """Return the longest prefix in blocks that a cell in `left` has, and those cells' bits."""
        depth, blocks = 0, len(hashes)
        for rung in rungs(blocks):
            found = left & self._having(mark_at(hashes, rung))
            if not found:
                break
            depth, left = rung, found
        end = floored(min(blocks, 2 * depth - 1)) if depth else 0
        while end > depth:
            found = left & self._having(mark_at(hashes, end))
            if found:
                return end, found
            end = floored(end - 1)
        return depth, left

    def _having(self, mark: int) -> int:
        """Return the first column's bit of each cell that has a mark."""
        rows = self._rows
        mixed = mark * _MIX & _MASK
        at, step = mixed >> _AT_SHIFT, mixed >> 16 & _ROWS_MASK | 1
        found = rows[at] & self._living
        probes = 1
        while found and probes < _PROBES:
            at = at + step & _ROWS_MASK
            found &= rows[at]
            probes += 1
        found |= found >> 1
        return found | found >> 2  # a cell's first bit is now the OR of its columns


def _positions(mark: int) -> list[int]:
    mixed = mark * _MIX & _MASK
    at, step = mixed >> _AT_SHIFT, mixed >> 16 & _ROWS_MASK | 1
    return [at + step * probe & _ROWS_MASK for probe in range(_PROBES)]
