"""Requests from the node's agent, over a socket, the artifacts that are not on the disk.

One thread serves all requests and delivers their results to the step loop. After a restart of the
agent, the thread sends all open requests again.
"""

import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from replica.artifact_lines import (
    LINE_BYTES_MAX,
    ArtifactOutcome,
    Ask,
    LineError,
    decode_outcome,
    encode_request,
)
from replica.engine.types import RefusedError
from sluice.errors import ErrorCode

log = logging.getLogger(__name__)

Fetched = Callable[[RefusedError | None], None]

WAITS_MAX = 256  # largest number of open requests
WAIT_S_MAX = 130.0  # seconds after which a request fails, longer than the agent's own deadline
_AWAY_S = 5.0  # seconds that a request waits for an absent agent, which may be restarting
_CONNECT_PAUSE_S = 0.2
_IDLE_PAUSE_S = 2.0
_USES_EVERY_S = 2.0
_SEND_S = 2.0
_CODES = {str(code): code for code in ErrorCode}


class _Wait(NamedTuple):
    done: Fetched
    since_s: float


class NodeArtifacts:
    """A client of the agent that any thread may use. Results are delivered in the step loop."""

    def __init__(
        self,
        path: Path,
        deliver: Callable[[Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an idle client, which `start` connects.

        Args:
            path: Path of the agent's socket.
            deliver: Function that runs another function in the step loop.
            clock: Clock in monotonic seconds.
        """
        self._path = path
        self._deliver = deliver
        self._clock = clock
        self._lock = threading.Lock()
        self._waits: dict[str, _Wait] = {}
        self._reads: frozenset[str] = frozenset()
        self._uses: Counter[str] = Counter()
        self._is_due = False  # whether a message must be sent to the agent without delay
        self._is_closing = False
        self._away_since_s: float | None = None
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="artifacts", daemon=True)

    def start(self) -> None:
        """Start the client's thread."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop the thread. Open requests receive no result."""
        self._is_closing = True
        self._wake()
        self._thread.join(timeout_s)

    def want(self, digest: str, done: Fetched) -> bool:
        """Request an artifact, or return False if too many artifacts are requested already.

        The step loop calls `done` with an error, or with None when the artifact is on the disk. The
        caller must not request the same artifact again before that call.
        """
        with self._lock:
            if len(self._waits) >= WAITS_MAX:
                return False
            self._waits[digest] = _Wait(done, self._clock())
            self._is_due = True
        self._wake()
        return True

    def note_use(self, digest: str) -> None:
        """Count a request that uses an artifact. The counts are sent to the agent periodically."""
        with self._lock:
            self._uses[digest] += 1

    def hold(self, digests: frozenset[str]) -> None:
        """Report to the agent the complete set of artifacts whose files must stay on the disk."""
        with self._lock:
            if digests == self._reads:
                return
            self._reads = digests
            self._is_due = True
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # the thread has already been woken, or the socket is closed
            self._waker.send(b"x")

    def _run(self) -> None:
        while not self._is_closing:
            connection = self._connect()
            if connection is not None:
                self._away_since_s = None
                with connection:
                    self._talk(connection)
            elif self._away_since_s is None:
                self._away_since_s = self._clock()
            self._end_late()
            if not self._is_closing:
                self._wait(_CONNECT_PAUSE_S if self._waits else _IDLE_PAUSE_S)
        self._awake.close()
        self._waker.close()

    def _connect(self) -> socket.socket | None:
        """Return a connection to the agent, or None if no agent answers.

        The address uses a handle of the directory, because a path may be too long for an address.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_SEND_S)
        try:
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                connection.connect(f"/proc/self/fd/{directory}/{self._path.name}")
            finally:
                os.close(directory)
        except OSError:
            connection.close()
            return None
        return connection

    def _talk(self, connection: socket.socket) -> None:
        """Exchange messages with the agent until the connection ends."""
        with self._lock:
            self._is_due = True  # a new agent has no record of the open requests
        heard = b""
        said_s = self._clock()
        try:
            while not self._is_closing:
                if self._is_due or self._clock() - said_s >= _USES_EVERY_S:
                    said_s = self._clock()
                    self._send(connection)
                if self._wait(_USES_EVERY_S, connection):
                    received = connection.recv(65536)
                    if not received or len(heard) > LINE_BYTES_MAX:
                        return
                    *lines, heard = (heard + received).split(b"\n")
                    for line in lines:
                        self._receive(decode_outcome(line))
                self._end_late()
        except (OSError, LineError) as error:
            log.warning("agent_lost: %r", error)

    def _send(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._is_due and not self._uses:
                return
            ask = Ask(frozenset(self._waits), self._reads, dict(self._uses))
            self._uses.clear()
            self._is_due = False
        connection.sendall(encode_request(ask))

    def _receive(self, told: ArtifactOutcome) -> None:
        error = None
        if told.code:
            error = RefusedError(
                _CODES.get(told.code, ErrorCode.ENGINE_BUSY),
                f"adapter {told.digest[:12]}: {told.message}",
            )
        self._end(told.digest, error)

    def _end(self, digest: str, error: RefusedError | None) -> None:
        with self._lock:
            wait = self._waits.pop(digest, None)
            self._is_due = True
        if wait is not None:
            self._deliver(lambda: wait.done(error))

    def _end_late(self) -> None:
        """Fail requests that are open for too long, or sooner while there is no agent.

        A failed request does not imply that the artifact is missing, because another node may have
        it.
        """
        now_s, away_since_s = self._clock(), self._away_since_s
        with self._lock:
            waits = [(digest, wait.since_s) for digest, wait in self._waits.items()]
        for digest, since_s in waits:
            # The agent may have vanished just before this request and be restarting now. So a
            # request that is newer waits for the full time.
            if away_since_s is not None and now_s - max(away_since_s, since_s) >= _AWAY_S:
                text = (
                    f"adapter {digest} is not on this node, and the agent that would fetch it"
                    f" does not answer at {self._path}; start it, or import the adapter"
                )
            elif now_s - since_s >= WAIT_S_MAX:
                text = f"adapter {digest[:12]} was not fetched within {WAIT_S_MAX:.0f} s"
            else:
                continue
            self._end(digest, RefusedError(ErrorCode.ENGINE_BUSY, text))

    def _wait(self, seconds: float, connection: socket.socket | None = None) -> bool:
        """Wait until the agent sends a message, a request is added, or `seconds` are over.

        Returns:
            Whether the agent has sent a message.
        """
        poll = select.poll()
        poll.register(self._awake, select.POLLIN)
        if connection is not None:
            poll.register(connection, select.POLLIN)
        ready = {file for file, _ in poll.poll(seconds * 1000)}
        if self._awake.fileno() in ready:
            self._awake.recv(4096)
        return connection is not None and connection.fileno() in ready
