"""Threads that tokenize large prompts, so that neither the event loop nor other owners wait long.

Tokenizing takes 0.5 ms per KB and needs no interpreter lock: it has threads of its own at a low
priority. All other work on a prompt needs the lock, and runs at the loop's own priority: a
low-priority thread that holds the lock would make the loop wait as well.

Limits are checked once the tokens of a prompt are known, so they cannot keep a tenant from sending
too many prompts. Hence owners of prompts take turns: an owner with many prompts delays only its
own. A turn is a slice of a long prompt, some 60 ms. A word too long for a slice has a thread and
turns aside, so that it delays other such words alone.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import structlog

from gateway.bases.slices import Steps
from gateway.stopping import stopping

log = structlog.get_logger(__name__)

_THREADS = 2
_Made = TypeVar("_Made")
_NICENESS = 10  # a tenth of a processor is left to it where the loop wants all of that


def tokenizing_threads(processors: int) -> int:
    """Return the number of prompts tokenized at once; one processor is left for other work."""
    return max(1, min(_THREADS, processors - 1))


class Turns:
    """A few places that owners get in turn; used on one event loop."""

    def __init__(self, places: int) -> None:
        """Start without waiting owners."""
        self._free = places
        # In the order of their turns, each with its own in the order of their coming.
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        self._is_stopping = False

    @property
    def waiting(self) -> int:
        """Number of waiting prompts."""
        return sum(map(len, self._waiting.values()))

    async def take(self, owner: str) -> None:
        """Wait for a place; call `give_back` afterwards, unless this call is cancelled.

        Raises:
            RejectedError: DRAINING, after `stop_all`.
        """
        if self._is_stopping:
            raise stopping()
        if self._free:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {})[place] = None
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._forget(owner, place)
            elif place.exception() is None:
                self.give_back()
            raise

    def give_back(self) -> None:
        """Let the next one have the place."""
        while self._waiting:
            owner, places = next(iter(self._waiting.items()))
            place = next(iter(places))
            self._forget(owner, place)
            if place.done():
                continue  # its client has left in this moment
            if places:
                self._waiting[owner] = self._waiting.pop(owner)
            place.set_result(None)
            return
        self._free += 1

    def stop_all(self) -> None:
        """Refuse all waiting and later owners."""
        self._is_stopping = True
        for places in self._waiting.values():
            for place in places:
                if not place.done():
                    place.set_exception(stopping())
        self._waiting.clear()

    def _forget(self, owner: str, place: asyncio.Future[None]) -> None:
        places = self._waiting.get(owner, {})
        places.pop(place, None)
        if not places:
            self._waiting.pop(owner, None)


class PromptThreads:
    """Threads for the prompts of one process, and its event loop.

    Attributes:
        usual: Threads for work under the interpreter lock; they may wait for `tokenizing`, never
            the reverse.
        tokenizing: Threads for work without the interpreter lock.
    """

    def __init__(self) -> None:
        self._turns, self._turns_aside = Turns(_THREADS), Turns(1)
        processors = len(os.sched_getaffinity(0))
        self.usual: Executor = ThreadPoolExecutor(_THREADS, "prompts")
        self.tokenizing: Executor = ThreadPoolExecutor(
            tokenizing_threads(processors), "tokenizing", initializer=_step_back
        )
        self._aside: Executor = ThreadPoolExecutor(1, "long words", initializer=_step_back)

    async def run(self, owner: str, make: Callable[[], _Made]) -> _Made:
        """Return the result of a function that runs in a thread of `usual`, at the owner's turn.

        Raises:
            RejectedError: DRAINING, after `stop_all`.
        """
        return await _run(self._turns, self.usual, owner, make)

    async def run_steps(self, owner: str, steps: Steps[_Made]) -> _Made:
        """Return the result of a series of steps, each of which waits for the owner's turn.

        Raises:
            RejectedError: DRAINING, after `stop_all`.
        """
        made: object = None
        while True:
            work = await self.run(owner, partial(_work_after_step, steps, made))
            if isinstance(work, StopIteration):
                return work.value
            made = None if work is None else await self._run_aside(owner, work)

    async def _run_aside(self, owner: str, work: Callable[[], Any]) -> object:
        return await _run(self._turns_aside, self._aside, owner, work)

    def stop_all(self) -> None:
        """Refuse waiting and later prompts."""
        self._turns.stop_all()
        self._turns_aside.stop_all()

    def close(self) -> None:
        """End the threads after their present prompts; blocks. Call no other method afterwards."""
        self.usual.shutdown(cancel_futures=True)
        self.tokenizing.shutdown()
        self._aside.shutdown()


async def _run(turns: Turns, threads: Executor, owner: str, make: Callable[[], _Made]) -> _Made:
    loop = asyncio.get_running_loop()
    await turns.take(owner)
    try:
        work = threads.submit(make)
    except RuntimeError:
        turns.give_back()
        raise
    # A caller that leaves now leaves the thread at work: its place is free when that ends.
    work.add_done_callback(lambda _: loop.call_soon_threadsafe(turns.give_back))
    return await asyncio.wrap_future(work)


def _work_after_step(steps: Steps[Any], made: object) -> StopIteration | Callable[[], Any] | None:
    """Take one step of a generator; return its result once it has ended.

    Otherwise the work that the next step waits for, and None if there is no such work.
    """
    try:
        return steps.send(made)
    except StopIteration as end:
        return end


def _step_back() -> None:
    """Lower the priority of this thread alone; for Linux a thread has a priority of its own."""
    thread = threading.get_native_id()
    try:
        usual = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, usual + _NICENESS)
    except OSError as error:  # a sandbox that forbids it: prompts are answered all the same
        log.warning("priority_not_lowered", error=str(error))
