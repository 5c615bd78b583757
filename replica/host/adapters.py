"""Loads adapters into the engine, then starts the sequences that wait for them.

Only the step loop calls this module. Background threads read the files of an adapter once, for any
number of waiting sequences. The step loop passes the result to the driver and then starts these
sequences in order. If an adapter is not on the disk, the `AdapterShelf` fetches it, and no reading
thread waits for the fetch.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from replica.engine.driver import Driver
from replica.engine.types import RefusedError
from replica.host.counters import HostCounters
from sluice.artifacts import artifact_path
from sluice.errors import ErrorCode

# largest number of adapters in reading threads, where adapters that the node fetches do not count
READS_MAX = 64
WAITERS_MAX = 8192  # largest number of requests that wait for adapters
# Largest number of requests that wait for one adapter, so that other adapters' requests also fit.
WAITERS_EACH_MAX = 1024
# Largest number of fetches of one adapter, if its files are evicted before they are read.
_FETCHES_MAX = 3
_REFUSALS_MAX = 256
_DIGEST = re.compile(r"[0-9a-f]{64}")

Done = Callable[[RefusedError | None], None]


class Background(Protocol):
    """Runs slow work outside the step loop."""

    def run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> bool:
        """Call `work` in another thread, then `done` in the step loop.

        `done` receives the result of `work`, or the exception that `work` raised. Returns False
        without a call if too much work is already waiting.
        """
        ...


class _Waiter(NamedTuple):
    done: Done
    is_wanted: Callable[[], bool]


def _always() -> bool:
    return True


class AdapterShelf(Protocol):
    """Fetches missing adapters onto the node's disk."""

    def want(self, digest: str, done: Callable[[RefusedError | None], None]) -> bool:
        """Request an adapter, and return False if too many adapters are requested already.

        The step loop calls `done` after the fetch, with an error if it failed. The caller must not
        request the same adapter again before that call.
        """
        ...

    def note_use(self, digest: str) -> None:
        """Count a request that uses an adapter, so that the node evicts seldom used ones first."""
        ...


class _Refusal(NamedTuple):
    mark: tuple[int, int]
    error: RefusedError


class _Missing(NamedTuple):
    """The outcome of a read whose adapter is not on the disk."""

    error: RefusedError


