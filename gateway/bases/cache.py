"""What this process has loaded of its bases: each once, and only while it exists."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from sluice.errors import ErrorCode, RejectedError

log = structlog.get_logger(__name__)

_RETRY_LOAD_S = 1.0

_Loaded = TypeVar("_Loaded")


class BaseCache(Generic[_Loaded]):
    """The bases that this process has loaded. One load at a time."""

    def __init__(
        self,
        find: Callable[[str], Path],
        load: Callable[[Path], _Loaded],
        on_missing: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            find: Returns where a base lies, in a thread; FileNotFoundError when it is not here.
            load: Reads a base's directory, in a thread; OSError or ValueError when it cannot.
            on_missing: Told the digest of a base that somebody needs and that is not here.
        """
        self._find = find
        self._read = load
        self._on_missing = on_missing
        self._loaded: dict[str, _Loaded] = {}
        self._lock = asyncio.Lock()
        self._not_before_s: dict[str, float] = {}  # bases whose files were bad: when to look again
        self._told: dict[str, str] = {}  # what the log says of them

    async def get(self, digest: str) -> _Loaded:
        """Return what was loaded of a base; RejectedError when this gateway does not have them."""
        found = self._loaded.get(digest)
        return found if found is not None else await self._load(digest)

    def has(self, digest: str) -> bool:
        """Return whether a base is loaded."""
        return digest in self._loaded

    def look_again(self, digest: str) -> None:
        """Read a base anew at the next occasion: its files may have come."""
        self._not_before_s.pop(digest, None)

    def keep_only(self, digests: set[str]) -> None:
        """Forget the bases that no longer exist."""
        for digest in self._loaded.keys() - digests:
            del self._loaded[digest]
        for digest in self._not_before_s.keys() - digests:
            del self._not_before_s[digest]
        for digest in self._told.keys() - digests:
            del self._told[digest]

    async def _load(self, digest: str) -> _Loaded:
        async with self._lock:
            if (found := self._loaded.get(digest)) is not None:
                return found
            now_s = time.monotonic()
            if now_s < self._not_before_s.get(digest, 0.0):
                raise _not_ready()
            self._not_before_s[digest] = now_s + _RETRY_LOAD_S
            try:
                try:
                    directory = await asyncio.to_thread(self._find, digest)
                except FileNotFoundError:
                    self._on_missing(digest)
                    raise _not_ready() from None
                found = await asyncio.to_thread(self._read, directory)
            except (OSError, ValueError) as error:
                if self._told.get(digest) != str(error):
                    self._told[digest] = str(error)
                    log.warning("base_not_loaded", digest=digest, error=str(error))
                raise _not_ready() from error
            log.info("base_loaded", digest=digest)
            self._not_before_s.pop(digest, None)
            self._loaded[digest] = found
            return found


def _not_ready() -> RejectedError:
    text = "The model's files are not ready on this gateway yet."
    return RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=5)
