"""Imports the files of a source, which are copied into the store as chunks and recorded.

An import is an upload whose chunks are fetched by the control plane. An import that was killed
begins again, but chunks that are already in the store are not stored twice.
"""

import asyncio
import hashlib
from typing import Any

from control_plane.artifacts import uploads
from control_plane.artifacts.fetching import FetchError, Files, open_source
from control_plane.artifacts.model import Bounds, Kind, quota_problem
from control_plane.artifacts.pieces import Pieces
from control_plane.artifacts.sources import Allowed, ImportSourceError, parse_source
from control_plane.database import Database
from sluice.manifests import (
    CHUNK_BYTES,
    CHUNKS_MAX,
    FORMAT,
    Manifest,
    ManifestError,
    parse_manifest,
)

IMPORT_S = 3600.0
_SET_DEADLINE_S = 30.0


class Importer:
    """Fetches the chunks of imports."""

    def __init__(
        self, database: Database, pieces: Pieces, allowed: Allowed, bounds: Bounds
    ) -> None:
        self._database = database
        self._pieces = pieces
        self._allowed = allowed
        self._bounds = bounds

    async def fetch(self, upload: dict[str, Any]) -> list[str]:
        """Copy a claimed import into the store, so that it is ready for inspection.

        Returns:
            Reasons of a failure, one sentence each, or none if the import was fetched.
        """
        try:
            async with (
                asyncio.timeout(IMPORT_S),
                open_source(
                    parse_source(upload["source"], self._allowed), Kind(upload["kind"])
                ) as files,
            ):
                manifest = await self._collect(upload, files)
        except (ImportSourceError, FetchError, ManifestError) as error:
            return [f"{upload['source']}: {error}"]
        except TimeoutError:
            return [f"{upload['source']} did not arrive within {IMPORT_S:g} s: upload it instead"]
        is_ours = await self._database.run(
            lambda connection: uploads.fetched(connection, upload, manifest),
            deadline_s=_SET_DEADLINE_S,
        )
        return [] if is_ours else ["another control plane imports it"]

    async def _collect(self, upload: dict[str, Any], files: Files) -> Manifest:
        room = await self._room(upload)
        listed: list[dict[str, Any]] = []
        total = 0
        for name in await files.names():
            whole, size = hashlib.sha256(), 0
            chunks: list[str] = []
            async for piece in files.read(name):
                size, total = size + len(piece), total + len(piece)
                if total > room:
                    raise FetchError(f"it has more than the {room} bytes that are allowed")
                sha256 = hashlib.sha256(piece).hexdigest()
                whole.update(piece)
                await self._pieces.keep(sha256, piece)
                chunks.append(sha256)
            listed.append(
                {"name": name, "size_bytes": size, "sha256": whole.hexdigest(), "chunks": chunks}
            )
        document = {"format": FORMAT, "chunk_bytes": CHUNK_BYTES, "files": listed}
        return await asyncio.to_thread(parse_manifest, document)

    async def _room(self, upload: dict[str, Any]) -> int:
        """Return the largest number of bytes that an import may have."""
        room = CHUNKS_MAX * CHUNK_BYTES
        if upload["kind"] == Kind.ADAPTER:
            room = self._bounds.adapter_bytes_max
        quota = self._bounds.tenant_bytes_max
        if upload["tenant_id"] is None or not quota:
            return room
        held, _ = await self._database.run(
            lambda connection: uploads.held_bytes(connection, upload["tenant_id"])
        )
        if problem := quota_problem(held, 1, quota):
            raise FetchError(problem)
        return min(room, quota - held)
