"""Bases that are not here are fetched: once per machine, again after failures, verified."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.bases import fetcher as module
from gateway.bases.fetcher import BaseFetcher
from gateway.bases.shelf import BaseShelf
from gateway.bases.source import BaseFetchError

A, B = "a" * 64, "b" * 64
FILES = {"tokenizer.json": b"{}"}
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    for name in ("_FIRST_SPREAD_S", "_BACKOFF_FIRST_S", "_BACKOFF_MAX_S", "_BUSY_PAUSE_S"):
        monkeypatch.setattr(module, name, 0.001)


class Worker:
    """A fetcher, what it asked for and what it told."""

    def __init__(self, root: Path, fetch: Callable[[str], Awaitable[dict[str, bytes]]]) -> None:
        self.asked: list[str] = []
        self.came: dict[str, asyncio.Event] = {A: asyncio.Event(), B: asyncio.Event()}
        self.results: Counter[str] = Counter()

        async def noted(digest: str) -> dict[str, bytes]:
            self.asked.append(digest)
            return await fetch(digest)

        self.fetcher = BaseFetcher(
            root / "artifacts",
            BaseShelf(root / "bases", 1 << 20),
            noted,
            on_arrival=lambda digest: self.came[digest].set(),
            count=lambda result: self.results.update([result]),
        )

    async def wait(self, digest: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.came[digest].wait()


@asynccontextmanager
async def running(*workers: Worker) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(worker.fetcher.run()) for worker in workers]
        yield
        for task in running:
            task.cancel()


async def at_once(_: str) -> dict[str, bytes]:
    return FILES


async def test_a_wanted_base_is_fetched(tmp_path) -> None:
    worker = Worker(tmp_path, at_once)
    async with running(worker):
        worker.fetcher.want(A)
        worker.fetcher.want(A)
        await worker.wait(A)
    assert (worker.fetcher.find(A) / "tokenizer.json").read_bytes() == b"{}"
    assert (worker.asked, worker.fetcher.wanted) == ([A], 0)
    assert worker.results == {"fetched": 1}


async def test_whole_artifacts_of_the_machine_come_first(tmp_path) -> None:
    worker = Worker(tmp_path, at_once)
    (tmp_path / "artifacts" / A).mkdir(parents=True)
    assert worker.fetcher.find(A) == tmp_path / "artifacts" / A
    async with running(worker):
        worker.fetcher.want(A)  # it came in this moment
        await worker.wait(A)
    assert worker.asked == []


async def test_one_that_fails_is_tried_again_and_holds_up_no_other(tmp_path) -> None:
    failures = 3

    async def fetch(digest: str) -> dict[str, bytes]:
        nonlocal failures
        if digest == A and failures:
            failures -= 1
            raise BaseFetchError("away")
        return FILES

    worker = Worker(tmp_path, fetch)
    async with running(worker):
        worker.fetcher.want(A)
        worker.fetcher.want(B)
        await worker.wait(B)
        await worker.wait(A)
    assert worker.results == {"failed": 3, "fetched": 2}


async def test_workers_of_a_machine_fetch_once(tmp_path) -> None:
    go_on = asyncio.Event()

    async def fetch(_: str) -> dict[str, bytes]:
        await go_on.wait()
        return FILES

    workers = [Worker(tmp_path, fetch) for _ in range(3)]
    async with running(*workers):
        for worker in workers:
            worker.fetcher.want(A)
        async with asyncio.timeout(PATIENCE_S):
            while not any(worker.asked for worker in workers):  # noqa: ASYNC110 - no event of it
                await asyncio.sleep(0)
        go_on.set()
        for worker in workers:
            await worker.wait(A)
    assert sum(len(worker.asked) for worker in workers) == 1


async def test_a_base_that_no_longer_exists_is_given_up(tmp_path) -> None:
    async def fetch(_: str) -> dict[str, bytes]:
        raise BaseFetchError("nobody has it")

    worker = Worker(tmp_path, fetch)
    async with running(worker):
        worker.fetcher.want(A)
        async with asyncio.timeout(PATIENCE_S):
            while not worker.asked:  # noqa: ASYNC110 - there is no event of it
                await asyncio.sleep(0)
        worker.fetcher.keep_only({B})
        assert worker.fetcher.wanted == 0
