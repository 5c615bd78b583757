"""Inspects complete uploads, and accepts or refuses them.

Every control plane runs the worker. A worker claims an upload for eight seconds, and renews the
claim during the work. After a crash another worker continues, and a worker that lost its claim can
change nothing. Each claim counts as an attempt, so that every upload ends.
"""

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, TypeVar

import structlog
from sqlalchemy import exists
from sqlalchemy.exc import DBAPIError

from control_plane.artifacts import catalogue, uploads
from control_plane.artifacts.importing import Importer
from control_plane.artifacts.inspection import inspect_apart
from control_plane.artifacts.inspector import InspectionJob
from control_plane.artifacts.model import ATTEMPTS_MAX, Bounds, Kind, UploadState
from control_plane.artifacts.ranks import rank_max_of_base
from control_plane.artifacts.signatures import signature_problems
from control_plane.artifacts.signing_keys import keys_for
from control_plane.database import Database, DatabaseDownError
from control_plane.work_poll import MayHaveWork, unknown
from sluice.errors import PlatformError
from sluice.manifests import Manifest, parse_manifest

log = structlog.get_logger(__name__)

_WORKERS = 2  # number of uploads that are processed concurrently
_TICK_S = 2.0
_LEASE = timedelta(seconds=8)
_RENEW_S = 2.0
_ACCEPT_DEADLINE_S = 30.0  # Deadline in seconds. An artifact may have a hundred thousand chunks.
_INSPECTION_S = 60.0
_INSPECTED_BYTES_PER_S = 20 << 20
_GIVEN_UP = (
    f"it could not be checked in {ATTEMPTS_MAX} attempts, as the store of artifacts did not give"
    " it back: send it again, operators see the cause in the control plane's log"
)

_STATES = (UploadState.IMPORTING, UploadState.VALIDATING)
HAS_WORK = exists().where(uploads.waits_for_work(_STATES))

Result = TypeVar("Result")


