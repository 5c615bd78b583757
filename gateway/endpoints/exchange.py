"""The state of one accepted request, from its admission to its single event. Pure."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from gateway.auto.decision import AutoDecision
from gateway.directory import Principal
from gateway.dispatch import attempts
from gateway.dispatch.generation import EndKind, Generation, GenerationSpec
from gateway.dispatch.tally import Tally, tally_of
from gateway.endpoints.event_head import head_of
from gateway.endpoints.task import TextTask
from gateway.limits.limiter import Reservation
from gateway.rollouts.decision import ReleaseDecision
from gateway.rollouts.flaws import Flaws, flaws_of
from gateway.rollouts.refusals import opening
from sluice.errors import ErrorCode, PlatformError, policy_of
from sluice.tracecontext import NONE, Upstream
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

_U32_MAX = 0xFFFFFFFF
_FLAWLESS = Flaws()


class AnswerScore(NamedTuple):
    """Log probabilities of an answer under base and adapter, as means over its tokens, in nats.

    Attributes:
        base_logprob: Log probability under the base alone.
        logprob: Log probability under the adapter that generated the answer.
        entropy: Entropy of the adapter's distributions.
    """

    base_logprob: float
    logprob: float
    entropy: float


class Lost(NamedTuple):
    """The tokens that a model used before a fallback model replaced it."""

    model: str
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class HttpExchange:
    """An accepted request, from its arrival to its event.

    Attributes:
        reservation: Reservation of the limits, or None while no limit is reserved.
        uid: Unique id, from which the ids of completion and event are derived.
        request_id: Request id, which the answer's headers also contain.
        trace_id: Trace id, 32 hex digits.
        upstream: The caller's trace context.
        endpoint: Path of the API.
        received_at_s: Monotonic time of the arrival.
        received_at_unix_ms: Wall-clock time of the arrival.
        model: Model that answers.
        requested_model: The name in the request.
        decision: Pin or split that chose the release, or None if the name points at the release.
        auto: Choice of the model for `auto`, or None if the request names a model.
        choices: Number of requested answers.
        task: Parsed body, or None once a stream or an embedding has begun, to free its memory.
        specs: Specs of the answers, for the model that answers.
        answers_per_prompt: Number of consecutive specs for one prompt.
        param_names: The body's field for each parameter that an engine may refuse by its own name.
        generations: Generations of the specs, once they run.
        has_begun: Whether the client has received a part of a stream.
        is_copy: Whether this is a copy for a shadow stage, or the failed attempt of a canary before
            control answered. No client waits for a copy or is charged for it.
        scored: Release decision of the scored request, set only if this exchange computes a score.
        flaws: Flaws of the first answer, computed only while a rollout runs.
        score: Computed score, set only if this exchange computes a score.
        applied: Reservation after its settlement, for the event.
        lost: Usage of a model that a fallback model has replaced.
        guard_rules: Ids of the tenant's rules that the texts have matched, separated by blanks.
        first_sent_at_s: Monotonic time when the first token was sent, 0 before.
        outcome: Finish reason or error code.
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
    decision: ReleaseDecision | None = None
    auto: AutoDecision | None = None
    choices: int = 0
    task: TextTask | None = None
    specs: Sequence[GenerationSpec] = ()
    answers_per_prompt: int = 1
    param_names: Mapping[str, str] = field(default_factory=dict[str, str])
    generations: Sequence[Generation] = ()
    has_begun: bool = False
    is_copy: bool = False
    scored: ReleaseDecision | None = None
    flaws: Flaws = _FLAWLESS
    score: AnswerScore | None = None
    applied: Reservation | None = None
    lost: Lost | None = None
    guard_rules: str = ""
    first_sent_at_s: float = 0.0
    outcome: str = ""
    status: int = 0
    _begun: bytes = field(default=b"", repr=False)
    _final: Tally | None = field(default=None, repr=False)

    @property
    def body(self) -> TextTask:
        """The request's body, which is not available once a stream has begun."""
        assert self.task is not None, "a stream that has begun keeps nothing of its body"
        return self.task

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights that answer, for clients."""
        return _fingerprint(self.model.base_digest, self.model.adapter_digest)

    @property
    def tally(self) -> Tally:
        """The sums over the answers so far, for the model that answers now."""
        return self._final or tally_of(self.generations, self.answers_per_prompt)

    def finish(self) -> Tally:
        """End the request, and return the final sums over its answers."""
        self._final = tally_of(self.generations, self.answers_per_prompt)
        return self._final

    def begin(self, generations: Sequence[Generation], gateway_id: str) -> None:
        """Begin the answers of a model, and drop the answers of another model."""
        if self.generations:
            generations[0].attempts = self.generations[0].attempts
        self.generations, self._final = generations, None
        self.prepare_closings(generations, self.answers_per_prompt, gateway_id)

    def forget_body(self) -> None:
        """Drop the body, which no begun answer needs and which uses at least 2.5 kB."""
        self.task = None

    def stand_in(
        self,
        model: control.Model,
        decision: ReleaseDecision | None,
        specs: Sequence[GenerationSpec],
        lost: Lost | None,
    ) -> None:
        """Assign another model, with the usage `lost` of the first model if it had begun."""
        assert not self.has_begun, "the client has got something of another model"
        self.model, self.decision, self.specs, self.lost = model, decision, specs, lost
        self._begun = b""

    @property
    def is_aborted(self) -> bool:
        """Whether the request ended without its whole answer, as at a disconnect of the client."""
        policy = policy_of(self.outcome)
        return policy is not None and policy.is_abort

    @property
    def is_charged(self) -> bool:
        """Whether the outcome is an error that still counts as a request in the caller's limits."""
        policy = policy_of(self.outcome)
        return policy is not None and policy.is_charged

    def end_by(self, error: BaseException | None) -> None:
        """Record the error that ended the request. It is None if the outcome is already set."""
        if isinstance(error, PlatformError):
            self.outcome, self.status = error.code, error.status
        elif isinstance(error, asyncio.CancelledError | ConnectionError):
            self.outcome, self.status = ErrorCode.CLIENT_CLOSED, 499
        elif error is not None:
            self.outcome, self.status = ErrorCode.INTERNAL, 500

    def event(self, tally: Tally, gateway_id: str, ended_at_s: float) -> bytes:
        """Return the request's single event, serialized.

        Fields that are set at the start precede all later fields. If both parts set a field, the
        later value counts.
        """
        begun, self._begun = self._begun or self._known(gateway_id), b""
        event = RequestEvent()
        event.session_hash = tally.session_hash
        # `Generation.closing` lacks these fields, because a closing event never becomes a trace
        # span.
        upstream = self.upstream
        event.is_sampled = upstream.is_sampled
        if upstream.span_id:
            event.parent_span_id, event.tracestate = upstream.span_id, upstream.state
        self._tell_place(event, tally)
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
        self._tell_findings(event, tally)
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
        if self.specs and (dropped_turns := self.specs[0].dropped_turns):
            event.dropped_turns = dropped_turns
        if told := attempts.rows(tally.attempts, received_at_s, ended_at_s):
            event.attempts.extend(told)
        return begun + event.SerializeToString()

    def _tell_place(self, event: RequestEvent, tally: Tally) -> None:
        """Add the cell of the last submission, and its pool if the request has moved there."""
        event.cell_id, event.router_id = tally.cell_id, tally.router_id
        if tally.pool_id and tally.pool_id != self.model.pool_id:
            event.pool_id = tally.pool_id

    def prepare_closings(
        self, generations: Sequence[Generation], answers_per_prompt: int, gateway_id: str
    ) -> None:
        """Set for each generation the event that its router emits if this process is killed."""
        head, event = self._begin(gateway_id)
        event.session_hash = generations[0].spec.session_hash
        for part, generation in enumerate(generations):
            is_first = part % answers_per_prompt == 0
            event.part = part
            event.prompt_tokens = len(generation.spec.prompt) if is_first else 0
            generation.closing = head + event.SerializeToString()
        self._begun = generations[0].closing

    def _tell_findings(self, event: RequestEvent, tally: Tally) -> None:
        """Add the reason of the model's choice, matched rules, and evidence for rollouts."""
        if self.auto is not None and not self.is_copy:
            self.auto.write(event.auto)
        if self.guard_rules:
            event.guard_rules = self.guard_rules
            event.withheld_tokens = tally.withheld_tokens
            event.unbilled_tokens = tally.unbilled_tokens
        flaws, score = self.flaws, self.score
        if flaws != _FLAWLESS:
            event.is_refusal, event.is_empty = flaws.is_refusal, flaws.is_empty
            event.is_repetitive = flaws.is_repetitive
        if score is not None:
            event.base_logprob, event.answer_logprob = score.base_logprob, score.logprob
            event.answer_entropy = score.entropy

    def _known(self, gateway_id: str) -> bytes:
        head, event = self._begin(gateway_id)
        return head + event.SerializeToString()

    def _begin(self, gateway_id: str) -> tuple[bytes, RequestEvent]:
        """Return the fields known at the start: the serialized head, and an event with the rest."""
        head = head_of(
            self.principal,
            self.model,
            self.requested_model,
            self.endpoint,
            self.is_stream,
            gateway_id,
        )
        event = RequestEvent()  # setting fields is twice as fast as constructor arguments
        event.event_id = f"evt_{self.uid}"
        event.received_at_unix_ms = self.received_at_unix_ms
        event.request_id, event.trace_id = self.request_id, self.trace_id
        event.choices = self.choices
        if (decision := self.decision) is not None:  # the reason for this release of the model
            event.rollout_id = decision.rollout_id
            event.arm = decision.arm
            event.is_pinned = decision.is_pinned
            event.is_copy = self.is_copy
        # The event of a score names the scored rollout in `scored_rollout_id`.
        if (scored := self.scored) is not None:
            event.scored_rollout_id, event.arm = scored.rollout_id, scored.arm
            event.is_copy = True
        if (lost := self.lost) is not None:
            event.lost_model = lost.model
            event.lost_prompt_tokens = lost.prompt_tokens
            event.lost_output_tokens = lost.output_tokens
        return head, event


def finish_reason(generation: Generation) -> str:
    """Return OpenAI's finish reason of an answer that has ended well."""
    if generation.is_filtered:
        return str(ErrorCode.CONTENT_FILTER)
    if generation.ending is not None and generation.ending.kind is EndKind.LENGTH:
        return "length"
    return "tool_calls" if generation.pipe.has_calls else "stop"


def flaws_in(generation: Generation) -> Flaws:
    """Return the flaws of an answer. Only the tokens that `flaws_of` needs are decoded."""
    pipe, tokens = generation.pipe, generation.emitted
    first = opening(generation.spec.new_pipe(), tokens)
    return flaws_of(first, tokens, has_more=pipe.has_calls or pipe.reasoning_tokens > 0)


@lru_cache(maxsize=1024)
def _fingerprint(*digests: str) -> str:
    return "fp_" + "_".join([it.rpartition(":")[2][:10] for it in digests if it])


def _us(seconds: float) -> int:
    us = round(seconds * 1e6)
    return us if 0 <= us <= _U32_MAX else min(_U32_MAX, max(0, us))
