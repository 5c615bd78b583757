"""Gets generations answered: finds a router, and goes on elsewhere when one is lost.

The gateway holds prompt and emitted ids. When a replica, a router or the connection is lost, what
is left is submitted again: the client sees a pause, and not one token twice or missing.
"""

import asyncio
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Coroutine, Sequence
from contextlib import suppress

import structlog

from gateway.dispatch.asker import Asker
from gateway.dispatch.generation import Ending, EndKind, Generation
from gateway.dispatch.retry_budget import RetryBudget
from gateway.dispatch.router_link import RouterLink
from gateway.dispatch.routers import Found, Home, RouterLinks
from gateway.dispatch.several import SeveralAnswers
from gateway.stopping import STOPPING_RETRY_S, STOPPING_TEXT
from sluice.errors import ErrorCode

log = structlog.get_logger(__name__)

RESUMES_MAX = 2
# A begun answer waits for somebody to go on with it as long as it had until its first token: the
# restart of a pool's only replica is a pause to all alike. Not less than this, because a short
# deadline is about answers that have not begun; and not more, because a long one is for the queue,
# while this holds what a client has been sent a part of, at each loss anew.
_RESUME_WAIT_MIN_S, _RESUME_WAIT_MAX_S = 10.0, 60.0
_CONNECT_WAIT_S = 2.0  # how long a new request waits for a router: one reconnection
_DEADLINE_S = 30.0  # until the first token, for tiers without their own; the router's default
_GRACE_S = 2.0  # the router decides about deadlines; beyond this it does not answer at all
_RETRY_PAUSE_S = 0.1
_RETRY_PAUSE_MAX_S = 1.0  # after refusals, twice as long each time: it may be asked for long
_HOME_WAIT_S = 0.5  # for the next owner of a cell whose router is lost

_SUCCESS = (EndKind.STOP, EndKind.LENGTH)
_STOPPING = Ending(EndKind.REFUSED, ErrorCode.DRAINING, STOPPING_TEXT)
_DRAINING = Ending(EndKind.REFUSED, ErrorCode.DRAINING, STOPPING_TEXT, STOPPING_RETRY_S)
_NOBODY = Ending(
    EndKind.REFUSED, ErrorCode.NO_CAPACITY, "No router serves this model at the moment.", 2.0
)
_NO_TOKEN = Ending(
    EndKind.REFUSED, ErrorCode.DEADLINE_EXCEEDED, "No token came before the deadline.", 2.0
)


