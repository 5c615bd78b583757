"""Fetches the tokenizer and configuration files of bases that this gateway lacks, in turn.

All workers of a machine share the shelf (`BaseShelf`). One worker fetches a base, and the other
workers read the files from the shelf.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import structlog

from gateway.bases.shelf import BaseShelf
from gateway.bases.source import BaseFetchError
from sluice.artifacts import artifact_path
from sluice.lifecycle import backoff_s

log = structlog.get_logger(__name__)

# Maximum random delay in seconds, because all gateways need a new base at the same time.
_FIRST_SPREAD_S = 0.5
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.5, 30.0
_BUSY_PAUSE_S = 0.25  # seconds until the next check of a shelf that another worker has locked

# Returns a base's files by name, given its digest, or raises `BaseFetchError` if a fetch fails.
Fetch = Callable[[str], Awaitable[dict[str, bytes]]]


@dataclass(slots=True)
class _WantedBase:
    not_before_s: float
    attempt: int = 0


class BaseFetcher:
    """Finds the directories of bases. `run` fetches the missing bases."""

    def __init__(
        self,
        artifacts: Path | None,
        shelf: BaseShelf,
        fetch: Fetch,
        *,
        on_arrival: Callable[[str], None],
        count: Callable[[str], None],
    ) -> None:
        """Start without missing bases.

        Args:
            artifacts: Directory in which this machine's agent stores artifacts, or None without an
                agent.
            shelf: Directory for fetched bases.
            fetch: Returns the files of a base from the network.
            on_arrival: Called with the digest of a base whose files have arrived.
            count: Called with `fetched` or `failed` after each attempt.
        """
        self._artifacts = artifacts
        self._shelf = shelf
        self._fetch = fetch
        self._on_arrival = on_arrival
        self._count = count
        self._wanted: dict[str, _WantedBase] = {}
        self._has_wanted = asyncio.Event()

    def find(self, digest: str) -> Path:
        """Return the directory of a base, or raise FileNotFoundError. The call blocks."""
        if self._artifacts is not None:
            try:
                return artifact_path(self._artifacts, digest)
            except FileNotFoundError:
                pass
        return self._shelf.find(digest)

    def want(self, digest: str) -> None:
        """Add a missing base to the bases to fetch."""
        if digest not in self._wanted:
            spread_s = random.uniform(0.0, _FIRST_SPREAD_S)  # noqa: S311 - spreads
            self._wanted[digest] = _WantedBase(time.monotonic() + spread_s)
            self._has_wanted.set()

    def keep_only(self, digests: Collection[str]) -> None:
        """Stop fetching bases that no longer exist."""
        for digest in self._wanted.keys() - set(digests):
            del self._wanted[digest]

    @property
    def wanted(self) -> int:
        """Number of bases that are still to be fetched."""
        return len(self._wanted)

    async def run(self) -> None:
        """Fetch wanted bases until cancelled."""
        while True:
            self._has_wanted.clear()
            now_s = time.monotonic()
            due = min(self._wanted.items(), key=lambda it: it[1].not_before_s, default=None)
            if due is not None and due[1].not_before_s <= now_s:
                await self._try(*due)
                continue
            try:
                async with asyncio.timeout(None if due is None else due[1].not_before_s - now_s):
                    await self._has_wanted.wait()
            except TimeoutError:
                continue

    async def _try(self, digest: str, wanted: _WantedBase) -> None:
        try:
            is_there = await self._bring(digest)
        except (BaseFetchError, OSError) as error:
            pause_s = backoff_s(wanted.attempt, first_s=_BACKOFF_FIRST_S, max_s=_BACKOFF_MAX_S)
            wanted.attempt += 1
            log.warning("base_not_fetched", digest=digest, error=str(error), again_in_s=pause_s)
            self._count("failed")
        else:
            if is_there:
                self._wanted.pop(digest, None)
                self._on_arrival(digest)
                return
            pause_s = _BUSY_PAUSE_S
        wanted.not_before_s = time.monotonic() + pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads

    async def _bring(self, digest: str) -> bool:
        """Fetch a base unless it is available. Returns False if another worker is fetching it."""
        try:
            await asyncio.to_thread(self.find, digest)
        except FileNotFoundError:
            pass
        else:
            return True
        with self._shelf.locked() as is_ours:
            if not is_ours:
                return False
            # Another worker may have fetched the base before this worker acquired the lock.
            if not self._shelf.has(digest):
                files = await self._fetch(digest)
                await asyncio.to_thread(self._shelf.put, digest, files)
                log.info("base_fetched", digest=digest, size_bytes=sum(map(len, files.values())))
                self._count("fetched")
        return True
