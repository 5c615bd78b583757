"""Writes down which artifacts lie complete on which node: `node_artifacts`."""

import asyncio

from sqlalchemy.exc import DBAPIError

from control_plane.database import Database
from control_plane.distribution import repository
from sluice.errors import PlatformError
from sluice.lifecycle import run_every

_WRITE_S = 0.2
_CLEAN_S = 15.0
_REPEAT = 4  # cleanings after which everything is written again, whatever happened to the rows
_NODES_MAX = 100  # in one transaction
_TIMEOUT_S = 10.0
_EXPECTED = (PlatformError, DBAPIError)


class Recorder:
    """Holds what connected nodes have, and writes what changed, a batch at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._complete: dict[str, set[str]] = {}
        self._changed: dict[str, None] = {}  # nodes, the one that waits longest first
        self._cleanings = 0

    def note(self, node_id: str, complete: dict[str, bool], *, is_full: bool) -> None:
        """Take what a node says of some artifacts, or of all that it has."""
        had = self._complete.get(node_id)
        kept = set[str]() if is_full or had is None else had - complete.keys()
        has = {*kept, *(digest for digest, is_whole in complete.items() if is_whole)}
        if had is None or has != had:
            self._complete[node_id] = has
            self._changed[node_id] = None

    def forget(self, node_id: str) -> None:
        """Write nothing more of a node that left; its rows stay until the node is lost."""
        self._complete.pop(node_id, None)
        self._changed.pop(node_id, None)

    async def run(self) -> None:
        """Write until cancelled."""
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
        while batch := list(self._changed)[:_NODES_MAX]:
            complete = {node_id: sorted(self._complete[node_id]) for node_id in batch}
            for node_id in batch:
                del self._changed[node_id]
            try:
                await self._database.run(
                    lambda c, found=complete: repository.write_complete(c, found)
                )
            except BaseException:
                # Those that are there still; what they have may have changed meanwhile.
                self._changed |= dict.fromkeys(n for n in batch if n in self._complete)
                raise

    async def _clean(self) -> None:
        await self._database.run(repository.remove_gone)
        self._cleanings += 1
        if self._cleanings % _REPEAT == 0:
            self._changed |= dict.fromkeys(self._complete)
