"""Engines ask their node's agent for artifacts, over its real socket."""

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from queue import Queue

import pytest

from replica.agent.artifacts.eviction import Hold
from replica.agent.artifacts.library import Library
from replica.agent.artifacts.local_api import SOCKET, LocalApi
from replica.engine.types import RefusedError
from replica.host import node_artifacts
from replica.host.node_artifacts import NodeArtifacts
from sluice.errors import ErrorCode, PlatformError

A, B = "a" * 64, "b" * 64
WAIT_S = 60.0


class Folder:
    """Fetches what the test puts there."""

    def __init__(self, library: Library, root: Path) -> None:
        self.library, self.root = library, root
        self.asked: list[str] = []
        self.may_go_on = asyncio.Event()
        self.is_known = True

    async def ensure(self, digest: str, *, needed: bool) -> None:
        assert needed
        self.asked.append(digest)
        await self.may_go_on.wait()
        if not self.is_known:
            raise PlatformError(ErrorCode.ADAPTER_NOT_FOUND, "nobody knows it")
        admit(self.library, self.root, digest)


def admit(library: Library, root: Path, digest: str) -> None:
    """Have an artifact there that was fetched and verified."""
    staging = root / ".staging"
    staging.mkdir()
    (staging / "weights").touch()
    library.admit(digest, staging)


class Engine:
    """The engine's side, and what it was told."""

    def __init__(self, state_dir: Path) -> None:
        self.told: Queue[tuple[str, RefusedError | None]] = Queue()
        self.line = NodeArtifacts(state_dir / SOCKET, lambda action: action())
        self.line.start()

    def want(self, digest: str) -> None:
        assert self.line.want(digest, lambda error: self.told.put((digest, error)))

    async def hear(self) -> tuple[str, RefusedError | None]:
        return await asyncio.to_thread(self.told.get, timeout=WAIT_S)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A directory whose socket's path is longer than an address can be."""
    path = tmp_path / ("state" * 25)
    path.mkdir()
    return path


@pytest.fixture
async def library(tmp_path: Path) -> Library:
    library = Library(tmp_path / "artifacts", max_bytes=0, reserve_bytes=0)
    await library.scan()
    return library


@pytest.fixture
def fetcher(library: Library, tmp_path: Path) -> Folder:
    return Folder(library, tmp_path / "artifacts")


@pytest.fixture
async def make_engine(state_dir: Path) -> AsyncIterator[Callable[[], Engine]]:
    engines: list[Engine] = []

    def make() -> Engine:
        engines.append(Engine(state_dir))
        return engines[-1]

    yield make
    for engine in engines:
        await asyncio.to_thread(engine.line.close, WAIT_S)
        assert not engine.line._thread.is_alive()


async def test_engines_share_one_fetch_and_are_told_when_it_is_there(
    state_dir, library, fetcher, make_engine, eventually
) -> None:
    first, second = make_engine(), make_engine()
    async with LocalApi(state_dir, library, fetcher).serve():
        first.want(A)
        await eventually(lambda: fetcher.asked == [A], "the agent asks")
        second.want(A)
        admit(library, fetcher.root, B)
        second.want(B)
        assert await second.hear() == (B, None)  # does not wait for the other one
        fetcher.may_go_on.set()
        assert await first.hear() == (A, None)
        assert await second.hear() == (A, None)
        assert fetcher.asked == [A]
        shutil.rmtree(fetcher.root / A)
        first.want(A)  # gone again
        assert await first.hear() == (A, None)
        assert fetcher.asked == [A, A]


async def test_an_unknown_artifact_is_refused_with_the_reason(
    state_dir, library, fetcher, make_engine, eventually
) -> None:
    fetcher.is_known = False
    fetcher.may_go_on.set()
    async with LocalApi(state_dir, library, fetcher).serve():
        engine = make_engine()
        engine.want(A)
        digest, error = await engine.hear()
        assert digest == A
        assert error is not None
        assert error.code is ErrorCode.ADAPTER_NOT_FOUND
        assert "nobody knows it" in error.message


async def test_the_next_agent_is_told_all_again(
    state_dir, library, fetcher, make_engine, eventually
) -> None:
    engine = make_engine()
    async with LocalApi(state_dir, library, fetcher).serve():
        engine.want(A)
        await eventually(lambda: fetcher.asked == [A], "the agent asks")
    fetcher.may_go_on.set()
    async with LocalApi(state_dir, library, fetcher).serve():
        assert await engine.hear() == (A, None)


async def test_without_an_agent_it_may_be_tried_elsewhere_and_the_message_says_why(
    state_dir, make_engine, monkeypatch
) -> None:
    monkeypatch.setattr(node_artifacts, "_AWAY_S", 0.3)
    engine = make_engine()
    engine.want(A)
    _, error = await engine.hear()
    assert error is not None
    assert error.code is ErrorCode.ENGINE_BUSY
    assert "does not answer" in error.message


async def test_uses_and_reads_reach_the_library_until_the_engine_is_gone(
    state_dir, library, fetcher, make_engine, eventually
) -> None:
    (fetcher.root / A).mkdir()
    await library.scan()
    before = library._heat[A].score

    def hold() -> Hold:
        return next(item.hold for item in library._items())

    async with LocalApi(state_dir, library, fetcher).serve():
        engine = make_engine()
        engine.line.note_use(A)
        engine.line.note_use(A)
        engine.line.hold(frozenset({A}))
        await eventually(lambda: hold() is Hold.FAST, "it is held")
        await eventually(lambda: library._heat[A].score > before, "its uses are counted")
        await asyncio.to_thread(engine.line.close, WAIT_S)
        await eventually(lambda: hold() is Hold.NONE, "it is let go")


async def test_a_peer_of_another_protocol_is_disconnected(
    state_dir, library, fetcher, make_engine, eventually
) -> None:
    async with LocalApi(state_dir, library, fetcher).serve():
        for line in (b"GET / HTTP/1.1\n", b"[]\n", b'{"waits": 1, "reads": [], "uses": {}}\n'):
            link = state_dir.parent / "s"
            link.unlink(missing_ok=True)
            link.symlink_to(state_dir)
            reader, writer = await asyncio.open_unix_connection(str(link / SOCKET))
            writer.write(line)
            async with asyncio.timeout(WAIT_S):
                assert await reader.read() == b""
            writer.close()
        engine = make_engine()
        admit(library, fetcher.root, A)
        engine.want(A)
        assert await engine.hear() == (A, None)
    assert not (state_dir / SOCKET).exists()
    with socket.socket(socket.AF_UNIX) as other, pytest.raises(OSError, match="No such file"):
        other.connect(str(state_dir.parent / "s" / SOCKET))
