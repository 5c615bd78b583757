"""The sketch of a cell's cached prefixes, sent to gateways if the pool has several cells.

A sketch is a set of marks, which are short hashes of the prompts that the cell has placed recently.
The marks belong to two sets by age, the older and the younger generation. The older generation is
dropped when the younger is full, or when the replicas have evicted as many blocks as they have
cached. The least recently used blocks are evicted first, so the blocks of the older generation are
no longer cached by then. A mark that is used again moves to the younger generation. A sketch may be
wrong. Then a request finds less of its prompt cached.
"""

from collections.abc import Iterator, Sequence

from sluice.prefix_marks import marks_of
from sluice.wire.router.v1 import router_pb2 as wire

MARKS_MAX = 2048  # marks per generation, 8 KiB for a gateway that connects
MARKS_PER_S = 200.0  # mean rate of new marks to each gateway, 800 bytes per second
_BURST_MARKS = 400.0  # new marks that may be sent in one burst
_LONG_AGO = float("-inf")


class PrefixSketch:
    """The sketch of one cell, and its marks that have not been sent to gateways.

    Attributes:
        generation: Number of the younger generation.
        is_wanted: Whether the pool has other cells, so that gateways have a choice.
        marks_max: Most marks per generation.
    """

    __slots__ = (
        *("generation", "is_wanted", "marks_max"),
        *("_older", "_younger", "_news", "_allowance", "_allowed_at", "_evicted"),
    )

    def __init__(self) -> None:
        self.generation = 1
        self.is_wanted = True
        self.marks_max = MARKS_MAX
        self._older: dict[int, None] = {}
        self._younger: dict[int, None] = {}
        self._news: list[tuple[int, list[int]]] = []  # unsent marks, by generation
        self._allowance = _BURST_MARKS
        self._allowed_at = _LONG_AGO
        self._evicted = 0

    def __len__(self) -> int:
        """Return the number of marks."""
        return len(self._older.keys() | self._younger.keys())

    def use(self, hashes: Sequence[int], cached: int, now: float) -> None:
        """Add the marks of a prompt that is placed on a replica.

        The rate of marks is bounded. Marks of prompts without cached blocks are omitted first.

        Args:
            hashes: First eight bytes of the hash of each block.
            cached: Number of leading blocks that the replica has cached.
            now: Time, in seconds.
        """
        younger = self._younger
        fresh = [mark for mark in marks_of(hashes, cached) if mark not in younger]
        if not fresh:
            return
        grown = self._allowance + (now - self._allowed_at) * MARKS_PER_S
        self._allowance, self._allowed_at = min(_BURST_MARKS, grown), now
        left = self._allowance - len(fresh)
        if left < (0.0 if cached else _BURST_MARKS / 2):
            return
        self._allowance = left
        if len(younger) + len(fresh) > self.marks_max:
            self._begin()
        self._younger.update(dict.fromkeys(fresh))
        if self._news and self._news[-1][0] == self.generation:
            self._news[-1][1].extend(fresh)
        else:
            self._news.append((self.generation, fresh))

    def age(self, evicted: int, held: int) -> None:
        """Drop the older generation if the replicas have evicted its blocks.

        Args:
            evicted: Total number of blocks that the cell's replicas have evicted.
            held: Number of blocks that the replicas have cached now.
        """
        if evicted - self._evicted > held:
            self._evicted = evicted
            self._begin()
            self._news.append((self.generation, []))

    def _begin(self) -> None:
        self._older, self._younger = self._younger, {}
        self.generation += 1

    def news(self, cell_id: str, epoch: int) -> Iterator[wire.CellSketch]:
        """Yield the marks that have not been sent to gateways, and regard them as sent."""
        news, self._news = self._news, []
        for generation, marks in news:
            yield wire.CellSketch(cell_id=cell_id, epoch=epoch, generation=generation, marks=marks)

    def whole(self, cell_id: str, epoch: int) -> Iterator[wire.CellSketch]:
        """Yield the whole sketch, for a gateway that connects."""
        for generation, marks in (
            (self.generation - 1, self._older),
            (self.generation, self._younger),
        ):
            if marks:
                yield wire.CellSketch(
                    cell_id=cell_id, epoch=epoch, generation=generation, marks=marks
                )
