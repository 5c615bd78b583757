"""Carries one answer to its end, at one router or, after the loss of a router, at several.

The gateway stores the prompt and the emitted token ids. When a replica, a router or the connection
is lost, the rest of the answer is submitted again. The client notices a pause, but no token is
repeated or missing.
"""

import asyncio
import time
from collections.abc import Callable

from gateway.dispatch.generation import EndKind, Generation, GenerationEnd
from gateway.dispatch.patience import NO_TOKEN, Patience, refused
from gateway.dispatch.retry_budget import RetryBudget
from gateway.dispatch.router_link import RouterLink
from gateway.dispatch.routers import RouterLinks
from gateway.stopping import STOPPING_TEXT
from sluice.errors import ErrorCode

# Seconds after a deadline in which the router may report the request's end before the gateway ends
# the request.
_GRACE_S = 2.0

_SUCCESS = (EndKind.STOP, EndKind.LENGTH, EndKind.FILTERED)
_NO_ROUTER = GenerationEnd(
    EndKind.REFUSED,
    ErrorCode.NO_CAPACITY,
    "No router serves this model at the moment; try again shortly.",
    2.0,
)
STOPPING = GenerationEnd(EndKind.REFUSED, ErrorCode.DRAINING, STOPPING_TEXT)


class Pursuit:
    """Submits one generation until it is answered, as a state machine that `look` advances.

    A pursuit is in one of three states. Its request is at a router, waits for a router, or pauses
    before a retry. Call `look` when the generation's listener reports first tokens or an end, and
    after each `wake`. A `wake` reports a change of the routers or a passed deadline.

    Attributes:
        generation: The answer.
        siblings: Further answers to the same prompt. They wait until this answer has begun, because
            the prompt is then in a prefix cache and need not be computed again.
    """

    __slots__ = (
        *("_first_pool", "_handle", "_is_due", "_is_paused", "_is_waiting", "_link", "_links"),
        *("_offered", "_patience", "_retries", "_timer", "_wake", "generation", "siblings"),
    )

    def __init__(
        self,
        generation: Generation,
        siblings: list[Generation],
        links: RouterLinks,
        retries: RetryBudget,
        wake: Callable[["Pursuit"], None],
    ) -> None:
        """Count the generation as an open request of its tenant until `close`."""
        now_s = asyncio.get_running_loop().time()
        self.generation = generation
        self.siblings = siblings
        self._links = links
        self._retries = retries
        self._wake = wake
        self._patience = Patience(generation, now_s)
        self._link: RouterLink | None = None
        self._handle = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = self._is_paused = self._is_waiting = False
        self._offered = self._first_pool = ""  # the pool to move to, and the pool before a move
        retries.opened(generation.spec.tenant_id)

    def begin(self, now_s: float) -> None:
        """Submit the generation for its first attempt or a retry, or wait for a router."""
        self._is_paused = False
        if self.generation.begin_attempt() is None:
            self._patience.begin_attempt(now_s)
            self._seek(now_s)
        else:
            self._wake(self)

    def on_routers_changed(self) -> None:
        """Wake the caller. The links call this when the connected routers or cells change."""
        self._wake(self)

    # --- a move to another pool, see `PoolMoves` ------------------------------------------------

    @property
    def is_queued(self) -> bool:
        """Whether the request waits for its first placement at a router."""
        generation = self.generation
        return self._link is not None and generation.is_fresh and generation.placed is None

    @property
    def cell_id(self) -> str:
        """Id of the cell in which the request waits."""
        return self._patience.cell_id

    @property
    def pool_id(self) -> str:
        """Id of the pool in which the request waits."""
        return self.generation.spec.pool_id

    @property
    def priority(self) -> int:
        """Priority of the request's tier."""
        return self.generation.spec.tier_priority

    @property
    def session(self) -> int:
        """Hash of the request's session, or 0 without a session."""
        return self.generation.spec.session_hash

    def offer(self, pool_id: str) -> None:
        """Move the request to another pool at the next `look`, unless it is placed before."""
        self._offered = pool_id
        self._wake(self)

    def _move(self, now_s: float) -> None:
        """Submit the waiting request in the offered pool, if that pool has a router."""
        generation, pool_id = self.generation, self._offered
        self._offered = ""
        if not self.is_queued or self._links.find(pool_id, generation.spec) is None:
            return
        self._leave()
        self._first_pool = generation.spec.pool_id
        attempt = generation.attempts[-1]
        attempt.outcome, attempt.reason = "moved", f"pool {pool_id} can start the request at once"
        self._use_pool(pool_id)
        self.begin(now_s)

    def _use_pool(self, pool_id: str) -> None:
        """Let the answer, and further answers to its prompt, use another pool."""
        for generation in (self.generation, *self.siblings):
            generation.use_pool(pool_id)

    def _returns(self, ending: GenerationEnd, now_s: float) -> bool:
        """Return a request that its new pool refuses to its first pool, which had accepted it."""
        generation, patience = self.generation, self._patience
        is_moved = self._first_pool and self._first_pool != generation.spec.pool_id
        is_over = generation.emitted or ending.code is ErrorCode.DEADLINE_EXCEEDED
        left_s = patience.give_up_at_s - now_s
        if not is_moved or is_over or ending.kind is not EndKind.REFUSED or left_s <= 0:
            return False
        self._use_pool(self._first_pool)
        patience.pause_s = min(patience.pause_s, left_s)
        return True

    def look(self, now_s: float) -> GenerationEnd | None:
        """Advance the state machine, and return the end for the client, or None before the end."""
        generation = self.generation
        is_due, self._is_due = self._is_due, False
        if self._is_paused:
            if not is_due and not self._links.is_stopping:
                return None
            self.begin(now_s)
        elif is_due:
            self._run_out(now_s)
        elif generation.ending is None:
            if self._link is None:
                self._seek(now_s)
            elif not generation.is_fresh:
                self._stop_timer()  # an answer that has begun has no deadline
            elif self._offered:
                self._move(now_s)
        if generation.ending is None:
            return None
        self._leave()
        final = self._final(generation.ending, now_s)
        if final is None:
            self._is_paused = True
            self._start_timer(now_s + self._patience.pause_s)
        return final

    def close(self) -> None:
        """End the pursuit, because the answer has ended or its request was cancelled."""
        self._leave()
        self.generation.listener = None
        self._retries.closed(self.generation.spec.tenant_id)

    def _seek(self, now_s: float) -> None:
        """Submit the request to a connected router, or wait if no router is connected."""
        links, patience, spec = self._links, self._patience, self.generation.spec
        if links.is_stopping:
            self.generation.end(STOPPING)
            return
        home = patience.home
        if home is None:
            found = links.find(spec.pool_id, spec)
        else:
            found = links.owner(spec.pool_id, home.cell_id)
        if found is not None:
            self._submit(*found, now_s)
        elif self._timer is None:
            self._is_waiting = True
            links.watch(self.on_routers_changed)
            self._start_timer(patience.acquire_by_s if home is None else home.until_s)

    def _submit(self, link: RouterLink, cell_id: str, now_s: float) -> None:
        if self._is_waiting:
            self._stop_waiting()
        generation, patience = self.generation, self._patience
        left_ms = max(1, round((patience.give_up_at_s - now_s) * 1000))
        is_first = not patience.has_tried and not generation.spec.is_begun
        # The first attempt has passed the admission deadline, which a retry must not meet again.
        deadline_ms, admission_ms = (
            (generation.spec.deadline_ms, generation.spec.admission_ms)
            if is_first
            else (left_ms, 0)
        )
        patience.cell_id = cell_id
        generation.begin_submission(cell_id, link.router_id, time.monotonic())
        self._start_timer(patience.give_up_at_s + _GRACE_S)
        self._link = link
        if generation.spec.pools and not self._first_pool and not generation.has_begun:
            self._links.moves.add(generation.spec.pools, self, time.monotonic())
        self._handle = link.submit(generation, cell_id, deadline_ms, admission_ms)

    def _run_out(self, now_s: float) -> None:
        """Handle the passed deadline of a wait for the first token or for a router."""
        if self._link is not None:
            if self.generation.is_fresh:
                self.generation.end(NO_TOKEN)
        elif self._patience.home is not None:
            self._patience.home = None  # any cell of the pool may continue the answer
            self._seek(now_s)
        else:
            self.generation.end(_NO_ROUTER)

    def _leave(self) -> None:
        """Cancel the answer at its router, and end any wait."""
        if self._is_waiting:
            self._stop_waiting()
        elif self._timer is not None:
            self._stop_timer()
        if self._link is not None:
            link, self._link = self._link, None
            if self.generation.spec.pools:
                self._links.moves.discard(self.generation.spec.pools, self)
            link.cancel(self._handle)  # the cancel has no effect if the router has reported the end
            self.generation.end_submission(time.monotonic())

    def _final(self, ending: GenerationEnd, now_s: float) -> GenerationEnd | None:
        """Return the end for the client, a success or an error, or None to retry."""
        if self._links.is_stopping and ending.kind is EndKind.LOST:
            return STOPPING
        if ending.kind in _SUCCESS or self._links.is_stopping:
            return ending
        if self._returns(ending, now_s):
            return None
        if (refusal := self._patience.refusal(ending, now_s)) is not None:
            return refusal
        # A retry after a refusal is free, since the refusing router spent no engine time on the
        # request. A retry after a lost replica costs engine time, so it needs the retry budget.
        is_free = ending.kind is EndKind.REFUSED and not ending.code.policy.is_costly_again
        if not is_free and not self._retries.take(self.generation.spec.tenant_id, now_s):
            return refused(ending, ErrorCode.REPLICA_LOST)
        return None

    def _start_timer(self, at_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(at_s, self._mark_due)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_waiting(self) -> None:
        self._is_waiting = False
        self._links.unwatch(self.on_routers_changed)
        self._stop_timer()

    def _mark_due(self) -> None:
        self._timer = None
        self._is_due = True
        self._wake(self)
