"""Records which nodes have which complete artifacts, in the table `node_artifacts`."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy.exc import DBAPIError

from control_plane.database import Database
from control_plane.distribution import repository
from sluice.errors import PlatformError
from sluice.lifecycle import run_every

_WRITE_S = 0.2
_STEP_S = 5.0  # seconds after which a step begins no further transaction
_CLEAN_S = 15.0
_REPEAT = 4  # number of cleanings after which all rows are compared, even without changes
_PAIRS_MAX = 5_000  # largest number of (node, digest) pairs in one transaction
_PAIRS_MIN = 100  # smallest limit of pairs per transaction, even if the database is slow
_NODES_MAX = 100  # largest number of nodes compared in one query
_TIMEOUT_S = 10.0
_EXPECTED = (PlatformError, DBAPIError)


@dataclass(slots=True)
class HoldingsBatch:
    """The differences that one transaction writes, by node."""

    added: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    removed: dict[str, list[str]] = field(default_factory=dict[str, list[str]])


class HoldingsLedger:
    """The complete artifacts of nodes, and their differences from the stored rows. Pure."""

    def __init__(self) -> None:
        self._complete: dict[str, set[str]] = {}
        self._rows: dict[str, set[str]] = {}  # stored digests by node, as last read or written
        self._changed: dict[str, None] = {}  # nodes with changes, the longest waiting first

    def note(self, node_id: str, complete: Mapping[str, bool], *, is_full: bool) -> None:
        """Apply a node's report on some artifacts, or on all if `is_full`."""
        whole = {digest for digest, is_whole in complete.items() if is_whole}
        had = self._complete.get(node_id)
        if had is None or is_full:
            self._complete[node_id] = whole
            is_changed = whole != had
        else:
            gone = had & (complete.keys() - whole)
            is_changed = bool(gone) or not whole <= had
            had |= whole
            had -= gone
        if is_changed:
            self._changed[node_id] = None

    def forget(self, node_id: str) -> None:
        """Stop writing rows of a node that has disconnected.

        The rows stay in the table until the node is lost.
        """
        for known in (self._complete, self._rows, self._changed):
            known.pop(node_id, None)

    def unread(self) -> str | None:
        """Return a node with pending changes whose rows have to be read first."""
        return next((node_id for node_id in self._changed if node_id not in self._rows), None)

    def read(self, node_id: str, rows: Iterable[str]) -> None:
        """Set the stored rows of a node."""
        if node_id in self._complete:
            self._rows[node_id] = set(rows)

    def batch(self, pairs_max: int) -> HoldingsBatch:
        """Return the next changes to write, with at most `pairs_max` pairs of node and digest."""
        batch, left = HoldingsBatch(), pairs_max
        for node_id in list(self._changed):
            rows = self._rows.get(node_id)
            if rows is None:
                continue
            has = self._complete[node_id]
            for found, into in ((has - rows, batch.added), (rows - has, batch.removed)):
                if found and left:
                    into[node_id] = sorted(found)[:left]
                    left -= len(into[node_id])
            if rows == has:
                del self._changed[node_id]
            if not left:
                break
        return batch

    def written(self, batch: HoldingsBatch) -> None:
        """Record that a batch was written."""
        for node_id in {**batch.added, **batch.removed}:
            rows = self._rows.get(node_id)
            if rows is not None:
                rows.update(batch.added.get(node_id, ()))
                rows.difference_update(batch.removed.get(node_id, ()))

    def nodes(self) -> list[str]:
        """Return the nodes whose rows were read."""
        return list(self._rows)

    def compare(self, counts: Mapping[str, int]) -> None:
        """Compare the numbers of stored rows by node with the numbers that this process expects.

        Rows of a node with a difference are read again.
        """
        for node_id, count in counts.items():
            rows = self._rows.get(node_id)
            if rows is not None and len(rows) != count and node_id not in self._changed:
                del self._rows[node_id]
                self._changed[node_id] = None

    @property
    def is_due(self) -> bool:
        """Whether there may be changes to write."""
        return bool(self._changed)


class Recorder:
    """Tracks the complete artifacts of connected nodes, and writes changes in batches."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ledger = HoldingsLedger()
        self._pairs_max = _PAIRS_MAX
        self._cleanings = 0

    def note(self, node_id: str, complete: Mapping[str, bool], *, is_full: bool) -> None:
        """Apply a node's report on some artifacts, or on all if `is_full`."""
        self._ledger.note(node_id, complete, is_full=is_full)

    def forget(self, node_id: str) -> None:
        """Stop writing rows of a node that has disconnected.

        The rows stay in the table until the node is lost.
        """
        self._ledger.forget(node_id)

    async def run(self) -> None:
        """Write changes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for interval_s, step in ((_WRITE_S, self._write), (_CLEAN_S, self._clean)):
                tasks.create_task(
                    run_every(
                        interval_s,
                        step,
                        name=f"node-artifacts-{step.__name__.strip('_')}",
                        expected=_EXPECTED,
                        step_timeout_s=_TIMEOUT_S,
                    )
                )

    async def _write(self) -> None:
        clock = asyncio.get_running_loop().time
        until_s = clock() + _STEP_S
        while self._ledger.is_due and clock() < until_s:
            node_id = self._ledger.unread()
            if node_id is not None:
                work = partial(repository.complete_on, node_id=node_id)
                self._ledger.read(node_id, await self._database.run(work))
            else:
                await self._write_batch(self._ledger.batch(self._pairs_max))

    async def _write_batch(self, batch: HoldingsBatch) -> None:
        try:
            await self._database.run(
                partial(repository.write_complete, added=batch.added, removed=batch.removed)
            )
        except _EXPECTED:
            self._pairs_max = max(_PAIRS_MIN, self._pairs_max // 2)
            raise
        self._pairs_max = min(_PAIRS_MAX, self._pairs_max * 2)
        self._ledger.written(batch)

    async def _clean(self) -> None:
        await self._database.run(repository.remove_lost)
        self._cleanings += 1
        if self._cleanings % _REPEAT:
            return
        nodes = self._ledger.nodes()
        for begin in range(0, len(nodes), _NODES_MAX):
            some = nodes[begin : begin + _NODES_MAX]
            self._ledger.compare(
                await self._database.run(partial(repository.counts, node_ids=some))
            )
