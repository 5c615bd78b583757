"""Manages a node's folder of whole artifacts, and evicts artifacts when new ones need room.

For adapters, the folder is the third of four tiers: device slots, host memory, this folder, store.
An artifact is always present as a whole, because a rename adds or removes all its files at once.
`replica.agent.artifacts.eviction` chooses the artifacts to evict.
"""

import asyncio
import json
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from replica.agent.artifacts.eviction import EvictionCandidate, Heat, Hold, to_evict
from replica.agent.artifacts.fingerprints import Fingerprints, fingerprint_of
from sluice.ids import new_id
from sluice.manifests import ManifestError, manifest_of_directory

log = structlog.get_logger(__name__)

PARTIAL = ".partial"  # directory of downloads, with one directory per digest
_LEAVING = ".leaving"
# Prefix before the digest of a damaged artifact, whose last copy is stored for operators
_SPOILED = ".spoiled-"
_FINGERPRINTS = ".fingerprints"
_HEAT_FILE = ".heat.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ADAPTER_FILE = "adapter_config.json"
_PREFETCH = 2  # lowest of the priorities that the control plane sends, for expected use


@dataclass(frozen=True, slots=True)
class _Entry:
    size_bytes: int
    is_adapter: bool
    arrived_s: float


class Library:
    """The artifact folder of a node.

    All methods must be called in one event loop, and slow work runs in threads.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        reserve_bytes: int,
        clock: Callable[[], float] = time.time,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Create a library. `scan` must read the folder before any other call.

        Args:
            directory: Folder of artifacts, created if missing.
            max_bytes: Largest number of bytes of all artifacts together, or 0 if only the disk
                limits them.
            reserve_bytes: Bytes of the disk that must stay free for other uses.
            clock: Clock in Unix seconds.
            free_bytes: Function that returns the free bytes of the disk, or None for the operating
                system's figure.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._reserve_bytes = reserve_bytes
        self._clock = clock
        self._free_bytes = free_bytes or (lambda: shutil.disk_usage(directory).free)
        self._entries: dict[str, _Entry] = {}
        self._heat: dict[str, Heat] = {}
        self._is_heat_saved = True
        self._desired: frozenset[str] = frozenset()
        self._wanted: Mapping[str, int] = {}
        self._in_use: dict[str, frozenset[str]] = {}
        self._coming: dict[str, int] = {}  # digest -> bytes that are reserved for this artifact
        self._room = asyncio.Lock()
        self._fingerprints = Fingerprints(directory / _FINGERPRINTS)
        self._readings: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.evictions = 0
        self.spoiled = 0

    async def scan(self) -> None:
        """Read the folder, at the start and at intervals, because operators may add artifacts."""
        known = frozenset(self._entries)
        found, heat = await asyncio.to_thread(self._look, known)
        for digest in known - found.keys():
            if not (self._directory / digest).is_dir():
                self._entries.pop(digest, None)
        self._entries |= {digest: entry for digest, entry in found.items() if entry is not None}
        for digest, entry in self._entries.items():
            if digest not in self._heat:
                self._heat[digest] = heat.get(digest) or Heat(1.0, entry.arrived_s)
        for digest in self._heat.keys() - self._entries.keys():
            del self._heat[digest]

    def complete(self) -> Mapping[str, int]:
        """Return the size in bytes of each whole artifact, by digest."""
        return {digest: entry.size_bytes for digest, entry in self._entries.items()}

    def looks_sound(self, digest: str) -> bool:
        """Return whether an artifact is present, and unchanged since its verification."""
        return self.has(digest) and self._fingerprints.matches(digest, self._directory / digest)

    async def problem_of(self, digest: str) -> str:
        """Return why a present artifact is unusable. Empty if it is usable or absent.

        An artifact that was changed or doubted since its last verification is read completely. If
        its content does not match its digest, the artifact is moved away, so that it is fetched
        again.
        """
        if not self.has(digest) or self.looks_sound(digest):
            return ""
        async with self._readings[digest]:  # a second caller waits for the result of the first
            if not self.has(digest) or self.looks_sound(digest):
                return ""
            return await self._verify(digest)

    def doubt(self, digest: str, *, with_adapters: bool) -> None:
        """Verify an artifact before its next use, and if `with_adapters` also every adapter."""
        adapters = [name for name, entry in self._entries.items() if entry.is_adapter]
        for name in (digest, *(adapters if with_adapters else ())):
            self._fingerprints.forget(name)

    def has(self, digest: str) -> bool:
        """Return whether an artifact is in the folder now, which may be after the last scan."""
        return bool(_DIGEST.fullmatch(digest)) and (self._directory / digest).is_dir()

    @property
    def used_bytes(self) -> int:
        """Bytes of all whole artifacts."""
        return sum(entry.size_bytes for entry in self._entries.values())

    def want(self, wanted: Mapping[str, int]) -> None:
        """Set the wanted artifacts: digest -> 0 (a request waits), 1 (warming) or 2 (prefetch)."""
        self._wanted = wanted

    def desire(self, bases: Collection[str]) -> None:
        """Set the bases of the desired replicas, which are not evicted."""
        self._desired = frozenset(bases)

    def use(self, engine: str, digests: Collection[str]) -> None:
        """Set the artifacts that an engine reads, or may read again. They are not evicted."""
        if digests:
            self._in_use[engine] = frozenset(digests)
        else:
            self._in_use.pop(engine, None)

    def used(self, digest: str, count: int = 1) -> None:
        """Count requests for an artifact if it is on this node."""
        known = self._heat.get(digest)
        if known is not None:
            self._heat[digest] = known.used(count, self._clock())
            self._is_heat_saved = False

    async def make_room(self, size_bytes: int, *, needed: bool, digest: str = "") -> bool:
        """Free room for an artifact. If that is impossible, evict nothing and return False.

        Args:
            size_bytes: Size of the whole artifact.
            needed: Whether a request waits for the artifact. If so, prefetched artifacts may be
                evicted.
            digest: Artifact for which the room is reserved until `admit` or `give_up`, or empty to
                reserve no room.
        """
        async with self._room:
            if digest:
                self._coming.pop(digest, None)
            coming, used_bytes = dict(self._coming), self.used_bytes
            missing = size_bytes - await asyncio.to_thread(self._left, coming, used_bytes)
            # the stored copies of damaged artifacts are removed before any eviction
            if missing > 0:
                await asyncio.to_thread(self._remove_spoiled)
                missing = size_bytes - await asyncio.to_thread(self._left, coming, used_bytes)
            leaving = to_evict(self._items(), missing, needed=needed)
            if leaving is None:
                log.warning("artifact_room_exhausted", size_bytes=size_bytes, missing_bytes=missing)
                return False
            # All artifacts are renamed before the first is deleted. During the slow deletion, an
            # engine could begin to use an artifact that is next.
            paths = [path for name in leaving if (path := self._take_away(name)) is not None]
            for path in paths:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            if digest:
                self._coming[digest] = size_bytes
            return True

    def expect(self, digest: str, size_bytes: int) -> None:
        """Reserve room for an artifact that is being fetched, even if the disk lacks the room."""
        self._coming[digest] = size_bytes

    def give_up(self, digest: str) -> None:
        """Release the room reserved for an artifact."""
        self._coming.pop(digest, None)

    def admit(self, digest: str, staging: Path) -> None:
        """Move a complete and verified directory of the same file system into the library.

        Raises:
            OSError: The directory cannot be renamed.
        """
        entry = _entry(staging)
        target = self._directory / digest
        try:
            staging.rename(target)
        except OSError:  # another process may have added the same artifact first
            if not target.is_dir():
                raise
            shutil.rmtree(staging, ignore_errors=True)
        else:
            self._fingerprints.keep(digest, fingerprint_of(target))
        self._entries[digest] = entry
        self._heat[digest] = Heat(1.0, self._clock())
        self._is_heat_saved = False
        self._coming.pop(digest, None)

    async def save_heat(self) -> None:
        """Save the heat of artifacts for the next agent, if it has changed."""
        if not self._is_heat_saved:
            self._is_heat_saved = True
            saved = {digest: (heat.score, heat.at_s) for digest, heat in self._heat.items()}
            await asyncio.to_thread(self._write_heat, json.dumps(saved))

    async def _verify(self, digest: str) -> str:
        path = self._directory / digest
        begin_s = time.monotonic()
        try:
            seen = await asyncio.to_thread(fingerprint_of, path)
            found = (await asyncio.to_thread(manifest_of_directory, path)).digest
        except ManifestError as error:
            seen, found = {}, str(error)
        except OSError as error:  # an error of a read does not prove that the content is wrong
            if not path.is_dir():  # the artifact was evicted during the read
                return ""
            return f"artifact {digest} cannot be read: {error}; look at the disk of this node"
        if found == digest:
            self._fingerprints.keep(digest, seen)
            took_s = round(time.monotonic() - begin_s, 3)
            log.info("artifact_verified", digest=digest, took_s=took_s)
            return ""
        aside = self._directory / f"{_SPOILED}{digest}"
        await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
        try:
            path.rename(aside)
        except FileNotFoundError:  # the artifact was evicted before the rename
            return ""
        self._entries.pop(digest, None)
        self._heat.pop(digest, None)
        self.spoiled += 1
        log.error("artifact_spoiled", digest=digest, found=found, moved_to=str(aside))
        return f"artifact {digest} was damaged on the disk of this node; it is fetched again"

    def _remove_spoiled(self) -> None:
        for path in self._directory.glob(f"{_SPOILED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _items(self) -> Iterator[EvictionCandidate]:
        now_s = self._clock()
        held = self._desired.union(*self._in_use.values())
        for digest, entry in self._entries.items():
            hold = Hold.NONE
            if digest in held:
                hold = Hold.FAST
            elif (priority := self._wanted.get(digest)) is not None:
                hold = Hold.PREFETCHED if priority >= _PREFETCH else Hold.FAST
            heat = self._heat[digest].at(now_s)
            yield EvictionCandidate(digest, entry.size_bytes, heat, entry.is_adapter, hold)

    def _left(self, coming: Mapping[str, int], used_bytes: int) -> int:
        """Return the bytes of the disk that are neither used nor reserved."""
        # bytes of reservations that are not written yet, because the written bytes are not free
        owed = 0
        for digest, size in coming.items():
            written = sum(size for size, _ in _files(self._directory / PARTIAL / digest))
            owed += max(0, size - written)
        left = self._free_bytes() - self._reserve_bytes - owed
        if self._max_bytes:
            left = min(left, self._max_bytes - used_bytes - sum(coming.values()))
        return left

    def _take_away(self, digest: str) -> Path | None:
        """Rename an artifact for its deletion, and return its new path, or None if it is gone."""
        leaving = self._directory / new_id(_LEAVING)
        try:
            # readers cannot find the artifact after this rename
            (self._directory / digest).rename(leaving)
        except FileNotFoundError:
            leaving = None  # another process has removed the artifact
        entry = self._entries.pop(digest, None)
        self._heat.pop(digest, None)
        self._fingerprints.forget(digest)
        if leaving is not None:
            self.evictions += 1
            size_bytes = entry.size_bytes if entry else 0
            log.info("artifact_evicted", digest=digest, size_bytes=size_bytes)
        return leaving

    def _look(self, known: frozenset[str]) -> tuple[dict[str, _Entry | None], dict[str, Heat]]:
        """Return the folder's artifacts (None for each one in `known`), and the saved heat."""
        self._directory.mkdir(parents=True, exist_ok=True)
        found: dict[str, _Entry | None] = {}
        for path in self._directory.iterdir():
            if path.name.startswith(_LEAVING):
                # left by an agent that was killed during a deletion
                shutil.rmtree(path, ignore_errors=True)
            elif path.name in known:
                found[path.name] = None
            elif _DIGEST.fullmatch(path.name) and path.is_dir():
                found[path.name] = _entry(path)
        return found, {} if known else self._read_heat()

    def _read_heat(self) -> dict[str, Heat]:
        try:
            saved = json.loads((self._directory / _HEAT_FILE).read_text())
            return {str(d): Heat(float(score), float(at_s)) for d, (score, at_s) in saved.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("artifact_heat_unreadable", error=str(error))
            return {}

    def _write_heat(self, text: str) -> None:
        staging = self._directory / f"{_HEAT_FILE}.new"
        try:
            staging.write_text(text)
            staging.replace(self._directory / _HEAT_FILE)
        except OSError as error:
            log.warning("artifact_heat_not_saved", error=str(error))


def _entry(path: Path) -> _Entry:
    files = list(_files(path))
    return _Entry(
        size_bytes=sum(size for size, _ in files),
        is_adapter=(path / _ADAPTER_FILE).is_file(),
        arrived_s=max((changed_s for _, changed_s in files), default=0.0),
    )


def _files(directory: Path) -> Iterator[tuple[int, float]]:
    """Yield size and time of modification of each file in a directory, if the directory exists."""
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                status = (Path(root) / name).lstat()
            except FileNotFoundError:
                continue
            yield status.st_size, status.st_mtime
