"""The threads that large prompts are worked on in, so that neither the loop nor others wait long.

Tokenizing takes 0.5 ms per KB and needs no interpreter lock: it has threads of its own, which step
back when others want the processor. Everything else about a prompt needs the lock, and is done at
the loop's own priority: a thread that steps back with the lock in hand makes the loop wait as well.

Limits are checked when the tokens of a prompt are known, so they do not keep a tenant from sending
more prompts than there is room for. Hence owners of prompts take turns: each waits for its own. A
turn is a slice of a long prompt, some 30 ms.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import structlog

from gateway.bases.slices import Steps
from gateway.stopping import stopping

log = structlog.get_logger(__name__)

_THREADS = 2
_Made = TypeVar("_Made")
_NICENESS = 10  # a tenth of a processor is left to it where the loop wants all of that


def tokenizing_threads(processors: int) -> int:
    """Return how many prompts are tokenized at once: one processor is left to others."""
    return max(1, min(_THREADS, processors - 1))


class Turns:
    """A few places, which owners get in turn; of one event loop."""

    def __init__(self, places: int) -> None:
        """Start with nobody."""
        self._free = places
        # In the order of their turns, each with its own in the order of their coming.
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        self._is_stopping = False

    @property
    def waiting(self) -> int:
        """How many do."""
        return sum(map(len, self._waiting.values()))

    async def take(self, owner: str) -> None:
        """Wait for a place; `give_back` follows, unless this is cancelled.

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
        """Refuse those who wait, and whoever comes."""
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
        usual: Threads for work under the interpreter lock; may wait for `tokenizing`, never the
            other way.
        tokenizing: Threads for work without the interpreter lock.
    """

    def __init__(self) -> None:
        self._turns = Turns(_THREADS)
        processors = len(os.sched_getaffinity(0))
        self.usual: Executor = ThreadPoolExecutor(_THREADS, "prompts")
        self.tokenizing: Executor = ThreadPoolExecutor(
            tokenizing_threads(processors), "tokenizing", initializer=_step_back
        )

    async def run(self, owner: str, make: Callable[[], _Made]) -> _Made:
        """Return what is made in a thread of `usual`, when it is the owner's turn.

        Raises:
            RejectedError: DRAINING, after `stop_all`.
        """
        loop, turns = asyncio.get_running_loop(), self._turns
        await turns.take(owner)
        try:
            work = self.usual.submit(make)
        except RuntimeError:
            turns.give_back()
            raise
        # A caller that leaves now leaves the thread at work: its place is free when that ends.
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(turns.give_back))
        return await asyncio.wrap_future(work)

    async def run_steps(self, owner: str, steps: Steps[_Made]) -> _Made:
        """Return what comes of steps, each of which has to wait for the owner's turn.

        Raises:
            RejectedError: DRAINING, after `stop_all`.
        """
        while (end := await self.run(owner, partial(_end_after_step, steps))) is None:
            pass
        return end.value

    def stop_all(self) -> None:
        """Refuse prompts whose turn has not come, and whatever comes."""
        self._turns.stop_all()

    def close(self) -> None:
        """End the threads, after the prompts that they are at; blocks. Nothing is asked then."""
        self.usual.shutdown(cancel_futures=True)
        self.tokenizing.shutdown()


def _end_after_step(steps: Steps[_Made]) -> StopIteration | None:
    """Do one step; return the end of the steps with their value, or None before it."""
    try:
        next(steps)
    except StopIteration as end:
        return end
    return None


def _step_back() -> None:
    """Lower the priority of this thread alone, which Linux takes for a process here."""
    thread = threading.get_native_id()
    try:
        usual = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, usual + _NICENESS)
    except OSError as error:  # a sandbox that forbids it: prompts are answered all the same
        log.warning("priority_not_lowered", error=str(error))
