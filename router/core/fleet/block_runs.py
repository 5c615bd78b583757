"""Runs of consecutive blocks, which are the elements of the prefix index."""

from collections import deque
from collections.abc import Hashable, Sequence

# Share of the cache by which the index may exceed a replica's size until the engine reports its
# evictions. If the router guessed evictions instead, the index would lose blocks that are still
# cached and never reported again.
_REPORT_SLACK_RATIO = 0.125


class BlockRun:
    """Consecutive blocks of a chain.

    Attributes:
        keys: Hashes of the blocks, in the order of the chain, at least one.
        holders: Bit set of the replicas that have cached all blocks of the run.
        is_loose: Whether the run may come from a report. The run may then span several chains,
            since reports do not mark the boundaries between chains.
    """

    __slots__ = ("holders", "is_loose", "keys")

    def __init__(self, keys: list[Hashable], holders: int, *, is_loose: bool) -> None:
        self.keys = keys
        self.holders = holders
        self.is_loose = is_loose


class Use:
    """A dispatch to a replica or a report of a replica, which uses some of the cached runs.

    Attributes:
        number: Number of the dispatch or report, in ascending order.
        at: Time of the dispatch, or -inf for a report.
        runs: Runs for which this is the last use, in the order of the prompt. The last run is
            evicted first.
    """

    __slots__ = ("at", "number", "runs")

    def __init__(self, number: int, at: float) -> None:
        self.number = number
        self.at = at
        self.runs: list[BlockRun] = []


class HeldBlocks:
    """The KV blocks that one replica has cached, by the router's record.

    Each replica has its own dictionary, because a full dictionary is copied as a whole when it
    grows. A single dictionary with two million blocks would block the router for 150 ms.

    Attributes:
        kv_blocks: Size of the replica's cache, in blocks.
        where: Run of each block.
        uses: Last use of each run.
        by_age: Uses that are the last use of a run, by number, in ascending order.
    """

    __slots__ = (
        *("bit", "by_age", "has_events", "kv_blocks", "replica_id", "number", "uses", "where"),
    )

    def __init__(self, replica_id: str, number: int, kv_blocks: int) -> None:
        self.replica_id = replica_id
        self.number = number
        self.bit = 1 << number
        self.kv_blocks = kv_blocks
        self.has_events = False
        self.where: dict[Hashable, BlockRun] = {}
        self.uses: dict[BlockRun, Use] = {}
        self.by_age: dict[int, Use] = {}

    @property
    def room(self) -> int:
        """Most blocks that the index may record for the replica."""
        slack = int(self.kv_blocks * _REPORT_SLACK_RATIO) if self.has_events else 0
        return self.kv_blocks + slack

    def use(self, run: BlockRun, use: Use) -> None:
        """Make `use` the last use of a run."""
        older = self.uses.get(run)
        if older is use:
            return
        if older is not None:
            self._leave(run, older)
        self.uses[run] = use
        use.runs.append(run)

    def unuse(self, run: BlockRun) -> None:
        """Remove a run from its last use."""
        self._leave(run, self.uses.pop(run))

    def _leave(self, run: BlockRun, use: Use) -> None:
        use.runs.remove(run)
        if not use.runs:
            del self.by_age[use.number]

    def point(self, keys: list[Hashable], run: BlockRun) -> None:
        """Record `run` as the run of the given blocks."""
        self.where.update(dict.fromkeys(keys, run))

    def forget(self, keys: list[Hashable]) -> None:
        """Remove blocks that the replica has evicted."""
        deque(map(self.where.__delitem__, keys), 0)


def distinct(hashes: Sequence[Hashable]) -> list[Hashable]:
    """Return the hashes without duplicates, which only an invalid prompt has."""
    keys = list(hashes)
    return keys if len(set(keys)) == len(keys) else list(dict.fromkeys(keys))


def agreement(own: list[Hashable], keys: list[Hashable], start: int) -> int:
    """Return the length of the common prefix of `own` and `keys[start:]`."""
    part = keys[start : start + len(own)]
    if part == own:
        return len(own)
    pairs = enumerate(zip(own, part, strict=False))
    return next((n for n, (mine, other) in pairs if mine != other), min(len(own), len(part)))


def overlap(run: BlockRun, hashes: Sequence[Hashable], start: int) -> int:
    """Return the length of the common prefix of a run and `hashes[start:]`.

    In a chain, equal hashes imply equal preceding hashes, so a binary search suffices.
    """
    own = run.keys
    if run.is_loose:
        return agreement(own, list(hashes[start : start + len(own)]), 0)
    low, high = 0, min(len(own), len(hashes) - start)
    if own[high - 1] == hashes[start + high - 1]:
        return high
    high -= 1
    while low < high:
        middle = (low + high) >> 1
        if own[middle] == hashes[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low


def stretch(own: list[Hashable], keys: list[Hashable], start: int, step: int) -> int:
    """Return how many keys match `own` from `keys[start]` on, forwards (1) or backwards (-1)."""
    at = len(own) - 1 if own[-1] == keys[start] else own.index(keys[start])
    count = 1
    limit = min(len(keys) - start, len(own) - at if step > 0 else at + 1)
    while count < limit and keys[start + count] == own[at + step * count]:
        count += 1
    return count
