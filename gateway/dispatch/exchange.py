"""One accepted request's bookkeeping, from admission to its single event: pure facts, no I/O."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.directory import Principal
from gateway.dispatch import attempts
from gateway.dispatch.attempts import Attempt
from gateway.dispatch.generation import Generation
from gateway.limits.limiter import Reservation
from gateway.rollouts.decision import Decision
from sluice.errors import ErrorCode, PlatformError
from sluice.tracecontext import NONE, Upstream
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

_SCHEMA_VERSION = 1
_CODES = frozenset(ErrorCode)


@dataclass(slots=True)
class Tally:
    """What a request has come to, all its answers together.

    Attributes:
        prompt_tokens: Of all its prompts, each counted once.
        cached_tokens: Of these, found in a prefix cache.
        output_tokens: Of all answers.
        placed_prompt_tokens: Of the prompts that reached a replica.
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
    first_at_s: float = 0.0
    itl_max_s: float = 0.0
    resumes: int = 0
    placed: wire.Placed | None = None
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
    for index, it in enumerate(generations):
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


class _Begun(NamedTuple):
    """An event in the making, and what it is of."""

    event: RequestEvent
    model: control.Model
    decision: Decision | None
    gateway_id: str


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
        is_copy: Made for a shadow stage; nobody waits for it, and nobody pays.
        is_refusal: The model declined to answer; looked at in rollouts only.
        applied: The reservation, also when it is settled.
        lost: Of a model that another one stands in for.
        submitted_at_s: Monotonic time of the first submission; 0 before.
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
    is_refusal: bool = False
    applied: Reservation | None = None
    lost: Lost | None = None
    submitted_at_s: float = 0.0
    first_sent_at_s: float = 0.0
    cell_id: str = ""
    router_id: str = ""
    outcome: str = ""
    status: int = 0
    _begun: "_Begun | None" = field(default=None, repr=False)

    def submitted(self, cell_id: str, router_id: str, now_s: float) -> None:
        """Note where the request went; the time counts only once."""
        self.cell_id, self.router_id = cell_id, router_id
        if not self.submitted_at_s:
            self.submitted_at_s = now_s

    @property
    def has_failed(self) -> bool:
        """Whether an error is the outcome."""
        return self.outcome in _CODES

    def end_by(self, error: BaseException | None) -> None:
        """Note the failure that ended the request; None: outcome and status stand already."""
        if isinstance(error, PlatformError):
            self.outcome, self.status = error.code, error.status
        elif isinstance(error, asyncio.CancelledError | ConnectionError):
            self.outcome, self.status = ErrorCode.CLIENT_CLOSED, 499
        elif error is not None:
            self.outcome, self.status = ErrorCode.INTERNAL, 500

    def event(self, tally: Tally, gateway_id: str, ended_at_s: float) -> RequestEvent:
        """Return the event that tells everything once."""
        event = self._take_begun(gateway_id)
        event.session_hash = tally.session_hash
        # Closings need none of these: they never become spans.
        event.parent_span_id, event.tracestate = self.upstream.span_id, self.upstream.state
        event.is_sampled = self.upstream.is_sampled
        event.cell_id, event.router_id = self.cell_id, self.router_id
        event.prompt_tokens = tally.placed_prompt_tokens or tally.prompt_tokens
        event.output_tokens = tally.output_tokens
        event.gateway_us = self._us(self.submitted_at_s)
        event.prefill_us = tally.prefill_us
        event.ttft_us = self._us(self.first_sent_at_s)
        event.total_us = self._us(ended_at_s)
        event.itl_max_us = _us(tally.itl_max_s)
        event.outcome, event.status = self.outcome, self.status
        event.resumes = tally.resumes
        event.choices = self.choices
        self._decide(event)
        if (placed := tally.placed) is not None:
            event.replica_id = placed.replica_id
            event.queue_us = placed.queue_us
            event.engine_queue_us = placed.engine_queue_us
            if placed.load_us:
                event.load_us = placed.load_us
            event.cached_tokens = tally.cached_tokens
        if (reservation := self.applied or self.reservation) is not None and reservation.scopes:
            event.limits = "; ".join(scope.told for scope in reservation.scopes)
            event.reserved_tokens = reservation.tokens
            event.is_limited_locally = reservation.is_local
        if told := attempts.told(tally.attempts, self.received_at_s, ended_at_s):
            event.attempts.extend(told)
        return event

    def prepare_closings(
        self, generations: Sequence[Generation], answers_per_prompt: int, gateway_id: str
    ) -> None:
        """Give each generation what its router tells of it if this process is killed."""
        event = self._begun_event(gateway_id)
        event.session_hash = generations[0].spec.session_hash
        event.choices = self.choices
        self._decide(event)
        for part, generation in enumerate(generations):
            is_first = part % answers_per_prompt == 0
            event.part = part
            event.prompt_tokens = len(generation.spec.prompt) if is_first else 0
            generation.closing = event.SerializeToString()
        event.part = 0
        self._begun = _Begun(event, self.model, self.decision, gateway_id)

    def _take_begun(self, gateway_id: str) -> RequestEvent:
        """Return what closings were made of, once, or the same made now."""
        begun, self._begun = self._begun, None
        if begun is not None:
            is_same = begun.model is self.model and begun.decision is self.decision
            if is_same and begun.gateway_id == gateway_id:
                return begun.event
        return self._begun_event(gateway_id)

    def _begun_event(self, gateway_id: str) -> RequestEvent:
        """Return what is known from the begin on, by the model that answers now."""
        principal, model = self.principal, self.model
        lost = self.lost or Lost("", 0, 0)
        return RequestEvent(
            schema_version=_SCHEMA_VERSION,
            event_id=f"evt_{self.uid}",
            received_at_unix_ms=self.received_at_unix_ms,
            request_id=self.request_id,
            trace_id=self.trace_id,
            tenant_id=principal.tenant.id,
            key_id=principal.key.id,
            tier_id=principal.tier.id,
            model=model.id,
            requested_model=self.requested_model,
            release=model.release,
            base_digest=model.base_digest,
            adapter_digest=model.adapter_digest,
            pool_id=model.pool_id,
            gateway_id=gateway_id,
            endpoint=self.endpoint,
            is_stream=self.is_stream,
            lost_model=lost.model,
            lost_prompt_tokens=lost.prompt_tokens,
            lost_output_tokens=lost.output_tokens,
        )

    def _decide(self, event: RequestEvent) -> None:
        """Say why it is that release of the model."""
        if (decision := self.decision) is not None:
            event.rollout_id = decision.rollout_id
            event.arm = decision.arm
            event.is_pinned = decision.is_pinned
            event.is_copy = self.is_copy
            event.is_refusal = self.is_refusal

    def _us(self, at_s: float) -> int:
        return _us(at_s - self.received_at_s) if at_s else 0


def _us(seconds: float) -> int:
    return min(0xFFFFFFFF, max(0, round(seconds * 1e6)))
