"""Threads that tokenize large prompts, so that neither the event loop nor other owners wait long.

Tokenizing takes 0.5 ms per KB and does not need the interpreter lock. So it runs in separate
threads of low priority. All other work on a prompt needs the lock and runs at the event loop's own
priority. A low-priority thread that holds the lock would delay the event loop.

Token limits are checked only after tokenizing, so a tenant can send too many prompts. Therefore the
threads alternate between the owners of prompts, and an owner with many prompts delays only its own
prompts. A turn is a slice of a long prompt, about 60 ms. A word that is longer than a slice has a
separate thread and queue, so that it delays only other words of this length.
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
# Niceness added to tokenizing threads, so that a busy event loop has ten times their share of time.
_NICENESS = 10


def tokenizing_threads(processors: int) -> int:
    """Return the number of threads that tokenize, which leaves one processor free if possible."""
    return max(1, min(_THREADS, processors - 1))


class Turns:
    """A semaphore that alternates between waiting owners. Only one event loop uses it."""

    def __init__(self, places: int) -> None:
        """Start with `places` free places and no waiting owner."""
        self._free = places
        # Waiting prompts by owner, in the order of the owners' turns and of the prompts' arrival.
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        self._is_stopping = False

    @property
    def waiting(self) -> int:
        """Number of waiting prompts."""
        return sum(map(len, self._waiting.values()))

    async def take(self, owner: str) -> None:
        """Acquire a place. Unless this call raises, `give_back` must be called for the place.

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
        """Release a place to the owner with the next turn."""
        while self._waiting:
            owner, places = next(iter(self._waiting.items()))
            place = next(iter(places))
            self._forget(owner, place)
            if place.done():
                continue  # the waiting request has just been cancelled
            if places:
                self._waiting[owner] = self._waiting.pop(owner)
            place.set_result(None)
            return
        self._free += 1

    def stop_all(self) -> None:
        """Refuse all waiting owners, and all owners from now on."""
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
    """Threads that process the prompts of one process, which has one event loop.

    Attributes:
        usual: Threads for work under the interpreter lock. They may wait for a thread of
            `tokenizing`, which never waits for them.
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
        """Run a function in a thread of `usual` at the owner's turn, and return its result.

        Raises:
            RejectedError: DRAINING, after `stop_all`.
        """
        return await _run(self._turns, self.usual, owner, make)

    async def run_steps(self, owner: str, steps: Steps[_Made]) -> _Made:
        """Run a series of steps, each at a turn of the owner, and return their result.

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
        """Refuse all waiting prompts, and all prompts from now on."""
        self._turns.stop_all()
        self._turns_aside.stop_all()

    def close(self) -> None:
        """End the threads after their current prompts. The call blocks and must be the last."""
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
    # If the caller is cancelled, the thread continues. So the place is released when the work ends.
    work.add_done_callback(lambda _: loop.call_soon_threadsafe(turns.give_back))
    return await asyncio.wrap_future(work)


def _work_after_step(steps: Steps[Any], made: object) -> StopIteration | Callable[[], Any] | None:
    """Run one step of a generator.

    Returns:
        StopIteration with the generator's result if this was the last step. Otherwise the work
            that the next step needs, or None if it needs no work.
    """
    try:
        return steps.send(made)
    except StopIteration as end:
        return end


def _step_back() -> None:
    """Lower the priority of the current thread only, since Linux has a priority per thread."""
    thread = threading.get_native_id()
    try:
        usual = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, usual + _NICENESS)
    # Some container sandboxes forbid the change, and then the thread keeps its full priority.
    except OSError as error:
        log.warning("priority_not_lowered", error=str(error))
