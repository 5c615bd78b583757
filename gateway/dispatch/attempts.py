"""Records where the answers to one request ran, in one record per submission to a router. Pure."""

from collections.abc import Iterable, Sequence
from sys import intern
from typing import TYPE_CHECKING, NamedTuple

from sluice.wire.telemetry.v1 import telemetry_pb2 as telemetry

if TYPE_CHECKING:
    from sluice.wire.router.v1 import router_pb2 as wire

KEPT_MAX = 8  # attempts stored per answer, above which the middle attempts are dropped
TOLD_MAX = 16  # attempts in the event of one request, above which the later attempts are omitted
_REASON_MAX = 200
_CANDIDATES_MAX = 16
_U32_MAX = 0xFFFFFFFF


class AttemptPlacement(NamedTuple):
    """The placement of a running answer, copied so that the router's larger message is freed.

    Attributes:
        replica_id: Id of the replica.
        queue_us: Microseconds from the submission to the dispatch.
        engine_queue_us: Microseconds in the engine's queue.
        load_us: Microseconds of loading the adapter.
        cached_tokens: Cached tokens of the prompt.
        decision: The router's explanation of the placement, or None if the router sent none.
    """

    replica_id: str
    queue_us: int = 0
    engine_queue_us: int = 0
    load_us: int = 0
    cached_tokens: int = 0
    decision: "wire.Explanation | None" = None


def placement_of(placed: "wire.Placed") -> AttemptPlacement:
    """Return the placement in a message."""
    return AttemptPlacement(
        intern(placed.replica_id),  # all requests to a replica share one string
        placed.queue_us,
        placed.engine_queue_us,
        placed.load_us,
        placed.cached_tokens,
        detached(placed.decision) if placed.HasField("decision") else None,
    )


def detached(decision: "wire.Explanation") -> "wire.Explanation":
    """Return a copy, because a reference to this part would keep the router's message alive."""
    copy = type(decision)()
    copy.CopyFrom(decision)
    return copy


class Attempt:
    """A submission of an answer to a router. All times are monotonic and in seconds.

    Attributes:
        number: Number of the attempt within its answer, from 0 on.
        submitted_at_s: Time of the submission.
        first_at_s: Time of the first token, or 0 before the first token.
        ended_at_s: Time of the end, or 0 while the attempt runs.
        emitted_before: Number of the answer's tokens from earlier attempts.
        output_tokens: Number of tokens of this attempt.
        placed: Placement of the answer, or None if the answer never ran.
        decision: Router's explanation of the placement, from the message that ended the attempt.
        outcome: Name of the outcome in events. It is `cancelled` until the attempt has ended.
        reason: Explanation, in words, of an outcome other than success.
        before_us: Zero for a submission by the gateway. If the router itself queued the request
            again, microseconds from the submission to the end of the attempt before this one.
    """

    __slots__ = (
        *("number", "cell_id", "router_id", "submitted_at_s", "first_at_s", "ended_at_s"),
        *("emitted_before", "output_tokens", "prefill_us", "placed", "decision"),
        *("outcome", "reason", "before_us"),
    )

    def __init__(
        self, number: int, cell_id: str, router_id: str, now_s: float, emitted_before: int
    ) -> None:
        self.number = number
        self.cell_id = cell_id
        self.router_id = router_id
        self.submitted_at_s = now_s
        self.first_at_s = self.ended_at_s = 0.0
        self.emitted_before = emitted_before
        self.output_tokens = 0
        self.prefill_us = 0
        self.placed: AttemptPlacement | None = None
        self.decision: wire.Explanation | None = None
        self.outcome, self.reason = "cancelled", ""
        self.before_us = 0

    def interrupted(self, by: "wire.Interruption", emitted: int) -> "Attempt":
        """End this attempt because its router queued the request again. Returns the next attempt.

        Args:
            by: The router's message about the interruption.
            emitted: Number of tokens of the answer so far.
        """
        after_us = max(0, by.ended_us - self.before_us)
        ended_at_s = max(self.first_at_s, self.submitted_at_s + after_us * 1e-6)
        if self.placed is None:  # the engine had not begun, so only the replica is known
            self.placed = AttemptPlacement(by.replica_id, by.queue_us)
        self.ended_at_s, self.outcome, self.reason = ended_at_s, by.code or "requeued", by.reason
        self.output_tokens = emitted - self.emitted_before
        later = Attempt(self.number + 1, self.cell_id, self.router_id, ended_at_s, emitted)
        later.before_us = by.ended_us
        return later

    @property
    def explanation(self) -> "wire.Explanation | None":
        """The router's explanation of the placement, if the router sent an explanation."""
        if self.decision is None and self.placed is not None:
            return self.placed.decision
        return self.decision


