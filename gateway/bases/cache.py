"""Loads each base once for this process, and drops it when the base has been deleted."""

import asyncio
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from sluice.errors import ErrorCode, RejectedError

log = structlog.get_logger(__name__)

_RETRY_LOAD_S = 1.0

_Loaded = TypeVar("_Loaded")


class BaseCache(Generic[_Loaded]):
    """The bases that this process has loaded. Only one load runs at a time."""

    def __init__(
        self,
        find: Callable[[str], Path],
        load: Callable[[Path], _Loaded],
        on_missing: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start with an empty cache, without reading any file.

        Args:
            find: Returns the directory of a base, or raises FileNotFoundError if this machine lacks
                the base. Runs in a thread.
            load: Reads a base's directory, or raises OSError or ValueError. Runs in a thread.
            on_missing: Called with the digest of a needed base that this machine lacks.
        """
        self._find = find
        self._read = load
        self._on_missing = on_missing
        self._loaded: dict[str, _Loaded] = {}
        self._lock = asyncio.Lock()
        # Time before which a base is not loaded again after a failure, by digest.
        self._not_before_s: dict[str, float] = {}
        self._arrivals = 0  # number of calls of `refresh`
        self._logged: dict[str, str] = {}  # last logged message of each failed base, by digest

    async def get(self, digest: str) -> _Loaded:
        """Return a base, loading it first if needed. Raise RejectedError if the load fails."""
        found = self._loaded.get(digest)
        return found if found is not None else await self._load(digest)

    @property
    def loaded(self) -> Collection[_Loaded]:
        """The bases that are loaded now."""
        return self._loaded.values()

    def has(self, digest: str) -> bool:
        """Return whether a base is loaded."""
        return digest in self._loaded

    def refresh(self, digest: str) -> None:
        """Allow a failed base to be loaded at its next use, because its files may have arrived."""
        self._not_before_s.pop(digest, None)
        self._arrivals += 1

    def keep_only(self, digests: set[str]) -> None:
        """Drop all bases except the given ones, since the others have been deleted."""
        for digest in self._loaded.keys() - digests:
            del self._loaded[digest]
        for digest in self._not_before_s.keys() - digests:
            del self._not_before_s[digest]
        for digest in self._logged.keys() - digests:
            del self._logged[digest]

    async def _load(self, digest: str) -> _Loaded:
        is_begun = False
        await self._lock.acquire()
        try:
            if (found := self._loaded.get(digest)) is not None:
                return found
            if time.monotonic() < self._not_before_s.get(digest, 0.0):
                raise _not_ready()
            loop = asyncio.get_running_loop()
            load = loop.run_in_executor(None, self._find_and_read, digest)
            load.add_done_callback(partial(self._finish_load, digest, self._arrivals))
            is_begun = True
        finally:
            if not is_begun:
                self._lock.release()
        try:
            return await asyncio.shield(load)  # the load continues if this request is cancelled
        except (_MissingError, OSError, ValueError) as error:
            raise _not_ready() from error

    def _find_and_read(self, digest: str) -> _Loaded:
        try:
            directory = self._find(digest)
        except FileNotFoundError as error:
            raise _MissingError from error
        return self._read(directory)

    def _finish_load(self, digest: str, arrivals: int, load: "asyncio.Future[_Loaded]") -> None:
        """Record the result of a load, and then release the lock for the next load."""
        try:
            if not load.cancelled():
                self._note(digest, arrivals, load)
        finally:
            self._lock.release()

    def _note(self, digest: str, arrivals: int, load: "asyncio.Future[_Loaded]") -> None:
        error = load.exception()
        if error is None:
            log.info("base_loaded", digest=digest)
            self._loaded[digest] = load.result()
            return
        if arrivals == self._arrivals:  # else the files may have arrived during the load
            self._not_before_s[digest] = time.monotonic() + _RETRY_LOAD_S
        if isinstance(error, _MissingError):
            self._on_missing(digest)
        elif self._logged.get(digest) != str(error):
            self._logged[digest] = str(error)
            log.warning("base_not_loaded", digest=digest, error=str(error))


class _MissingError(Exception):
    """The files of the base are not on this machine."""


def _not_ready() -> RejectedError:
    text = "The model's files are not ready on this gateway yet; try again shortly."
    return RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=5)
