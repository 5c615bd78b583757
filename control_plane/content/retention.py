"""Deletes stored content that has expired by the platform's or a tenant's bound, or was erased."""

from collections.abc import Awaitable, Callable
from functools import partial

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.content import repository
from control_plane.content.model import KeySealer
from control_plane.database import Database, DatabaseDownError
from control_plane.responses.repository import drop_partitions
from sluice.lifecycle import run_every

log = structlog.get_logger(__name__)

_EVERY_S, _STEP_S = 300.0, 240.0
_Deletion = Callable[[AsyncConnection], Awaitable[int]]


class ContentRetention:
    """The loop of deletions in one control plane. `run` must be started in a TaskGroup.

    Several control planes may delete concurrently, since each row is deleted only once.
    """

    def __init__(
        self,
        database: Database,
        sealer: KeySealer,
        *,
        kept_days: int,
        every_s: float = _EVERY_S,
    ) -> None:
        """Create the loop.

        Args:
            database: Database of the content.
            sealer: Encrypts keys of content with the installation's secret.
            kept_days: Days after which content is deleted, even if its tenant's bound is longer.
            every_s: Seconds between two rounds.
        """
        self._database, self._sealer = database, sealer
        self._kept_days, self._every_s = kept_days, every_s

    async def run(self) -> None:
        """Run the loop until cancelled."""
        await run_every(
            self._every_s,
            self.step,
            name="content_retention",
            expected=(DatabaseDownError, DBAPIError),
            step_timeout_s=_STEP_S,
        )

    async def step(self) -> None:
        """Delete all content that has expired now."""
        run, days = self._database.run, self._kept_days
        await run(partial(repository.renew_keys, sealer=self._sealer))
        await run(partial(drop_partitions, kept_days=days))
        for bound in await run(repository.bounds):
            gone = await self._all(partial(repository.delete_responses, bound=bound))
            gone += await self._all(partial(repository.delete_records, bound=bound))
            gone += await self._all(partial(repository.delete_batches, bound=bound))
            if gone:
                log.info("content_deleted", tenant_id=bound.tenant_id, objects=gone)
        await self._all(partial(repository.delete_old_records, kept_days=days))
        await self._all(repository.delete_ownerless_responses)
        await self._all(repository.delete_ownerless_records)

    async def _all(self, deletion: _Deletion) -> int:
        """Repeat a deletion until no row is left, and return the number of deleted rows."""
        total = 0
        while True:
            count = await self._database.run(deletion)
            total += count
            if count < repository.AT_ONCE:
                return total
