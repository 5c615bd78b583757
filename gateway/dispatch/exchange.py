"""One accepted request's bookkeeping, from admission to its single event: pure facts, no I/O."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.directory import Principal
from gateway.dispatch import attempts
from gateway.dispatch.attempts import Attempt, Placement
from gateway.dispatch.event_head import head_of
from gateway.dispatch.generation import Generation
from gateway.limits.limiter import Reservation
from gateway.rollouts.decision import Decision
from gateway.rollouts.flaws import Flaws
from sluice.errors import ErrorCode, PlatformError, policy_of
from sluice.tracecontext import NONE, Upstream
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

_U32_MAX = 0xFFFFFFFF
_FLAWLESS = Flaws()


@dataclass(slots=True)
class Tally:
    """What a request has come to, all its answers together.

    Attributes:
        prompt_tokens: Of all its prompts, each counted once.
        cached_tokens: Of these, found in a prefix cache.
        output_tokens: Of all answers.
        placed_prompt_tokens: Of the prompts that reached a replica.
        submitted_at_s: Monotonic time of the first submission of any answer; 0 without one.
        cell_id: Where the latest submission went; empty without one.
        router_id: The owner of that cell.
        first_at_s: Monotonic time of the first token of any answer; 0 without one.
        placed: Where the first answer runs that runs anywhere.
        attempts: Where each answer ran.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    placed_prompt_tokens: int = 0
    session_hash: int = 0
    prefill_us: int = 0
    submitted_at_s: float = 0.0
    cell_id: str = ""
    router_id: str = ""
    first_at_s: float = 0.0
    itl_max_s: float = 0.0
    resumes: int = 0
    placed: Placement | None = None
    attempts: Sequence[Sequence[Attempt]] = ()


def tally_of(generations: Sequence[Generation], answers_per_prompt: int = 1) -> Tally:
    """Return what generations, if there are any, have come to; those of one prompt in a row."""
    if not generations:
        return Tally()
    first = generations[0]
    tally = Tally(
        session_hash=first.spec.session_hash,
        prefill_us=first.prefill_us,
        attempts=[it.attempts for it in generations],
    )
    latest_at_s = 0.0
    for index, it in enumerate(generations):
        if it.attempts:
            first_attempt, latest = it.attempts[0], it.attempts[-1]
            if not 0 < tally.submitted_at_s <= first_attempt.submitted_at_s:
                tally.submitted_at_s = first_attempt.submitted_at_s
            if latest.submitted_at_s >= latest_at_s:
                latest_at_s = latest.submitted_at_s
                tally.cell_id, tally.router_id = latest.cell_id, latest.router_id
        if index % answers_per_prompt == 0:
            tally.prompt_tokens += len(it.spec.prompt)
            tally.cached_tokens += it.cached_tokens
            if it.placed is not None:
                tally.placed_prompt_tokens += len(it.spec.prompt)
        tally.placed = tally.placed or it.placed
        tally.output_tokens += len(it.emitted)
        tally.resumes += it.resumes
        tally.itl_max_s = max(tally.itl_max_s, it.itl_max_s)
        if it.first_at_s and not 0 < tally.first_at_s <= it.first_at_s:
            tally.first_at_s = it.first_at_s
    return tally


