"""What artifacts need to run: the store, and the loop that ends uploads."""

import asyncio

from sqlalchemy.exc import DBAPIError

from control_plane.artifacts.importing import Importer
from control_plane.artifacts.model import Bounds
from control_plane.artifacts.pieces import Pieces
from control_plane.artifacts.sources import Allowed
from control_plane.artifacts.sweep import Graces, Sweeper
from control_plane.artifacts.worker import Worker
from control_plane.database import Database
from sluice.chunk_store import ChunkStore, open_backend
from sluice.errors import ErrorCode, PlatformError
from sluice.lifecycle import run_every

_SWEEP_S = 60.0
_SWEEP_TIMEOUT_S = 600.0


class Artifacts:
    """Owns the store; without one, all that needs it is refused."""

    def __init__(
        self,
        database: Database,
        store_url: str,
        bounds: Bounds,
        allowed: Allowed,
        grace_s: float,
    ) -> None:
        """Open the store.

        Args:
            database: For everything that points at the store.
            store_url: As `open_backend` takes it; empty: there is none.
            bounds: What is accepted.
            allowed: From where imports may come.
            grace_s: For which what nobody needs is kept.
        """
        self.bounds = bounds
        self.allowed = allowed
        self._store: ChunkStore | None = None
        self._pieces: Pieces | None = None
        self._worker: Worker | None = None
        self._sweeper: Sweeper | None = None
        self._sweep_s = min(_SWEEP_S, grace_s)
        if store_url:
            self._store = ChunkStore(open_backend(store_url))
            self._pieces = Pieces(database, self._store)
            importer = Importer(database, self._pieces, allowed, bounds)
            self._worker = Worker(database, importer, store_url, bounds)
            self._sweeper = Sweeper(database, self._store, Graces.of(grace_s))

    async def run(self) -> None:
        """End uploads, and remove what nobody needs, until cancelled."""
        if self._worker is None or self._sweeper is None:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._worker.run())
            tasks.create_task(
                run_every(
                    self._sweep_s,
                    self._sweeper.sweep,
                    name="artifact-sweep",
                    expected=(PlatformError, DBAPIError),
                    step_timeout_s=_SWEEP_TIMEOUT_S,
                )
            )

    def wake(self) -> None:
        """Tell that an upload may be complete."""
        if self._worker is not None:
            self._worker.wake()

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    def require_store(self) -> None:
        """Raise PlatformError when there is no store."""
        if self._store is None:
            raise _no_store()

    @property
    def store(self) -> ChunkStore:
        """The store; PlatformError when there is none."""
        if self._store is None:
            raise _no_store()
        return self._store

    @property
    def pieces(self) -> Pieces:
        """The way into the store; PlatformError when there is none."""
        if self._pieces is None:
            raise _no_store()
        return self._pieces


def _no_store() -> PlatformError:
    message = "there is no store of artifacts: set CONTROL_PLANE__ARTIFACT_STORE_URL"
    return PlatformError(ErrorCode.UNAVAILABLE, message)
