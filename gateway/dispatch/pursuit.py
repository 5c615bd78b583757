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
        *("_handle", "_is_due", "_is_paused", "_is_waiting", "_link", "_links", "_patience"),
        *("_retries", "_timer", "_wake", "generation", "siblings"),
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
            link.cancel(self._handle)  # the cancel has no effect if the router has reported the end
            self.generation.end_submission(time.monotonic())

    def _final(self, ending: GenerationEnd, now_s: float) -> GenerationEnd | None:
        """Return the end for the client, a success or an error, or None to retry."""
        if self._links.is_stopping and ending.kind is EndKind.LOST:
            return STOPPING
        if ending.kind in _SUCCESS or self._links.is_stopping:
            return ending
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