def begun(attempts: list[Attempt], attempt: Attempt) -> None:
    """Add an attempt. If there are `KEPT_MAX` attempts, drop the middle one."""
    if len(attempts) >= KEPT_MAX:
        del attempts[KEPT_MAX // 2]
    attempts.append(attempt)


def rows(
    answers: Sequence[Sequence[Attempt]], received_at_s: float, ended_at_s: float
) -> list[telemetry.Attempt]:
    """Return the attempts of a request as messages for its usage event.

    The result is empty for one successful attempt without an explanation, because the event's
    other fields already describe that attempt.

    Args:
        answers: The attempts of each answer, in order.
        received_at_s: Monotonic arrival time of the request. Reported times count from then.
        ended_at_s: Monotonic end of the request, also used for attempts without a recorded end.
    """
    if not answers or (len(answers) == 1 and _is_plain(answers[0])):
        return []
    found = [
        _message(part, attempt, received_at_s, ended_at_s)
        for part, attempts in enumerate(answers[:TOLD_MAX])
        for attempt in attempts
    ]
    return found[:TOLD_MAX]


def _is_plain(attempts: Sequence[Attempt]) -> bool:
    if len(attempts) != 1:
        return not attempts
    [only] = attempts
    return only.explanation is None and not only.reason


def _message(
    part: int, attempt: Attempt, received_at_s: float, ended_at_s: float
) -> telemetry.Attempt:
    def us(at_s: float) -> int:
        return min(_U32_MAX, max(0, round((at_s - received_at_s) * 1e6))) if at_s else 0

    message = telemetry.Attempt(
        part=part,
        number=attempt.number,
        cell_id=attempt.cell_id,
        router_id=attempt.router_id,
        submitted_us=us(attempt.submitted_at_s),
        first_us=us(attempt.first_at_s),
        ended_us=us(attempt.ended_at_s or ended_at_s),
        prefill_us=attempt.prefill_us,
        output_tokens=attempt.output_tokens,
        outcome=attempt.outcome,
        reason=attempt.reason[:_REASON_MAX],
    )
    if (placed := attempt.placed) is not None:
        message.replica_id = placed.replica_id
        message.queue_us = max(0, placed.queue_us - attempt.before_us)
        message.engine_queue_us = placed.engine_queue_us
        message.load_us = placed.load_us
        message.cached_tokens = placed.cached_tokens
    if (known := attempt.explanation) is not None:
        known.router_id = attempt.router_id  # the answers of `Explain` name the router, too
        message.decision = _trimmed(known).SerializeToString()
    return message


def _trimmed(decision: "wire.Explanation") -> "wire.Explanation":
    """Return a decision with its first candidates and the chosen replica, in their order."""
    if len(decision.candidates) <= _CANDIDATES_MAX:
        return decision
    kept: Iterable[wire.Candidate] = [
        candidate
        for place, candidate in enumerate(decision.candidates)
        if place < _CANDIDATES_MAX or candidate.replica_id == decision.chosen
    ]
    trimmed = type(decision)()
    trimmed.CopyFrom(decision)
    del trimmed.candidates[:]
    trimmed.candidates.extend(kept)
    return trimmed