class Dispatcher:
    """Runs generations over the router links."""

    def __init__(self, links: RouterLinks) -> None:
        """Prepare."""
        self._links = links
        self._retries = RetryBudget()
        self._open: set[Generation] = set()
        self._is_stopping = False
        self._idle = asyncio.Event()
        self.is_draining = False

    @property
    def open(self) -> int:
        """How many generations run."""
        return len(self._open)

    @property
    def retries_refused(self) -> int:
        """How many retries were refused because too much was tried again already."""
        return self._retries.refused

    def serves(self, pool_id: str) -> bool:
        """Return whether a replica of the pool takes requests."""
        return self._links.serves(pool_id)

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new, wait for what runs; return how many are left when time is up."""
        self.is_draining = True
        if self._open:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
        return len(self._open)

    def stop_all(self) -> None:
        """End everything that still runs, and whatever comes: the process is about to exit."""
        self._is_stopping = True
        for generation in self._open:
            generation.end(_STOPPING)
        self._links.stop_waiting()

    def run_all(
        self, generations: Sequence[Generation], answers_per_prompt: int, asker: Asker
    ) -> Coroutine[None, None, Ending | None]:
        """Run the generations of one request; the first one that is refused ends the others.

        Args:
            generations: They are told everything; those of one prompt stand together.
            answers_per_prompt: How many those are.
            asker: Told of submissions, of the begin and of ends that are successes.

        Returns:
            The refusal, or None; to be awaited.
        """
        if self.is_draining:
            return _at_once(_DRAINING)
        if len(generations) > 1:
            return self._run_several(generations, answers_per_prompt, asker)
        return self._run(generations[0], asker)

    async def _run_several(
        self, generations: Sequence[Generation], answers_per_prompt: int, asker: Asker
    ) -> Ending | None:
        self._open.update(generations)  # also those that are not asked for yet
        try:
            return await SeveralAnswers(self._run, asker).run(generations, answers_per_prompt)
        finally:
            self._close(generations)

    async def _run(self, generation: Generation, asker: Asker) -> Ending | None:
        """Run a generation to its end; return the refusal, or None."""
        loop = asyncio.get_running_loop()
        patience = _Patience(generation, loop.time())
        self._open.add(generation)
        self._retries.opened(generation.spec.tenant_id)
        try:
            while True:
                submission = None
                if generation.begin_attempt() is None and not self._is_stopping:
                    submission = await self._begun(generation, asker, patience)
                if submission is not None:
                    try:
                        while generation.ending is None:
                            await generation.news()
                    finally:
                        submission.end()
                final = self._final(generation, patience, loop.time())
                if final is None:
                    await asyncio.sleep(patience.pause_s)
                elif final.kind is EndKind.REFUSED:
                    return final
                else:
                    asker.ended(generation, final)
                    return None
        finally:
            self._retries.closed(generation.spec.tenant_id)
            self._close((generation,))

    def _close(self, generations: Sequence[Generation]) -> None:
        self._open.difference_update(generations)
        if not self._open:
            self._idle.set()

    def _final(self, generation: Generation, patience: "_Patience", now_s: float) -> Ending | None:
        """Return STOP, LENGTH or REFUSED; None: the generation is tried again."""
        ending = generation.ending
        if ending is None or (self._is_stopping and ending.kind is EndKind.LOST):
            return _STOPPING
        if ending.kind in _SUCCESS or self._is_stopping:
            return ending
        if (refusal := patience.refusal(ending, now_s)) is not None:
            return refusal
        # A router that refuses has done nothing for it. One that says that replicas were lost has.
        is_free = ending.kind is EndKind.REFUSED and ending.code is not ErrorCode.REPLICA_LOST
        if not is_free and not self._retries.take(patience.tenant_id, now_s):
            return _refused(ending, ErrorCode.REPLICA_LOST)
        return None

    async def _begun(
        self, generation: Generation, asker: Asker, patience: "_Patience"
    ) -> "_Submission | None":
        """Submit to a router, and wait for the first tokens or the end; None: there is no router.

        Most of an answer is waited for without this, or without more coroutines: answers are many,
        and take long.
        """
        loop = asyncio.get_running_loop()
        patience.begin_attempt(loop.time())
        found = None
        if patience.home is None:
            found = self._links.find(generation.spec.pool_id, generation.spec.wish)
        if found is None:
            found = await self._awaited_router(generation, asker, patience)
        if found is None:
            generation.end(_NOBODY)  # or the process has ended it meanwhile
            return None
        link, patience.cell_id = found
        submission = _Submission(generation, link, patience, loop.time())
        timer = loop.call_at(patience.give_up_at_s + _GRACE_S, _give_up, generation)
        try:
            asker.submitted(patience.cell_id, link.router_id)
            while generation.is_fresh and generation.ending is None:
                await generation.news()
                _pass_on_nudge(generation, asker)
            if generation.emitted:
                asker.begun()
            generation.is_nudged = False  # the tokens are the sign
        except BaseException:
            submission.end()
            raise
        finally:
            timer.cancel()
        return submission

    async def _awaited_router(
        self, generation: Generation, asker: Asker, patience: "_Patience"
    ) -> Found | None:
        """Wait for a router as long as the request has patience; None: none has come."""
        spec = generation.spec
        search = self._links.acquire(spec.pool_id, spec.wish, patience.acquire_by_s, patience.home)
        try:
            async with asyncio.TaskGroup() as tasks:
                found = tasks.create_task(search)
                while not found.done() and generation.ending is None:
                    await asyncio.wait((found, generation.news()), return_when=FIRST_COMPLETED)
                    _pass_on_nudge(generation, asker)
                found.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the client has gone, or a bug
        return None if found.cancelled() else found.result()


def _pass_on_nudge(generation: Generation, asker: Asker) -> None:
    if generation.is_nudged:
        generation.is_nudged = False
        asker.begun()


async def _at_once(refusal: Ending) -> Ending:
    return refusal


class _Submission:
    """A generation that is with a router, until `end`."""

    __slots__ = ("_generation", "_handle", "_link")

    def __init__(
        self, generation: Generation, link: RouterLink, patience: "_Patience", now_s: float
    ) -> None:
        self._generation, self._link = generation, link
        left_ms = max(1, round((patience.give_up_at_s - now_s) * 1000))
        generation.begin_submission(patience.cell_id, link.router_id, time.monotonic())
        is_first = not patience.has_tried and not generation.spec.is_begun
        deadline_ms = generation.spec.deadline_ms if is_first else left_ms
        self._handle = link.submit(generation, patience.cell_id, deadline_ms)

    def end(self) -> None:
        """It has ended, or nobody wants it any more."""
        self._link.cancel(self._handle)  # nothing, when the router has said the end
        self._generation.end_submission(time.monotonic())


def _give_up(generation: Generation) -> None:
    if generation.is_fresh:
        generation.end(_NO_TOKEN)


class _Patience:
    """How long one request goes on trying, and after which endings.

    Attributes:
        give_up_at_s: Loop time; then the client is told.
        cell_id: Where the last attempt went; empty before.
        home: The cell to which a begun answer returns: its router was lost, others hold nothing
            of it and may be full, and a cell finds another router within a fraction of a second.
        pause_s: Before the next attempt.
    """

    __slots__ = (
        *("_attempts", "_began_at_s", "_connect_by_s", "_generation", "_is_resuming"),
        *("_next_pause_s", "_resume_wait_s", "cell_id", "give_up_at_s", "home", "pause_s"),
    )

    def __init__(self, generation: Generation, now_s: float) -> None:
        self._generation = generation
        self._connect_by_s = now_s + _CONNECT_WAIT_S
        self._attempts = 0
        self._began_at_s = now_s
        self._is_resuming = generation.spec.is_begun
        self.cell_id = ""
        self.home: Home | None = None
        self.pause_s = self._next_pause_s = _RETRY_PAUSE_S
        deadline_s = generation.spec.deadline_ms / 1000 or _DEADLINE_S
        self._resume_wait_s = min(max(deadline_s, _RESUME_WAIT_MIN_S), _RESUME_WAIT_MAX_S)
        self.give_up_at_s = now_s + (self._resume_wait_s if self._is_begun else deadline_s)

    @property
    def tenant_id(self) -> str:
        """Whose request it is."""
        return self._generation.spec.tenant_id

    @property
    def _is_begun(self) -> bool:
        """Whether the client has been given a part of the answer, or of one that it belongs to."""
        return bool(self._generation.emitted) or self._generation.spec.is_begun

    @property
    def has_tried(self) -> bool:
        """Whether this attempt is not the first."""
        return self._attempts > 1

    @property
    def acquire_by_s(self) -> float:
        """Until when a router is waited for."""
        if self._is_resuming:
            return self.give_up_at_s
        return min(self.give_up_at_s, self._connect_by_s)

    def begin_attempt(self, now_s: float) -> None:
        """Note that the request goes to a router."""
        self._attempts += 1
        self._began_at_s = now_s

    def refusal(self, ending: Ending, now_s: float) -> Ending | None:
        """Return what the client is told after an attempt that failed; None: it is tried again."""
        self.home = None
        until_s = self.give_up_at_s
        if ending.kind is EndKind.LOST:
            if self._is_lost_for_good(ending, now_s):
                return _refused(ending, ErrorCode.REPLICA_LOST)
            until_s = self.give_up_at_s
        elif not self._is_kept(ending):
            policy = ending.code.policy
            if not (policy.is_asked_again if self._is_begun else policy.moves):
                return ending
            if not self._is_begun:
                until_s = self._sent_on_until_s(now_s)
        left_s = until_s - _RETRY_PAUSE_S - now_s
        if left_s <= 0:
            if self._is_begun:
                return _refused(ending, ErrorCode.REPLICA_LOST)
            return _NO_TOKEN if ending.kind is EndKind.LOST else ending
        # What was lost together does not ask again together.
        spread = 1 - self._generation.spec.wish.salt % 1024 / 2048
        self.pause_s = min(self._next_pause_s * spread, left_s)
        if ending.kind is EndKind.REFUSED:
            self._next_pause_s = min(2 * self._next_pause_s, _RETRY_PAUSE_MAX_S)
        return None

    def _is_kept(self, ending: Ending) -> bool:
        """Return whether it waits on: another model cannot stand in any more (`absence_ms`)."""
        generation = self._generation
        is_let_go = ending.code is ErrorCode.NO_CAPACITY and generation.spec.absence_ms
        return bool(is_let_go) and generation.was_nudged

    def _is_lost_for_good(self, ending: Ending, now_s: float) -> bool:
        """Note a loss; return whether there were too many."""
        generation = self._generation
        if generation.emitted:
            if generation.resumes >= RESUMES_MAX:
                return True
            generation.resumes += 1
            if ending.code is ErrorCode.UNAVAILABLE:
                self.home = Home(self.cell_id, now_s + _HOME_WAIT_S)
            self.give_up_at_s = now_s + self._resume_wait_s
        self._is_resuming = True
        self._next_pause_s = _RETRY_PAUSE_S
        log.warning(
            "attempt_lost",
            request_id=generation.spec.request_id,
            emitted=len(generation.emitted),
            reason=ending.message,
        )
        return False

    def _sent_on_until_s(self, now_s: float) -> float:
        """Return until when a request without any token waits for the next owner of its cell."""
        if now_s - self._began_at_s > 2 * _RETRY_PAUSE_S:  # it was taken, and waited
            self._connect_by_s = now_s + _CONNECT_WAIT_S
            self._next_pause_s = _RETRY_PAUSE_S
        return self.acquire_by_s


def _refused(ending: Ending, code: ErrorCode) -> Ending:
    # What was lost, and its name, is for events and logs.
    is_told = ending.message and ending.kind is not EndKind.LOST
    text = ending.message if is_told else "The engine was lost."
    return Ending(EndKind.REFUSED, code, text, ending.retry_after_s or 1.0)
