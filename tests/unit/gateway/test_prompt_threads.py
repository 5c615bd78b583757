"""Whoever tokenizes a large prompt steps back for others; whoever holds the lock does not."""

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.bases.encoder import PromptEncoder
from gateway.bases.slices import Steps, finished
from gateway.bases.threads import PromptThreads, Turns, tokenizing_threads
from sluice.errors import ErrorCode, RejectedError

SHIPPED = Tokenizer.from_file(str(Path(__file__).parents[3] / "model_repo/default/tokenizer.json"))


@pytest.fixture
def threads() -> Iterator[PromptThreads]:
    with closing(PromptThreads()) as threads:
        yield threads


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def niceness_in(executor: Executor) -> int:
    return executor.submit(niceness).result(10)


def test_only_threads_without_the_lock_step_back(threads: PromptThreads) -> None:
    own = niceness()
    assert niceness_in(threads.tokenizing) == min(19, own + 10)
    assert niceness_in(threads.usual) == niceness() == own


def test_without_an_interruptible_thread_prompts_are_still_tokenized(
    threads: PromptThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert niceness_in(threads.tokenizing) == niceness()


@pytest.mark.parametrize(("processors", "wanted"), [(1, 1), (2, 1), (3, 2), (64, 2)])
def test_one_processor_is_left_to_others(processors: int, wanted: int) -> None:
    assert tokenizing_threads(processors) == wanted


class Noting:
    """The shipped tokenizer, that notes the threads it is asked in."""

    def __init__(self) -> None:
        self.asked_in: list[str] = []

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
        self.asked_in.append(threading.current_thread().name)
        return SHIPPED.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(SHIPPED, name)


def test_a_prompt_is_tokenized_where_it_was_said(threads: PromptThreads) -> None:
    tokenizer: Any = Noting()
    encoder = PromptEncoder(tokenizer)
    text = "<|im_start|>user\nhi"
    there = threads.usual.submit(finished, encoder.encode([text], b"a", threads.tokenizing)).result(
        10
    )
    assert list(there) == list(finished(encoder.encode([text], b"b"))) == SHIPPED.encode(text).ids
    whole = finished(encoder.encode_whole(text, threads.tokenizing))
    assert list(whole) == list(finished(encoder.encode_whole(text)))
    assert [name.split("_")[0] for name in tokenizer.asked_in] == [
        "tokenizing",
        "MainThread",
        "tokenizing",
        "MainThread",
    ]


async def test_many_large_prompts_of_one_caller_delay_others_by_one_each(
    threads: PromptThreads,
) -> None:
    may_go, made = threading.Event(), list[str]()

    def work(name: str) -> None:
        may_go.wait(30)
        made.append(name)

    async with asyncio.TaskGroup() as tasks:
        names = [*(f"many {number}" for number in range(8)), "left", "other", "third"]
        calls = {
            name: tasks.create_task(threads.run(name.partition(" ")[0], partial(work, name)))
            for name in names
        }
        await asyncio.sleep(0)
        calls["left"].cancel()
        calls["many 7"].cancel()
        await asyncio.sleep(0)
        may_go.set()
    assert sorted(made) == sorted(set(names) - {"left", "many 7"})
    # Two have begun, one is next already, and of two threads either may note first.
    assert max(made.index("other"), made.index("third")) <= 6
    assert await threads.run("many", lambda: "places are free again")


class CountingExecutor(ThreadPoolExecutor):
    submitted = 0

    def submit(self, *work: Any, **options: Any) -> Future[Any]:
        self.submitted += 1
        return super().submit(*work, **options)


async def test_a_caller_that_left_during_work_keeps_its_place_until_the_thread_is_free(
    threads: PromptThreads,
) -> None:
    """Else what comes next waits behind it for a thread, where nobody has turns."""
    threads.usual.shutdown()
    threads.usual = executor = CountingExecutor(2)
    may_go, begun = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        begun.release()
        may_go.wait(30)

    async with asyncio.TaskGroup() as tasks:
        left = [tasks.create_task(threads.run("one", work)) for _ in range(2)]
        await asyncio.to_thread(lambda: [begun.acquire(timeout=30) for _ in left])
        for call in left:
            call.cancel()
        await asyncio.wait(left)
        late = tasks.create_task(threads.run("two", may_go.is_set))
        for _ in range(3):
            await asyncio.sleep(0)
        assert executor.submitted == 2
        may_go.set()
        assert await late


async def test_a_thread_that_cannot_be_had_costs_no_place(threads: PromptThreads) -> None:
    usual, threads.usual = threads.usual, ThreadPoolExecutor()
    threads.usual.shutdown()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            await threads.run("one", int)
    threads.usual = usual
    assert await threads.run("one", int) == 0


async def test_prompts_waiting_at_the_stop_get_an_error(threads: PromptThreads) -> None:
    may_go = threading.Event()
    async with asyncio.TaskGroup() as tasks:
        at_work = [tasks.create_task(threads.run("one", may_go.wait)) for _ in range(2)]
        waiting = [tasks.create_task(refusal(threads, owner)) for owner in ("one", "two")]
        left = tasks.create_task(refusal(threads, "two"))
        await asyncio.sleep(0)
        left.cancel()
        threads.stop_all()
        assert await asyncio.gather(*waiting) == [ErrorCode.DRAINING] * 2
        may_go.set()
        assert await asyncio.gather(*at_work) == [True, True], "two seconds are theirs"
        assert await refusal(threads, "one") == ErrorCode.DRAINING


async def refusal(threads: PromptThreads, owner: str) -> ErrorCode:
    with pytest.raises(RejectedError) as caught:
        await threads.run(owner, int)
    return caught.value.code


class Asker:
    """Wants a place for its owner, and keeps it until told."""

    def __init__(self, turns: Turns, owner: str) -> None:
        self.owner = owner
        self.has_place = False
        self.may_go = asyncio.Event()
        self._turns = turns

    async def run(self) -> None:
        await self._turns.take(self.owner)
        self.has_place = True
        try:
            await self.may_go.wait()
        finally:
            self.has_place = False
            self._turns.give_back()


CHURN = st.lists(
    st.tuples(st.sampled_from(["ask", "go", "leave", "settle"]), st.integers(0, 30)), max_size=60
)


@given(CHURN, st.integers(1, 3))
async def test_places_are_given_in_turn_when_callers_leave(
    steps: list[tuple[str, int]], places: int
) -> None:
    turns, open_ = Turns(places), list[tuple[Asker, asyncio.Task[None]]]()
    async with asyncio.TaskGroup() as tasks:
        for step, number in [*steps, ("settle", 0)]:
            if step == "ask":
                asker = Asker(turns, f"owner {number % 4}")
                open_.append((asker, tasks.create_task(asker.run())))
            elif open_ and step != "settle":
                asker, task = open_[number % len(open_)]
                asker.may_go.set() if step == "go" else task.cancel()
            if step != "settle":
                continue
            for _ in range(6):
                await asyncio.sleep(0)
            open_ = [it for it in open_ if not it[1].done()]
            holding = sum(asker.has_place for asker, _ in open_)
            assert holding == min(places, len(open_)), "nobody waits while one is free"
            waiting = [asker for asker, _ in open_ if not asker.has_place]
            assert turns.waiting == len(waiting), "who left is forgotten"
        for asker, _ in open_:
            asker.may_go.set()
    assert turns.waiting == 0


async def test_long_work_gives_way_after_each_step(threads: PromptThreads) -> None:
    done: list[str] = []

    def steps_of(owner: str, steps: int) -> Steps[str]:
        for _ in range(steps):
            done.append(owner)
            yield
        return owner

    async with asyncio.TaskGroup() as tasks:
        long = [tasks.create_task(threads.run_steps("long", steps_of("long", 50))) for _ in "abc"]
        await asyncio.sleep(0)
        short = tasks.create_task(threads.run_steps("short", steps_of("short", 1)))
        await short
        assert not any(task.done() for task in long)
    assert [task.result() for task in long] == ["long"] * 3
    # Two steps are at work when it comes; from then on owners alternate.
    assert done.index("short") <= 4


async def test_work_aside_holds_no_turn_of_others(threads: PromptThreads) -> None:
    may_end = threading.Event()

    def long_word() -> Steps[object]:
        return (yield partial(may_end.wait, 60.0))

    def steps() -> Steps[str]:
        yield
        return "done"

    async with asyncio.TaskGroup() as tasks:
        long = [tasks.create_task(threads.run_steps(it, long_word())) for it in "abcd"]
        await asyncio.sleep(0)
        for owner in ("other", "another", "a"):
            assert await threads.run_steps(owner, steps()) == "done"
        assert not any(it.done() for it in long)
        may_end.set()
    assert all(it.result() is True for it in long)
