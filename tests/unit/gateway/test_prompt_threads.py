"""Whoever tokenizes a large prompt steps back for others; whoever holds the lock does not."""

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.bases.encoder import PromptEncoder
from gateway.bases.threads import PromptThreads, tokenizing_threads

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


def test_where_nobody_may_step_back_prompts_are_tokenized(
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
    there = threads.usual.submit(encoder.encode, [text], b"a", threads.tokenizing).result(10)
    assert list(there) == list(encoder.encode([text], b"b")) == SHIPPED.encode(text).ids
    whole = encoder.encode_whole(text, threads.tokenizing)
    assert list(whole) == list(encoder.encode_whole(text))
    assert [name.split("_")[0] for name in tokenizer.asked_in] == [
        "tokenizing",
        "MainThread",
        "tokenizing",
        "MainThread",
    ]


async def test_who_sends_many_large_prompts_makes_others_wait_for_one_each(
    threads: PromptThreads,
) -> None:
    may_go, made = threading.Event(), list[str]()

    def work(name: str) -> None:
        may_go.wait(30)
        made.append(name)

    async with asyncio.TaskGroup() as tasks:
        names = [*(f"many {number}" for number in range(8)), "left", "other", "third"]
        calls = {
            name: tasks.create_task(threads.run(name.split()[0].encode(), partial(work, name)))
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
    assert await threads.run(b"many", lambda: "places are free again")