class Lost(NamedTuple):
    """What a model had used when another one stood in for it."""

    model: str
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Exchange:
    """What happens to an accepted request.

    Attributes:
        reservation: None while nothing is reserved.
        uid: Unique, ours; the ids of completion and event are made of it.
        request_id: Also in the answer's headers.
        trace_id: 32 hex digits.
        upstream: The caller's trace context.
        endpoint: Path of the API.
        received_at_s: Monotonic time.
        received_at_unix_ms: Wall-clock time.
        model: That answers.
        requested_model: The name in the request.
        decision: Why it is that release of the model; None: the name stands for it.
        choices: How many answers were asked for.
        is_copy: Made for a shadow stage, or what canary could not load before control answered;
            nobody waits for it, and nobody pays.
        flaws: Of the first answer; looked at in rollouts only.
        applied: The reservation, also when it is settled.
        lost: Of a model that another one stands in for.
        first_sent_at_s: Monotonic time when the first token left; 0 before.
        outcome: The finish reason or the error code.
        status: HTTP status.
    """

    uid: str
    request_id: str
    trace_id: str
    endpoint: str
    received_at_s: float
    received_at_unix_ms: int
    principal: Principal
    model: control.Model
    requested_model: str
    reservation: Reservation | None
    is_stream: bool
    upstream: Upstream = NONE
    decision: Decision | None = None
    choices: int = 0
    is_copy: bool = False
    flaws: Flaws = _FLAWLESS
    applied: Reservation | None = None
    lost: Lost | None = None
    first_sent_at_s: float = 0.0
    outcome: str = ""
    status: int = 0
    _begun: bytes = field(default=b"", repr=False)

    def stand_in(self, model: control.Model, decision: Decision | None, lost: Lost | None) -> None:
        """Let another model answer; `lost` is what the first one had used, if it had begun."""
        self.model, self.decision, self.lost = model, decision, lost
        self._begun = b""

    @property
    def has_failed(self) -> bool:
        """Whether an error is the outcome."""
        return policy_of(self.outcome) is not None

    @property
    def is_charged(self) -> bool:
        """Whether an error is the outcome that counts as a request all the same."""
        policy = policy_of(self.outcome)
        return policy is not None and policy.is_charged

    def end_by(self, error: BaseException | None) -> None:
        """Note the failure that ended the request; None: outcome and status stand already."""
        if isinstance(error, PlatformError):
            self.outcome, self.status = error.code, error.status
        elif isinstance(error, asyncio.CancelledError | ConnectionError):
            self.outcome, self.status = ErrorCode.CLIENT_CLOSED, 499
        elif error is not None:
            self.outcome, self.status = ErrorCode.INTERNAL, 500

    def event(self, tally: Tally, gateway_id: str, ended_at_s: float) -> bytes:
        """Return the event that tells everything once, serialised.

        What was known from the begin on lies in front; where both name a field, the last one holds.
        """
        begun, self._begun = self._begun or self._known(gateway_id), b""
        event = RequestEvent()
        event.session_hash = tally.session_hash
        # Closings need none of these: they never become spans.
        upstream = self.upstream
        event.is_sampled = upstream.is_sampled
        if upstream.span_id:
            event.parent_span_id, event.tracestate = upstream.span_id, upstream.state
        event.cell_id, event.router_id = tally.cell_id, tally.router_id
        event.prompt_tokens = tally.placed_prompt_tokens or tally.prompt_tokens
        event.output_tokens = tally.output_tokens
        received_at_s = self.received_at_s
        if tally.submitted_at_s:
            event.gateway_us = _us(tally.submitted_at_s - received_at_s)
        event.prefill_us = tally.prefill_us
        if self.first_sent_at_s:
            event.ttft_us = _us(self.first_sent_at_s - received_at_s)
        event.total_us = _us(ended_at_s - received_at_s)
        event.itl_max_us = _us(tally.itl_max_s)
        event.outcome, event.status = self.outcome, self.status
        if tally.resumes:
            event.resumes = tally.resumes
        if self.flaws != _FLAWLESS:
            _tell_flaws(event, self.flaws)
        if (placed := tally.placed) is not None:
            event.replica_id = placed.replica_id
            event.queue_us = placed.queue_us
            event.engine_queue_us = placed.engine_queue_us
            if placed.load_us:
                event.load_us = placed.load_us
            event.cached_tokens = tally.cached_tokens
        if (reservation := self.applied or self.reservation) is not None and reservation.scopes:
            event.limits = "; ".join([scope.told for scope in reservation.scopes])
            event.reserved_tokens = reservation.tokens
            event.is_limited_locally = reservation.is_local
        if told := attempts.told(tally.attempts, received_at_s, ended_at_s):
            event.attempts.extend(told)
        return begun + event.SerializeToString()

    def prepare_closings(
        self, generations: Sequence[Generation], answers_per_prompt: int, gateway_id: str
    ) -> None:
        """Give each generation what its router tells of it if this process is killed."""
        head, event = self._begin(gateway_id)
        event.session_hash = generations[0].spec.session_hash
        for part, generation in enumerate(generations):
            is_first = part % answers_per_prompt == 0
            event.part = part
            event.prompt_tokens = len(generation.spec.prompt) if is_first else 0
            generation.closing = head + event.SerializeToString()
        self._begun = generations[0].closing

    def _known(self, gateway_id: str) -> bytes:
        head, event = self._begin(gateway_id)
        return head + event.SerializeToString()

    def _begin(self, gateway_id: str) -> tuple[bytes, RequestEvent]:
        """Return the event as far as it is known from the begin on: its head, and the rest."""
        head = head_of(
            self.principal,
            self.model,
            self.requested_model,
            self.endpoint,
            self.is_stream,
            gateway_id,
        )
        event = RequestEvent()  # a field set takes half as long as one given here
        event.event_id = f"evt_{self.uid}"
        event.received_at_unix_ms = self.received_at_unix_ms
        event.request_id, event.trace_id = self.request_id, self.trace_id
        event.choices = self.choices
        if (decision := self.decision) is not None:  # why it is that release of the model
            event.rollout_id = decision.rollout_id
            event.arm = decision.arm
            event.is_pinned = decision.is_pinned
            event.is_copy = self.is_copy
        if (lost := self.lost) is not None:
            event.lost_model = lost.model
            event.lost_prompt_tokens = lost.prompt_tokens
            event.lost_output_tokens = lost.output_tokens
        return head, event


def _tell_flaws(event: RequestEvent, flaws: Flaws) -> None:
    event.is_refusal, event.is_empty = flaws.is_refusal, flaws.is_empty
    event.is_repetitive = flaws.is_repetitive


def _us(seconds: float) -> int:
    us = round(seconds * 1e6)
    return us if 0 <= us <= _U32_MAX else min(_U32_MAX, max(0, us))
