"""What a worker has loaded of its bases, and what it says of those that it has not."""

import asyncio
from pathlib import Path
from threading import Event

import pytest
from structlog.testing import capture_logs

from gateway.bases import cache as module
from gateway.bases.cache import BaseCache
from sluice.errors import RejectedError

HERE = Path("/bases/here")


class Disk:
    """Where bases lie, and what reading them comes to."""

    def __init__(self) -> None:
        self.problem: Exception | None = None
        self.unreadable: Exception | None = None
        self.missed: list[str] = []
        self.cache = BaseCache(self.find, self.load, self.missed.append)

    def find(self, _: str) -> Path:
        if self.problem is not None:
            raise self.problem
        return HERE

    def load(self, directory: Path) -> str:
        if self.unreadable is not None:
            raise self.unreadable
        return str(directory)

    async def is_refused(self) -> bool:
        try:
            await self.cache.get("d")
        except RejectedError as error:
            assert (error.status, error.code) == (503, "unavailable")
            assert error.retry_after_s
            return True
        return False


async def test_a_base_that_is_not_here_is_asked_for_and_is_read_as_soon_as_it_comes() -> None:
    disk = Disk()
    disk.problem = FileNotFoundError("no")
    assert await disk.is_refused()
    await asyncio.sleep(0)  # Python 3.14 tells the waiting request before the cache
    assert (disk.missed, disk.cache.has("d")) == (["d"], False)
    disk.problem = None
    disk.cache.refresh("d")
    assert await disk.cache.get("d") == str(HERE)
    assert disk.cache.has("d")
    disk.cache.keep_only({"other"})
    assert not disk.cache.has("d")


@pytest.mark.parametrize("is_found", [False, True])
async def test_an_unreadable_base_is_reported_once(monkeypatch, is_found: bool) -> None:
    monkeypatch.setattr(module, "_RETRY_LOAD_S", 0.0)
    disk = Disk()
    if is_found:
        disk.unreadable = ValueError("no template")
    else:
        disk.problem = PermissionError("closed")
    with capture_logs() as logs:
        assert [await disk.is_refused() for _ in range(3)] == [True] * 3
        disk.problem = disk.unreadable = OSError("the disk")
        assert await disk.is_refused()
    assert [it["event"] for it in logs] == ["base_not_loaded"] * 2
    assert disk.missed == []
    disk.problem = disk.unreadable = None
    assert not await disk.is_refused()


class Gate(Disk):
    """A base that is looked for as long as this is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.looks = Event(), 0
        self.started = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def find(self, digest: str) -> Path:
        self.looks += 1
        self._loop.call_soon_threadsafe(self.started.set)
        self.opened.wait(30)
        return super().find(digest)


async def test_a_caller_that_leaves_during_a_load_takes_it_from_no_other() -> None:
    gate = Gate()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(gate.cache.get("d"))
        await gate.started.wait()
        second = tasks.create_task(gate.cache.get("d"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        third = tasks.create_task(gate.cache.get("d"))
        await asyncio.sleep(0)
        gate.opened.set()
    assert (await second, await third, gate.looks) == (str(HERE), str(HERE), 1)


async def test_a_base_loaded_for_no_caller_is_kept() -> None:
    gate = Gate()
    async with asyncio.TaskGroup() as tasks:
        only = tasks.create_task(gate.cache.get("d"))
        await gate.started.wait()
        only.cancel()
        await asyncio.wait([only])
        gate.opened.set()
    assert (await gate.cache.get("d"), gate.looks) == (str(HERE), 1)


async def test_a_bug_in_a_load_is_seen_and_the_next_load_goes_on() -> None:
    disk = Disk()
    disk.unreadable = KeyError("bug")
    with pytest.raises(KeyError):
        await disk.cache.get("d")
    disk.unreadable = None
    assert await disk.cache.get("e") == str(HERE)
    assert await disk.is_refused()


async def test_a_base_that_arrives_while_its_absence_is_noted_is_read_at_once() -> None:
    gate = Gate()
    gate.problem = FileNotFoundError("no")
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(gate.is_refused())
        await gate.started.wait()
        gate.cache.refresh("d")
        gate.opened.set()
    assert await asked
    gate.problem = None
    assert await gate.cache.get("d") == str(HERE)
