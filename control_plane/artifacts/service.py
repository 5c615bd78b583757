"""The parts of the artifact service, which are the store and the loops of uploads and sweeps."""

import asyncio

from control_plane.artifacts.importing import Importer
from control_plane.artifacts.model import Bounds
from control_plane.artifacts.pieces import Pieces
from control_plane.artifacts.sources import Allowed
from control_plane.artifacts.sweep import Graces, Sweeper
from control_plane.artifacts.sweeping import SweepLoop
from control_plane.artifacts.worker import InspectionWorker
from control_plane.database import Database
from control_plane.work_poll import MayHaveWork, unknown
from sluice.chunk_store import ChunkStore, open_backend
from sluice.errors import ErrorCode, PlatformError

_SWEEP_S = 60.0


class Artifacts:
    """Owns the artifact store. Without a store, operations on artifacts are refused."""

    def __init__(
        self,
        database: Database,
        store_url: str,
        bounds: Bounds,
        allowed: Allowed,
        grace_s: float,
        may_have_work: MayHaveWork = unknown,
    ) -> None:
        """Open the store, if a store is configured.

        Args:
            database: Database that records all references to chunks in the store.
            store_url: URL of the store, in the form that `open_backend` reads, or empty for no
                store.
            bounds: Limits of accepted artifacts.
            allowed: Sources from which imports are permitted.
            grace_s: Seconds for which unreferenced artifacts and chunks are kept.
            may_have_work: Tells whether an upload may wait for its inspection.
        """
        self.bounds = bounds
        self.allowed = allowed
        self._store: ChunkStore | None = None
        self._pieces: Pieces | None = None
        self._worker: InspectionWorker | None = None
        self._sweeps: SweepLoop | None = None
        self.graces = Graces.of(grace_s)
        if store_url:
            self._store = ChunkStore(open_backend(store_url))
            self._pieces = Pieces(database, self._store)
            importer = Importer(database, self._pieces, allowed, bounds)
            self._worker = InspectionWorker(database, importer, store_url, bounds, may_have_work)
            sweeper = Sweeper(database, self._store, self.graces)
            self._sweeps = SweepLoop(sweeper.sweep, min(_SWEEP_S, grace_s))

    async def run(self) -> None:
        """Process uploads, and sweep unreferenced artifacts and chunks, until cancelled."""
        if self._worker is None or self._sweeps is None:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.run())
            tasks.create_task(self._sweeps.run())

    def wake(self) -> None:
        """Signal the worker that an upload may be complete."""
        if self._worker is not None:
            self._worker.wake()

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    def require_store(self) -> None:
        """Raise PlatformError if there is no store."""
        if self._store is None:
            raise _no_store()

    @property
    def store(self) -> ChunkStore:
        """The store. Raises PlatformError if there is none."""
        if self._store is None:
            raise _no_store()
        return self._store

    async def read_chunk(self, sha256: str) -> bytes:
        """Return a chunk from the store. Raises PlatformError if there is no store."""
        return await self.store.get(sha256)

    @property
    def sweeps(self) -> SweepLoop:
        """The loop that removes unreferenced artifacts.

        Raises:
            PlatformError: There is no store.
        """
        if self._sweeps is None:
            raise _no_store()
        return self._sweeps

    @property
    def pieces(self) -> Pieces:
        """The writer of chunks. Raises PlatformError if there is no store."""
        if self._pieces is None:
            raise _no_store()
        return self._pieces


def _no_store() -> PlatformError:
    message = "there is no store of artifacts: set CONTROL_PLANE__ARTIFACT_STORE_URL"
    return PlatformError(ErrorCode.UNAVAILABLE, message)
