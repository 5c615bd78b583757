"""Removes unreferenced artifacts, abandoned uploads, and their chunks from the store.

A chunk is removed in three steps. The chunk is marked as doomed in PostgreSQL, deleted in the
store, and deleted in PostgreSQL. No upload may use a doomed chunk, and an upload that needs it
again must wait. So a deletion never affects a newly stored chunk. After a crash, the next sweep
completes the removal.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from sqlalchemy import (
    ColumnElement,
    Delete,
    any_,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.artifacts.garbage import ArtifactUse, GarbageDecision, decide
from control_plane.artifacts.model import LIVE_STATES, UploadState
from control_plane.artifacts.tables import (
    artifact_chunks,
    artifact_upload_chunks,
    artifact_uploads,
    artifacts,
    chunks,
)
from control_plane.database import Database
from control_plane.tables import bases, models, releases
from sluice.chunk_store import CALL_TIMEOUT_S, ChunkStore, awake_s

log = structlog.get_logger(__name__)

_LOCK = 731054
_BATCH = 200
_SWEEP_DEADLINE_S = 20.0
# Time after which a dead sweeper's store calls have ended, and also all concurrent transactions.
_ABANDONED = timedelta(seconds=3 * CALL_TIMEOUT_S)
_DELETES_S = 2 * CALL_TIMEOUT_S
_SHOWN_FOR = timedelta(days=7)
_UPLOAD_MIN = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Graces:
    """The times for which unreferenced artifacts and chunks are kept.

    Attributes:
        unused: Grace time of unreferenced artifacts and chunks.
        settle: Time between retirement and removal.
        upload: Grace time of uploads that receive no further chunks.
    """

    unused: timedelta
    settle: timedelta
    upload: timedelta

    @classmethod
    def of(cls, unused_s: float) -> "Graces":
        """Return the times derived from the grace time of unreferenced artifacts."""
        unused = timedelta(seconds=unused_s)
        return cls(unused, min(unused, _ABANDONED), max(unused, _UPLOAD_MIN))


@dataclass(frozen=True, slots=True)
class Swept:
    """The result of a sweep.

    Attributes:
        decision: Decision about artifacts, or None if another control plane was sweeping.
        chunks: Number of chunks deleted from the store.
    """

    decision: GarbageDecision | None
    chunks: int


class Sweeper:
    """Sweeps all artifacts. Only one control plane sweeps at a time."""

    def __init__(self, database: Database, store: ChunkStore, graces: Graces) -> None:
        self._database = database
        self._store = store
        self._graces = graces

    async def sweep(self) -> Swept:
        """Remove unreferenced artifacts and chunks.

        Raises:
            PlatformError: The database or the store is down.
        """
        decision = await self._database.run(self._artifacts, deadline_s=_SWEEP_DEADLINE_S)
        if decision is not None and (decision.retired or decision.removed):
            log.info("artifacts_swept", retired=decision.retired, removed=decision.removed)
        count = 0
        while batch := await self._sweep_chunks():
            log.info("chunks_swept", count=batch)
            count += batch
            if batch < _BATCH:
                break
        return Swept(decision, count)

    async def _sweep_chunks(self) -> int:
        """Remove a batch of chunks, and return their number."""
        # Another sweeper may later claim the chunks that this sweep has doomed. Afterwards an
        # upload may store them again, and a late deletion would destroy them. So this sweep stops
        # deleting long before that time, even if the process is frozen in between.
        before_s = awake_s() + _DELETES_S
        doomed = await self._database.run(self._doom)
        await asyncio.gather(*(self._store.delete(sha256, before_s=before_s) for sha256 in doomed))
        pair = tuple_(chunks.c.sha256, chunks.c.doomed_at)
        own = delete(chunks).where(
            pair.in_(list(doomed.items()))
        )  # without the chunks that another sweeper has doomed again since
        await self._database.run(lambda found: found.execute(own))
        return len(doomed)

    async def _artifacts(self, connection: AsyncConnection) -> GarbageDecision | None:
        if not await connection.scalar(select(func.pg_try_advisory_xact_lock(_LOCK))):
            return None
        await connection.execute(_old_uploads(self._graces.upload))
        now = await connection.scalar(select(func.now()))
        assert isinstance(now, datetime), "PostgreSQL has a clock"
        t = artifacts.c
        query = select(t.digest, needed(), t.unreferenced_since, t.retired_at)
        uses = [ArtifactUse(*row) for row in await connection.execute(query)]
        decision = decide(uses, now, self._graces.unused, self._graces.settle)
        for digests, values in (
            (decision.noticed, {"unreferenced_since": now}),
            (decision.needed, {"unreferenced_since": None, "retired_at": None}),
            (decision.retired, {"retired_at": now}),
        ):
            if digests:
                await connection.execute(
                    update(artifacts).where(t.digest.in_(digests)).values(values)
                )
        if decision.removed:
            gone = delete(artifacts).where(
                t.digest.in_(decision.removed), t.retired_at.is_not(None)
            )
            await connection.execute(gone)
        return decision

    async def _doom(self, connection: AsyncConnection) -> Mapping[str, datetime]:
        """Mark unreferenced chunks as doomed now, and return them."""
        t = chunks.c
        present = artifact_upload_chunks.c
        is_unused = ~exists().where(artifact_chunks.c.sha256 == t.sha256) & ~exists().where(
            present.sha256 == t.sha256, present.is_present
        )
        is_old = t.used_at < func.now() - self._graces.unused
        is_abandoned = t.doomed_at < func.now() - _ABANDONED
        found = (
            select(t.sha256)
            .where(or_(t.doomed_at.is_(None) & is_old & is_unused, is_abandoned))
            .limit(_BATCH)
            .with_for_update(skip_locked=True)
        )
        # The references are checked again under the lock, because every new reference first updates
        # its chunk.
        query = (
            update(chunks)
            .where(t.sha256.in_(found), or_(is_old, is_abandoned))
            .values(doomed_at=func.now())
            .returning(t.sha256, t.doomed_at)
        )
        return dict((await connection.execute(query)).all())


def needed() -> ColumnElement[bool]:
    """Return the SQL condition that an artifact is needed."""
    digest = artifacts.c.digest
    adapters = artifacts.alias("adapters")
    live = artifact_uploads.c
    return or_(
        artifacts.c.is_pinned,
        named(digest),
        exists().where(
            live.state.in_(LIVE_STATES), or_(live.digest == digest, live.base_digest == digest)
        ),
        exists().where(
            adapters.c.kind == literal("adapter"),
            adapters.c.retired_at.is_(None),
            digest == any_(adapters.c.base_digests),
        ),
    )


def named(digest: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the SQL condition that a model, release or base refers to a digest."""
    return or_(
        exists().where(or_(models.c.adapter_digest == digest, models.c.base_digest == digest)),
        exists().where(or_(releases.c.adapter_digest == digest, releases.c.base_digest == digest)),
        exists().where(bases.c.digest == digest),
    )


def _old_uploads(grace: timedelta) -> Delete:
    """Return the statement that deletes abandoned uploads, and ended uploads after a week."""
    t = artifact_uploads.c
    left = (t.state == UploadState.UPLOADING) & (t.touched_at < func.now() - grace)
    ended = t.state.not_in(LIVE_STATES) & (t.touched_at < func.now() - _SHOWN_FOR)
    return delete(artifact_uploads).where(or_(left, ended))
