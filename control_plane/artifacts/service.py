"""What artifacts need to run: the store, and the loop that ends uploads."""

from control_plane.artifacts.model import Bounds
from control_plane.artifacts.pieces import Pieces
from control_plane.artifacts.store import ChunkStore, open_backend
from control_plane.artifacts.worker import Worker
from control_plane.database import Database
from sluice.errors import ErrorCode, PlatformError


class Artifacts:
    """Owns the store; without one, all that needs it is refused."""

    def __init__(self, database: Database, store_url: str, bounds: Bounds) -> None:
        """Open the store.

        Args:
            database: For everything that points at the store.
            store_url: As `open_backend` takes it; empty: there is none.
            bounds: What is accepted.
        """
        self.bounds = bounds
        self._store = ChunkStore(open_backend(store_url)) if store_url else None
        self._worker = Worker(database, store_url, bounds)
        self._pieces = None if self._store is None else Pieces(database, self._store)

    async def run(self) -> None:
        """End uploads until cancelled."""
        if self._store is not None:
            await self._worker.run()

    def wake(self) -> None:
        """Tell that an upload may be complete."""
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
