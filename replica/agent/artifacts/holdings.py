"""Manages a node's whole artifacts, its partial artifacts, and the manifests of both.

Manifests stay on the disk under `.manifests/`, even after the eviction of their artifacts. A node
needs the manifest to fetch an artifact from the store while no control plane answers.
"""

import asyncio
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import structlog

from replica.agent.artifacts.library import PARTIAL, Library
from replica.agent.artifacts.partial import (
    STAGING,
    Partial,
    Piece,
    bitmap,
    pieces_of,
    read_piece,
    write_synced,
)
from sluice.manifests import Manifest, ManifestError, manifest_of_directory, parse_manifest
from sluice.wire.distribution.v1 import distribution_pb2 as wire

log = structlog.get_logger(__name__)

_MANIFESTS = ".manifests"


class Holdings:
    """The artifacts of a node. One event loop uses this object, and threads do the slow work."""

    def __init__(self, directory: Path, library: Library) -> None:
        self.library = library
        self.partials: dict[str, Partial] = {}
        self._directory = directory
        self._pieces: dict[str, tuple[Piece, ...]] = {}  # digest of a whole artifact -> its chunks
        self._reported: dict[str, tuple[int, bool]] = {}
        # digests of damaged artifacts, whose content does not have the digest
        self._spoiled: set[str] = set()

    async def start(self) -> None:
        """Read the folder. Raises OSError if the folder cannot be used."""
        await self.library.scan()
        found = await asyncio.to_thread(self._find_partials)
        self.partials = {partial.digest: partial for partial in found}
        for partial in found:
            self.library.expect(partial.digest, partial.manifest.size_bytes)
        for digest in self.library.complete():
            manifest = await asyncio.to_thread(self._load, digest)
            if manifest is not None:
                self._pieces[digest] = pieces_of(manifest)

    def close(self) -> None:
        """Close the files of partial artifacts. The next agent continues these artifacts."""
        for partial in self.partials.values():
            partial.close()

    async def manifest(self, digest: str) -> Manifest | None:
        """Return a manifest that is on this node, or None if there is none."""
        partial = self.partials.get(digest)
        return partial.manifest if partial else await asyncio.to_thread(self._load, digest)

    async def keep(self, manifest: Manifest) -> None:
        """Store a manifest. Raises OSError if the disk is full."""
        path = self._manifest_path(manifest.digest)
        await asyncio.to_thread(write_synced, path, manifest.canonical_json())

    async def begin(self, manifest: Manifest) -> Partial:
        """Create the files of a partial artifact. Raises OSError if they cannot be written."""
        root = self._directory / PARTIAL / manifest.digest
        partial = await asyncio.to_thread(Partial, root, manifest)
        return self.partials.setdefault(partial.digest, partial)

    async def complete(self, partial: Partial) -> None:
        """Turn a partial artifact with all chunks into a whole artifact.

        Raises:
            CorruptChunkError: The disk has damaged the artifact, which must be fetched again.
            OSError: The artifact cannot be read or renamed.
        """
        try:
            files = await asyncio.to_thread(partial.seal)
            self.library.admit(partial.digest, files)
            self._pieces[partial.digest] = partial.pieces
        finally:
            if self.library.has(partial.digest) or not partial.root.exists():
                self.partials.pop(partial.digest, None)
        await asyncio.to_thread(partial.remove)

    async def drop(self, digest: str) -> None:
        """Remove a partial artifact, if there is one, and release the room reserved for it."""
        partial = self.partials.pop(digest, None)
        if partial is not None:
            await asyncio.to_thread(partial.remove)
            log.info("artifact_download_dropped", digest=digest)
        self.library.give_up(digest)

    async def adopt(self, digest: str) -> None:
        """Compute the manifest of a whole artifact that an operator has copied into the folder."""
        if digest in self._pieces or digest in self._spoiled or not self.library.has(digest):
            return
        manifest = await asyncio.to_thread(self._load, digest)
        if manifest is None:
            try:
                manifest = await asyncio.to_thread(manifest_of_directory, self._directory / digest)
            except (OSError, ManifestError) as error:
                log.warning("artifact_unreadable", digest=digest, error=str(error))
                self._spoiled.add(digest)
                return
            if manifest.digest != digest:
                log.error("artifact_digest_mismatched", digest=digest, found=manifest.digest)
                self._spoiled.add(digest)
                return
            await self.keep(manifest)
        self._pieces[digest] = pieces_of(manifest)

    def progress(self, digest: str) -> tuple[int, int]:
        """Return two numbers of a partial artifact: its chunks on the disk, and all its chunks."""
        partial = self.partials.get(digest)
        return (partial.held.bit_count(), len(partial.pieces)) if partial else (0, 0)

    def read(self, digest: str, number: int) -> bytes | None:
        """Return a verified chunk, or None if this node does not have it. Blocks."""
        partial, pieces = self.partials.get(digest), self._pieces.get(digest, ())
        try:
            if partial is not None and partial.held >> number & 1:
                return partial.read(number)
            if number < len(pieces):
                return read_piece(self._directory / digest, pieces[number])
        except OSError:
            # The directory was renamed or removed between the check and the read.
            return self._read_renamed(digest, number, partial)
        return None

    def held(self, *, is_full: bool) -> list[wire.Held]:
        """Return all chunks on the disk, or without `is_full` only changes since the last call."""
        now = self._now()
        if is_full:
            self._reported = {}
        changed = {d: has for d, has in now.items() if self._reported.get(d) != has}
        changed |= dict.fromkeys(self._reported.keys() - now.keys(), (0, False))
        self._reported = dict(now)
        return [
            wire.Held(digest=digest, chunks=bitmap(chunks), is_complete=is_complete)
            for digest, (chunks, is_complete) in changed.items()
        ]

    def _now(self) -> Mapping[str, tuple[int, bool]]:
        now = {digest: (partial.held, False) for digest, partial in self.partials.items()}
        whole = self.library.complete()
        for digest in self._pieces.keys() - whole.keys():
            del self._pieces[digest]
        for digest, pieces in self._pieces.items():
            # An empty artifact has no chunks. It is reported as an artifact with one chunk, so that
            # the control plane can plan its fetch.
            now[digest] = ((1 << max(1, len(pieces))) - 1, True)
        return now

    def _read_renamed(self, digest: str, number: int, partial: Partial | None) -> bytes | None:
        if partial is None:
            return None
        try:
            return read_piece(self._directory / digest, partial.pieces[number])
        except OSError:
            return None

    def _manifest_path(self, digest: str) -> Path:
        return self._directory / _MANIFESTS / f"{digest}.json"

    def _load(self, digest: str) -> Manifest | None:
        try:
            manifest = parse_manifest(json.loads(self._manifest_path(digest).read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("manifest_unreadable", digest=digest, error=str(error))
            return None
        return manifest if manifest.digest == digest else None

    def _find_partials(self) -> list[Partial]:
        for left in (self._directory / _MANIFESTS).glob(f"{STAGING}*"):
            left.unlink(missing_ok=True)
        found: list[Partial] = []
        root = self._directory / PARTIAL
        for path in sorted(root.iterdir()) if root.is_dir() else ():
            manifest = self._load(path.name)
            # a partial artifact without its manifest cannot be continued
            if manifest is None:
                shutil.rmtree(path, ignore_errors=True)
                continue
            try:
                partial = Partial(path, manifest)
            except OSError as error:  # the other partial artifacts are not affected
                log.warning("artifact_download_not_resumed", digest=path.name, error=str(error))
                continue
            # an earlier agent was killed just after it renamed the files
            if (self._directory / path.name).is_dir():
                partial.remove()
            else:
                found.append(partial)
        return found