class AdapterDesk:
    """Loads adapters into the driver, for sequences and for explicit load requests."""

    def __init__(
        self,
        driver: Driver,
        directory: Path | None,
        background: Background,
        counters: HostCounters,
        shelf: AdapterShelf | None = None,
    ) -> None:
        """Create a desk without requests.

        Args:
            driver: Driver of the engine.
            directory: Directory of artifacts by digest, or None if the engine has no artifacts.
            background: Threads that read files.
            counters: Counters of the host.
            shelf: Shelf that fetches missing adapters onto the disk, or None if missing adapters
                are not found.
        """
        self._driver = driver
        self._directory = directory
        self._background = background
        self._counters = counters
        self._shelf = shelf
        self._waiting: dict[str, list[_Waiter]] = {}
        self._waiters = 0
        self._fetching: dict[str, int] = {}  # digest -> number of fetches that were requested
        # A refused artifact stays refused until its directory is replaced. A new directory may be
        # complete, for example after an unfinished removal or a fault of the disk.
        self._refused: dict[str, _Refusal] = {}

    def fetch(self, digest: str, done: Done, is_wanted: Callable[[], bool] = _always) -> None:
        """Ensure that the driver has an adapter, and then call `done`, perhaps after this returns.

        Args:
            digest: Digest of the adapter.
            done: Function that receives the error, or None. It must use the adapter before it
                returns, because the next adapter that is loaded may evict this one.
            is_wanted: Function that returns whether the sequence still waits. After it has returned
                False, `done` may never be called.
        """
        if not _DIGEST.fullmatch(digest):
            message = f"{digest[:80]!r} is no digest of an adapter: 64 hexadecimal digits"
            done(RefusedError(ErrorCode.INVALID_REQUEST, message))
            return
        if self._shelf is not None:
            self._shelf.note_use(digest)
        if self._driver.has_adapter(digest):
            done(None)
        elif self._waiters >= WAITERS_MAX:
            done(_busy(f"{self._waiters} requests wait for adapters"))
        elif (waiting := self._waiting.get(digest)) is not None:
            self._join(waiting, _Waiter(done, is_wanted))
        elif len(self._waiting) - len(self._fetching) >= READS_MAX or not self._run(digest):
            done(_busy(f"{len(self._waiting)} adapters are being read"))
        else:
            self._waiting[digest] = [_Waiter(done, is_wanted)]
            self._waiters += 1

    def _join(self, waiting: list[_Waiter], waiter: _Waiter) -> None:
        """Add a waiting sequence. A full list is first freed of sequences that no longer wait."""
        if len(waiting) >= WAITERS_EACH_MAX:
            before = len(waiting)
            waiting[:] = [other for other in waiting if other.is_wanted()]
            self._waiters -= before - len(waiting)
        if len(waiting) >= WAITERS_EACH_MAX:
            waiter.done(_busy(f"{len(waiting)} requests wait for this adapter"))
        else:
            waiting.append(waiter)
            self._waiters += 1

    def _run(self, digest: str) -> bool:
        """Queue the read of an adapter, or return False if too much work is waiting."""
        return self._background.run(partial(self._read, digest), partial(self._was_read, digest))

    def _read(self, digest: str) -> Any:
        """Read an adapter, in a background thread."""
        if self._directory is None:
            raise RefusedError(
                ErrorCode.ADAPTER_NOT_FOUND,
                f"adapter {digest}: this engine has no artifact folder; set SLUICE_ARTIFACTS_DIR",
            )
        try:
            path = artifact_path(self._directory, digest)
            mark = _mark(path)
        except FileNotFoundError as error:
            return _Missing(RefusedError(ErrorCode.ADAPTER_NOT_FOUND, f"adapter: {error}"))
        known = self._refused.get(digest)
        if known is not None and known.mark == mark:
            raise known.error
        try:
            return self._driver.read_adapter(digest, path)
        except (RefusedError, OSError) as error:
            if not path.is_dir():  # the directory was evicted while the adapter was being read
                text = f"adapter {digest} was removed while it was read; try again"
                return _Missing(RefusedError(ErrorCode.ADAPTER_NOT_FOUND, text))
            if isinstance(error, RefusedError):
                return _Refusal(mark, error)
            raise

    def _was_read(self, digest: str, outcome: Any) -> None:
        if isinstance(outcome, _Missing):
            if self._shelf is None:
                outcome = outcome.error
            elif self._request_fetch(digest, self._shelf):
                return
            else:
                outcome = _busy(f"{len(self._fetching)} adapters are being fetched")
        self._end(digest, self._put(digest, outcome))

    def _request_fetch(self, digest: str, shelf: AdapterShelf) -> bool:
        """Request an adapter that is not on the disk, or return False if too many are requested."""
        asked = self._fetching.get(digest, 0)
        if asked >= _FETCHES_MAX or not shelf.want(digest, partial(self._was_fetched, digest)):
            return False
        self._fetching[digest] = asked + 1
        self._counters.adapter_fetches += 1
        return True

    def _was_fetched(self, digest: str, error: RefusedError | None) -> None:
        """Queue the read of an adapter that was fetched."""
        if error is None and not self._run(digest):
            error = _busy("too many files are to be read")
        if error is not None:
            self._end(digest, error)

    def _end(self, digest: str, error: RefusedError | None) -> None:
        """Call the `done` functions of all sequences that wait for an adapter, in order."""
        self._fetching.pop(digest, None)
        if error is not None:
            self._counters.adapter_failures += 1
        waiting = self._waiting.pop(digest)
        self._waiters -= len(waiting)
        for done, is_wanted in waiting:
            # The start of a sequence earlier in this list may have evicted the adapter, which is
            # then fetched again for the later sequences.
            if error is None and not self._driver.has_adapter(digest):
                self.fetch(digest, done, is_wanted)
            else:
                done(error)

    def _put(self, digest: str, outcome: Any) -> RefusedError | None:
        if isinstance(outcome, RefusedError):
            return outcome
        if isinstance(outcome, _Refusal):
            if outcome.error.code is ErrorCode.ADAPTER_INVALID:
                self._refused[digest] = outcome
                if len(self._refused) > _REFUSALS_MAX:
                    del self._refused[next(iter(self._refused))]
            return outcome.error
        if isinstance(outcome, Exception):
            message = f"adapter {digest} could not be read: {outcome!r}"
            return RefusedError(ErrorCode.ENGINE_FAILED, message)
        try:
            self._driver.put_adapter(digest, outcome)
        except RefusedError as error:
            return error
        return None


def _busy(reason: str) -> RefusedError:
    return RefusedError(ErrorCode.ENGINE_BUSY, f"{reason}; try again")


def _mark(directory: Path) -> tuple[int, int]:
    """Return numbers of which one changes if the directory, or a file in it, is replaced."""
    status = directory.stat()
    return status.st_ino, status.st_mtime_ns