class InspectionWorker:
    """The loop that processes uploads to their end."""

    def __init__(
        self,
        database: Database,
        importer: Importer,
        store_url: str,
        bounds: Bounds,
        may_have_work: MayHaveWork = unknown,
    ) -> None:
        self._database = database
        self._may_have_work = may_have_work
        self._importer = importer
        self._store_url = store_url
        self._bounds = bounds
        self._wake = asyncio.Event()
        # only one task at a time searches for work
        self._looking = asyncio.Lock()

    def wake(self) -> None:
        """Search for work now."""
        self._wake.set()

    async def run(self) -> None:
        """Process uploads until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_WORKERS):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            try:
                async with self._looking:
                    upload = await self._next()
                await self._end(upload)
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("upload_postponed", error=str(getattr(error, "reason", error)))
                await self._pause()

    async def _next(self) -> dict[str, Any]:
        """Return the next upload to process, as soon as there is one."""
        while True:
            self._wake.clear()
            if (upload := await self._claim()) is not None:
                return upload
            await self._pause()

    async def _pause(self) -> None:
        """Wait at least for the next tick, unless woken, and until there may be work."""
        while True:
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
                    return
            except TimeoutError:
                if self._may_have_work():
                    return

    async def _claim(self) -> dict[str, Any] | None:
        return await self._database.run_singly(lambda found: uploads.claim(found, _STATES, _LEASE))

    async def _end(self, upload: dict[str, Any]) -> None:
        """Accept or refuse an upload. An upload that cannot be inspected now is delayed."""
        if upload["attempts"] > ATTEMPTS_MAX:
            log.warning("upload_abandoned", upload=upload["id"], attempts=ATTEMPTS_MAX)
            await self._refuse(upload, [_GIVEN_UP])
        elif upload["state"] == UploadState.IMPORTING:
            reasons = await self._while_claimed(upload, self._fetch(upload))
            if reasons is None:
                await self._postpone(upload)
            elif reasons:
                await self._refuse(upload, reasons)
        else:
            await self._look_at(upload)

    async def _refuse(self, upload: dict[str, Any], reasons: list[str]) -> None:
        await self._database.run(lambda found: uploads.refuse(found, upload, reasons))

    async def _postpone(self, upload: dict[str, Any]) -> None:
        await self._database.run(lambda found: uploads.postpone(found, upload))

    async def _look_at(self, upload: dict[str, Any]) -> None:
        manifest = await asyncio.to_thread(parse_manifest, upload["manifest"])
        base = await self._base(upload)
        reasons: list[str] | None = await self._signatures(upload)
        reasons += await self._database.run(lambda found: uploads.wrong_sizes(found, upload["id"]))
        if upload["kind"] == Kind.ADAPTER and base is None:
            reasons.append(f"base {upload['base_digest']} is not there any more: upload it first")
        if not reasons:
            rank_max = await self._database.run(
                lambda found: rank_max_of_base(found, upload["base_digest"], self._bounds.rank_max)
            )
            inspection = self._inspect(upload, manifest, base, rank_max)
            reasons = await self._while_claimed(upload, inspection)
        if reasons is None:
            await self._postpone(upload)
            return
        is_ours = await self._database.run(
            lambda found: (
                uploads.refuse(found, upload, reasons)
                if reasons
                else uploads.accept(found, upload, manifest)
            ),
            deadline_s=_ACCEPT_DEADLINE_S,
        )
        log.info(
            "upload_ended",
            upload=upload["id"],
            digest=upload["digest"],
            refused=len(reasons),
            is_ours=is_ours,
        )

    async def _fetch(self, upload: dict[str, Any]) -> list[str] | None:
        """Fetch an import, so that it is ready for inspection.

        Returns:
            Reasons of a failure, or None if the store or the database is down.
        """
        try:
            return await self._importer.fetch(upload)
        except (PlatformError, DBAPIError) as error:
            log.warning("import_postponed", upload=upload["id"], error=str(error))
            return None

    async def _while_claimed(
        self, upload: dict[str, Any], work: Coroutine[Any, Any, Result]
    ) -> Result | None:
        """Return the result of work on an upload, or None if its claim was lost meanwhile."""
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(work)
            renewal = tasks.create_task(self._renew(upload))
            await asyncio.wait({working, renewal}, return_when=asyncio.FIRST_COMPLETED)
            working.cancel()
            renewal.cancel()
        return None if working.cancelled() else working.result()

    async def _signatures(self, upload: dict[str, Any]) -> list[str]:
        """Return the mistakes in an upload's signatures, one sentence each."""
        keys = await self._database.run(lambda found: keys_for(found, upload["tenant_id"]))
        is_required = self._bounds.are_signed
        return signature_problems(
            upload["digest"], upload["signatures"], keys, is_required=is_required
        )

    async def _base(self, upload: dict[str, Any]) -> dict[str, Any] | None:
        """Return the manifest of an adapter's base, or None for a base."""
        if upload["kind"] != Kind.ADAPTER:
            return None
        tenant_id, digest = upload["tenant_id"], upload["base_digest"]
        found = await self._database.run(lambda conn: catalogue.find(conn, tenant_id, digest))
        return None if found is None else found["manifest"]

    async def _inspect(
        self,
        upload: dict[str, Any],
        manifest: Manifest,
        base: dict[str, Any] | None,
        rank_max: int,
    ) -> list[str] | None:
        """Return the reasons to refuse an upload, or None if the result is unknown at present."""
        limit_s = _INSPECTION_S + manifest.size_bytes / _INSPECTED_BYTES_PER_S
        job = InspectionJob(
            store_url=self._store_url,
            kind=upload["kind"],
            manifest=upload["manifest"],
            base_manifest=base,
            rank_max=rank_max,
            adapter_bytes_max=self._bounds.adapter_bytes_max,
            cpu_s=int(limit_s),
        )
        return await inspect_apart(job, limit_s)

    async def _renew(self, upload: dict[str, Any]) -> None:
        """Renew a claim until it is lost to another worker or the upload has ended."""
        while True:
            await asyncio.sleep(_RENEW_S)
            try:
                if not await self._database.run(
                    lambda conn: uploads.keep_claim(conn, upload, _LEASE)
                ):
                    return
            except (DatabaseDownError, DBAPIError) as error:
                log.warning("claim_not_renewed", upload=upload["id"], error=str(error))
