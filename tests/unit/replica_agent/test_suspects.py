"""Tests that the base of a suspected replica that continues to run is verified at once."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from replica.agent.artifacts.library import Library
from replica.agent.artifacts.suspects import SuspectReader
from sluice.manifests import manifest_of_directory
from sluice.wire.agent.v1 import agent_pb2 as agent


def put_base(root: Path, text: str) -> str:
    """Add a base to the folder, under the digest of its content."""
    folder = root / "new"
    folder.mkdir(parents=True)
    (folder / "weights").write_text(text)
    digest = manifest_of_directory(folder).digest
    folder.rename(root / digest)
    return digest


def rot(weights: Path) -> None:
    """Change a byte, but neither size nor time of modification, like a faulty disk."""
    status = weights.stat()
    weights.write_bytes(b"y" + weights.read_bytes()[1:])
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))


def desired(base: str, suspected_at_unix_ms: int = 0, **fields: bool) -> agent.SyncResponse:
    replica = agent.DesiredReplica(
        replica_id="one", base_digest=base, suspected_at_unix_ms=suspected_at_unix_ms, **fields
    )
    return agent.SyncResponse(replicas=[replica])


class Reads(Library):
    """A library that records which artifacts it reads completely."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, max_bytes=0, reserve_bytes=0)
        self.read: asyncio.Queue[str] = asyncio.Queue()

    async def _verify(self, digest: str) -> str:
        problem = await super()._verify(digest)
        self.read.put_nowait(digest)
        return problem


async def first(queue: asyncio.Queue[str]) -> str:
    async with asyncio.timeout(20):
        return await queue.get()


@asynccontextmanager
async def reading(root: Path) -> AsyncIterator[tuple[Reads, SuspectReader, asyncio.Queue[str]]]:
    library, spoiled = Reads(root), asyncio.Queue[str]()
    reader = SuspectReader(library, lambda digest, _: spoiled.put_nowait(digest))
    await library.scan()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(reader.run())
        yield library, reader, spoiled
        task.cancel()


async def test_a_spoiled_base_is_told_and_moved_away(tmp_path: Path) -> None:
    base, sound = put_base(tmp_path, "weights"), put_base(tmp_path, "others")
    async with reading(tmp_path) as (library, reader, spoiled):
        assert await library.problem_of(base) == ""
        rot(tmp_path / base / "weights")
        reader.follow(desired(base))
        reader.follow(desired(sound, 1))
        reader.follow(desired(base, 2))
        assert await first(spoiled) == base
        assert spoiled.empty()
        assert not library.has(base), "so that it is fetched anew"
        assert library.has(sound)


async def test_a_suspicion_is_looked_into_once(tmp_path: Path) -> None:
    base = put_base(tmp_path, "weights")
    async with reading(tmp_path) as (library, reader, spoiled):
        for at_unix_ms in (5, 6):
            for _ in range(3):
                reader.follow(desired(base, at_unix_ms))
                reader.follow(desired(base))
            assert await first(library.read) == base
        await asyncio.sleep(0.05)
        assert library.read.empty()
        assert spoiled.empty()


async def test_a_quarantined_replicas_base_is_read_before_its_next_use(tmp_path: Path) -> None:
    base = put_base(tmp_path, "weights")
    async with reading(tmp_path) as (library, reader, spoiled):
        assert await library.problem_of(base) == ""
        rot(tmp_path / base / "weights")
        reader.follow(desired(base, is_quarantined=True))
        await asyncio.sleep(0)
        assert spoiled.empty()
        assert "damaged" in await library.problem_of(base)


async def test_a_disk_that_cannot_be_read_ends_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = put_base(tmp_path, "weights")

    def unreadable(_: Path) -> None:
        raise OSError("an input/output error")

    monkeypatch.setattr("replica.agent.artifacts.library.manifest_of_directory", unreadable)
    async with reading(tmp_path) as (library, reader, spoiled):
        reader.follow(desired(base, 1))
        assert await first(library.read) == base
        await asyncio.sleep(0.05)
        assert spoiled.empty()
        assert library.has(base)
