"""Serves the socket on which a node's engines request artifacts from the agent.

The socket is a file. Its permissions admit only engines of this agent. An artifact is fetched once,
even if several engines and requests wait for it.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import structlog

from replica.agent.artifacts.library import Library
from replica.artifact_lines import (
    LINE_BYTES_MAX,
    ArtifactOutcome,
    Ask,
    decode_request,
    encode_outcome,
)
from sluice.errors import ErrorCode, PlatformError

log = structlog.get_logger(__name__)

SOCKET = "artifacts.sock"
FETCHES_MAX = 256  # largest number of artifacts that are fetched at a time for requests
FETCH_S_MAX = 120.0  # longest wait for an artifact in seconds, longer than requests' own deadlines
_ENGINES_MAX = 256
_UNSENT_BYTES_MAX = 1 << 20


class AdapterFetcher(Protocol):
    """Fetches artifacts from peers or the store into the library."""

    async def ensure(self, digest: str, *, needed: bool) -> None:
        """Wait until the artifact is complete in the library.

        Raises:
            PlatformError: With ADAPTER_NOT_FOUND if the artifact is unknown, and with ENGINE_BUSY
                if the disk has no room.
        """
        ...


class OnlyHere:
    """A fetcher for nodes without a store, which only reports missing artifacts."""

    async def ensure(self, digest: str, *, needed: bool) -> None:  # noqa: ARG002 - of the protocol
        """Raise ADAPTER_NOT_FOUND, because the artifact is not in the library."""
        text = f"artifact {digest} is not on this node, which fetches none; import it there"
        raise PlatformError(ErrorCode.ADAPTER_NOT_FOUND, text)


class LocalApi:
    """Answers the engines of a node while the context of `serve` is open."""

    def __init__(
        self, state_dir: Path, library: Library, fetcher: AdapterFetcher, *, uid: int | None = None
    ) -> None:
        """Set the path of the socket, which `serve` opens.

        Args:
            state_dir: Directory of the agent, in which the socket is created.
            library: The artifacts on the node.
            fetcher: Fetcher of missing artifacts.
            uid: User id of the engines, or None for the agent's own user.
        """
        self._uid = uid
        self._state_dir = state_dir
        self._library = library
        self._fetcher = fetcher
        self._group: asyncio.TaskGroup | None = None
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, set[asyncio.StreamWriter]] = {}
        self._numbers = itertools.count(1)
        self._engines: set[asyncio.StreamWriter] = set()

    @property
    def fetches(self) -> int:
        """Number of artifacts that are now fetched for waiting requests."""
        return len(self._fetches)

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[None]:
        """Listen while the context is open.

        Raises:
            OSError: The socket cannot be created.
        """
        listening = _listen(self._state_dir, self._uid)
        async with asyncio.TaskGroup() as group:
            self._group = group
            server = await asyncio.start_unix_server(
                self._talk, sock=listening, limit=LINE_BYTES_MAX
            )
            try:
                async with server:
                    try:
                        yield
                    finally:  # without this, the server would wait until all engines disconnect
                        for writer in self._engines:
                            writer.transport.abort()
            finally:
                self._group = None
                for task in self._fetches.values():
                    task.cancel()
                with suppress(FileNotFoundError):
                    (self._state_dir / SOCKET).unlink()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = f"engine {next(self._numbers)}"
        self._engines.add(writer)
        try:
            while len(self._engines) <= _ENGINES_MAX and (line := await reader.readline()):
                self._handle(name, writer, decode_request(line))
        except (OSError, ValueError) as error:
            log.warning("engine_message_unreadable", error=repr(error))
        finally:
            self._engines.discard(writer)
            self._library.use(name, ())
            self._forget(writer, frozenset())
            writer.close()

    def _handle(self, name: str, writer: asyncio.StreamWriter, ask: Ask) -> None:
        self._library.use(name, ask.reads | ask.waits)
        for digest, count in ask.uses.items():
            self._library.used(digest, count)
        self._forget(writer, ask.waits)
        for digest in sorted(ask.waits):
            if writer in self._waiting.get(digest, ()):
                continue
            if self._library.looks_sound(digest):
                _send(writer, ArtifactOutcome(digest))
            elif self._fetch(digest):
                self._waiting.setdefault(digest, set()).add(writer)
            else:
                text = f"{len(self._fetches)} artifacts are being fetched already; try again"
                _send(writer, ArtifactOutcome(digest, ErrorCode.ENGINE_BUSY, text))

    def _forget(self, writer: asyncio.StreamWriter, waits: Collection[str]) -> None:
        """Remove an engine's waits for artifacts. Their downloads continue."""
        for digest, writers in self._waiting.items():
            if digest not in waits:
                writers.discard(writer)

    def _fetch(self, digest: str) -> bool:
        if digest in self._fetches:
            return True
        if self._group is None or len(self._fetches) >= FETCHES_MAX:
            return False
        self._fetches[digest] = self._group.create_task(self._get(digest))
        return True

    async def _get(self, digest: str) -> None:
        told = ArtifactOutcome(digest)
        try:
            async with asyncio.timeout(FETCH_S_MAX):
                await self._library.problem_of(digest)  # moves the artifact away if it is damaged
                if not self._library.has(digest):
                    await self._fetcher.ensure(digest, needed=True)
            if not self._library.has(digest):  # the artifact was evicted just after its fetch
                told = ArtifactOutcome(
                    digest, ErrorCode.ENGINE_BUSY, "the artifact made way for another one"
                )
        except PlatformError as error:
            told = ArtifactOutcome(digest, _code_of(error), error.message)
        except TimeoutError:
            told = ArtifactOutcome(
                digest, ErrorCode.ENGINE_BUSY, f"not fetched within {FETCH_S_MAX:.0f} s"
            )
        except OSError as error:
            told = ArtifactOutcome(
                digest, ErrorCode.ENGINE_BUSY, f"the node could not keep it: {error}"
            )
        finally:
            del self._fetches[digest]
            waiting = self._waiting.pop(digest, set())
        if told.code:
            log.warning("artifact_not_fetched", digest=digest, code=told.code, error=told.message)
        for writer in waiting:
            _send(writer, told)


def _code_of(error: PlatformError) -> ErrorCode:
    """Return the code for the engine. A fault of this node alone becomes retryable."""
    no_engine_loads_it = error.code.policy.goes_to_control
    return error.code if no_engine_loads_it else ErrorCode.ENGINE_BUSY


def _send(writer: asyncio.StreamWriter, told: ArtifactOutcome) -> None:
    if writer.is_closing():
        return
    writer.write(encode_outcome(told))
    if writer.transport.get_write_buffer_size() > _UNSENT_BYTES_MAX:
        writer.transport.abort()  # the engine does not read its answers, and may connect again


def _listen(state_dir: Path, uid: int | None) -> socket.socket:
    """Return the listening socket. Only the engines' user and root can connect.

    A socket address has at most 107 bytes, and the path may be longer. So the socket is bound
    through a handle of its directory.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        (state_dir / SOCKET).unlink(missing_ok=True)
        listening.bind(f"/proc/self/fd/{directory}/{SOCKET}")
        (state_dir / SOCKET).chmod(0o600)
        if uid is not None:
            os.chown(state_dir / SOCKET, uid, -1)
        listening.listen()
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    finally:
        os.close(directory)
    return listening
