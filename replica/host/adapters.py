"""Adapters on their way into the engine, and who waits for them; owned by the step loop.

Files are read by background threads, one read per digest however many wait; what was read is put
into the driver by the step loop, and then those who wait are told, in their order.
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

READS_MAX = 64  # adapters on their way at once
_REFUSALS_MAX = 256
_DIGEST = re.compile(r"[0-9a-f]{64}")

Done = Callable[[RefusedError | None], None]


class Background(Protocol):
    """Where slow work is done beside the step loop."""

    def run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> bool:
        """Call `work` in another thread, then `done` in the step loop.

        `done` gets what `work` returned, or the exception that it raised. Returns False when there
        is too much to do already.
        """
        ...


class _Refusal(NamedTuple):
    mark: tuple[int, int]
    error: RefusedError


class AdapterDesk:
    """Gets adapters into the driver."""

    def __init__(
        self,
        driver: Driver,
        directory: Path | None,
        background: Background,
        counters: HostCounters,
    ) -> None:
        """Make an idle desk; `directory` holds artifacts by digest, None: there are none."""
        self._driver = driver
        self._directory = directory
        self._background = background
        self._counters = counters
        self._waiting: dict[str, list[Done]] = {}
        # What is wrong with an artifact stays wrong, unless its directory is put there anew: one
        # that was being removed, or that a broken disk had bitten, may be whole the next time.
        self._refused: dict[str, _Refusal] = {}

    def fetch(self, digest: str, done: Done) -> None:
        """Make sure that the driver has an adapter, then call `done`, at once or in a later turn.

        `done` gets the reason if it cannot be had. It must use the adapter before it returns: later
        ones may take its place.
        """
        if not _DIGEST.fullmatch(digest):
            message = f"{digest[:80]!r} is no digest of an adapter: 64 hexadecimal digits"
            done(RefusedError(ErrorCode.INVALID_REQUEST, message))
        elif self._driver.has_adapter(digest):
            done(None)
        elif (waiting := self._waiting.get(digest)) is not None:
            waiting.append(done)
        elif len(self._waiting) >= READS_MAX or not self._background.run(
            partial(self._read, digest), partial(self._was_read, digest)
        ):
            message = f"{len(self._waiting)} adapters are being read; try again"
            done(RefusedError(ErrorCode.ENGINE_BUSY, message))
        else:
            self._waiting[digest] = [done]

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
            raise RefusedError(ErrorCode.ADAPTER_NOT_FOUND, f"adapter: {error}") from None
        known = self._refused.get(digest)
        if known is not None and known.mark == mark:
            raise known.error
        try:
            return self._driver.read_adapter(digest, path)
        except RefusedError as error:
            return _Refusal(mark, error)

    def _was_read(self, digest: str, outcome: Any) -> None:
        error = self._put(digest, outcome)
        if error is not None:
            self._counters.adapter_failures += 1
        for done in self._waiting.pop(digest):
            # One of them may have needed the room for something else; the next then starts over.
            if error is None and not self._driver.has_adapter(digest):
                self.fetch(digest, done)
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


def _mark(directory: Path) -> tuple[int, int]:
    """Return what changes when a directory, or what lies in it, is replaced."""
    status = directory.stat()
    return status.st_ino, status.st_mtime_ns
