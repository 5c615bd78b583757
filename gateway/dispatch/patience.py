"""Decides whether a request is retried after an attempt has failed, and until when. Pure."""

import structlog

from gateway.dispatch.generation import EndKind, Generation, GenerationEnd
from gateway.dispatch.routers import CellHome
from sluice.errors import ErrorCode

log = structlog.get_logger(__name__)

RESUMES_MAX = 2
# Bounds of the seconds for which a begun answer waits for its continuation after a loss. Within the
# bounds, the wait equals the request's deadline. The bounds are needed because a deadline applies
# to the queue, so that clients may have set a very short or long one.
_RESUME_WAIT_MIN_S, _RESUME_WAIT_MAX_S = 10.0, 60.0
# Seconds for which a new request waits for a router, enough for one reconnection.
_CONNECT_WAIT_S = 2.0
# Default deadline of the first token, in seconds, equal to the default of routers.
_DEADLINE_S = 30.0
_RETRY_PAUSE_S = 0.1
_RETRY_PAUSE_MAX_S = 1.0  # maximum pause in seconds, which doubles after each refusal
_HOME_WAIT_S = 0.5  # seconds for which a begun answer waits for the next owner of its cell

NO_TOKEN = GenerationEnd(
    EndKind.REFUSED,
    ErrorCode.DEADLINE_EXCEEDED,
    "The deadline passed before the first token; try again shortly.",
    2.0,
)


class Patience:
    """The retry policy of one request, by its deadline and the endings of its attempts.

    Attributes:
        give_up_at_s: Loop time at which the client receives the error.
        cell_id: Cell of the last attempt, or empty before the first attempt.
        home: Cell in which a begun answer waits after the loss of its router, or None for any cell.
            The wait pays, because other cells have not cached the answer and may be full. The
            cell has a new router within a fraction of a second.
        pause_s: Seconds before the next attempt.
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
        self.home: CellHome | None = None
        self.pause_s = self._next_pause_s = _RETRY_PAUSE_S
        spec = generation.spec
        deadline_s = spec.deadline_ms / 1000 or max(_DEADLINE_S, spec.admission_ms / 1000)
        self._resume_wait_s = min(max(deadline_s, _RESUME_WAIT_MIN_S), _RESUME_WAIT_MAX_S)
        self.give_up_at_s = now_s + (self._resume_wait_s if self._is_begun else deadline_s)

    @property
    def _is_begun(self) -> bool:
        """Whether the client has received a part of the request's answer."""
        return bool(self._generation.emitted) or self._generation.spec.is_begun

    @property
    def has_tried(self) -> bool:
        """Whether the current attempt is a retry."""
        return self._attempts > 1

    @property
    def acquire_by_s(self) -> float:
        """Loop time until which the request waits for a router."""
        if self._is_resuming:
            return self.give_up_at_s
        return min(self.give_up_at_s, self._connect_by_s)

    def begin_attempt(self, now_s: float) -> None:
        """Count an attempt that begins now."""
        self._attempts += 1
        self._began_at_s = now_s

    def refusal(self, ending: GenerationEnd, now_s: float) -> GenerationEnd | None:
        """Return the client's error after a failed attempt, or None to retry the request."""
        self.home = None
        until_s = self.give_up_at_s
        if ending.kind is EndKind.LOST:
            if self._is_lost_for_good(ending, now_s):
                return refused(ending, ErrorCode.REPLICA_LOST)
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
                return refused(ending, ErrorCode.REPLICA_LOST)
            return NO_TOKEN if ending.kind is EndKind.LOST else ending
        # The pause differs by request, so that simultaneously lost requests are retried at
        # different times.
        spread = 1 - self._generation.spec.wish.salt % 1024 / 2048
        self.pause_s = min(self._next_pause_s * spread, left_s)
        if ending.kind is EndKind.REFUSED:
            self._next_pause_s = min(2 * self._next_pause_s, _RETRY_PAUSE_MAX_S)
        return None

    def _is_kept(self, ending: GenerationEnd) -> bool:
        """Return whether a request without replicas in its pool continues to wait.

        It continues once the response has begun, because no fallback model can answer then.
        """
        generation = self._generation
        is_let_go = ending.code.policy.ends_absence and generation.spec.absence_ms
        return bool(is_let_go) and generation.was_nudged

    def _is_lost_for_good(self, ending: GenerationEnd, now_s: float) -> bool:
        """Count a lost attempt, and return whether the answer has been lost too often."""
        generation = self._generation
        if generation.emitted:
            if generation.resumes >= RESUMES_MAX:
                return True
            generation.resumes += 1
            if ending.code.policy.moves:  # the router was lost
                self.home = CellHome(self.cell_id, now_s + _HOME_WAIT_S)
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
        """Return the loop time until which a refused request without tokens is retried."""
        if now_s - self._began_at_s > 2 * _RETRY_PAUSE_S:  # a router had queued the request
            self._connect_by_s = now_s + _CONNECT_WAIT_S
            self._next_pause_s = _RETRY_PAUSE_S
        return self.acquire_by_s


def refused(ending: GenerationEnd, code: ErrorCode) -> GenerationEnd:
    """Return the ending of the last attempt as an error for the client."""
    # The name of a lost replica or router is only for events and logs.
    is_told = ending.message and ending.kind is not EndKind.LOST
    text = ending.message if is_told else "The engine was lost; try again."
    return GenerationEnd(EndKind.REFUSED, code, text, ending.retry_after_s or 1.0)
