"""One answer to an accepted request while it is generated, with its fields, tokens and ending.

A router link calls `push`, `place` and `end` synchronously while it reads a message. The generation
calls its listener at first tokens, at the end, and when a keep-alive is due, which is called a
nudge. This module does no I/O.
"""

import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gateway.dialects.delta import NOTHING, AnswerDelta, joined
from gateway.dispatch.attempts import Attempt, AttemptPlacement, begun, detached, placement_of
from gateway.dispatch.cell_choice import Wish, hashes_of
from gateway.dispatch.drafts import summed
from gateway.dispatch.endings import EndKind, GenerationEnd, ending_of
from gateway.guard.answer import AnswerGuard
from gateway.guard.judged_answer import JudgedAnswer
from gateway.pool_choice import ServingPool
from gateway.text.answer import ChoiceText
from gateway.text.logprobs import (
    LogprobFormat,
    LogprobLine,
    NewLogprobs,
    PromptLogprobLine,
    TokenLogprob,
)
from gateway.text.pipe import TextPipe
from sluice.errors import ErrorCode
from sluice.hashing import chained_hashes
from sluice.token_ids import packed_ids
from sluice.tracecontext import attempt_traceparent
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent


class GenerationSpec(NamedTuple):
    """A requested answer, with its fields for the router and the pipe from its token ids to text.

    The sampling values are those of the engine's API.

    Attributes:
        deadline_ms: The request's deadline in milliseconds, or 0 for the router's default.
        new_pipe: Returns a new pipe, which converts tokens to text.
        new_logprobs: Returns a writer of log probabilities, or None if none were requested.
        new_guard: Returns a guard that applies the tenant's rules, or None without rules.
        block_hashes: Hashes of the prompt's full blocks, concatenated. See `sluice.hashing`.
        tier_reserved_permille: Share of a cell that is reserved for the tier while it has requests.
        is_preemptible: Whether the router may interrupt the answer, for example of batch work.
        choice: Index of the answer among those of its request.
        scored_tokens: Number of trailing tokens of the prompt to score.
        pinned_blocks: Number of leading blocks of the prompt to keep cached.
        is_begun: Whether the answer is submitted only after another answer to the prompt has begun,
            so that the client has already received a part of the response.
        absence_ms: Longest wait in milliseconds for a pool without replicas, or 0 for the deadline.
        traceparent: W3C trace context for the router, or empty if none is sent.
        tracestate: W3C trace state that belongs to `traceparent`.
        prompt_logprobs: Requested alternatives per token of the prompt, or None if not requested.
        is_echo_alone: Whether only the echoed prompt is shown. The engine still computes one token.
        prediction: Token ids of the answer that the client expects, or empty without a prediction.
        dropped_turns: Number of the chat's oldest turns that did not fit into the prompt.
        pools: Pools between which the request may move while it waits, or empty without others.
    """

    request_id: str
    tenant_id: str
    tier_priority: int
    tenant_weight: int
    pool_id: str
    adapter_digest: str
    cache_root: bytes
    prompt: Sequence[int]
    output_tokens_max: int
    end_ids: frozenset[int]
    sampling: engine.Sampling
    session_hash: int
    deadline_ms: int
    ignore_eos: bool
    traceparent: str
    new_pipe: Callable[[], TextPipe]
    new_logprobs: NewLogprobs | None = None
    new_guard: Callable[[], AnswerGuard] | None = None
    block_hashes: bytes = b""
    tier_reserved_permille: int = 0
    admission_ms: int = 0
    is_preemptible: bool = False
    is_begun: bool = False
    absence_ms: int = 0
    choice: int = 0
    tracestate: str = ""
    prediction: Sequence[int] = ()
    scored_tokens: int = 0
    pinned_blocks: int = 0
    prompt_logprobs: int | None = None
    is_echo_alone: bool = False
    dropped_turns: int = 0
    pools: tuple[ServingPool, ...] = ()

    @property
    def wish(self) -> Wish:
        """The traits of the request that decide its cell."""
        salt, adapter = (zlib.crc32(it.encode()) for it in (self.request_id, self.adapter_digest))
        hashes = hashes_of(self.block_hashes)
        return Wish(self.session_hash, hashes, len(self.prompt), salt, adapter)


class Generation(ABC):
    """A running answer. `WholeGeneration` collects its text, and `StreamedGeneration` streams it.

    Attributes:
        emitted: All token ids so far, over all attempts. An array uses a ninth of a list's memory.
        first_at_s: Monotonic time of the first token, or 0 before the first token.
        last_at_s: Monotonic time of the last token.
        itl_max_s: Longest gap between two calls of `push`, in seconds.
        placed: The last placement, or None before the first placement.
        cached_tokens: Prompt tokens that the first placement found in the cache.
        drafts: Counts of speculated tokens over all ended attempts, or None without speculation.
        prompt_logprobs: Log probabilities of the prompt so far, or None if not requested.
        prefill_us: Prefill time in microseconds, as the engine reports it.
        resumes: Number of attempts that continued an answer already begun.
        ending: The end of the current attempt, or None while the attempt runs.
        is_fresh: Whether the current attempt has produced no token yet.
        closing: Event fields that the router reports if this process is killed, or empty.
        attempts: Attempts of the answer so far.
        attempt_from: Number of emitted tokens when the current attempt was submitted.
        was_nudged: Whether the answer was so late that a keep-alive was due.
        guard: Applies the tenant's rules to the answer, or None without rules.
        listener: Called at the first token of an attempt, at the attempt's end, and at a nudge.
        score: Score of the scored tokens, or None if the engine has reported no score.
    """

    __slots__ = (
        "_format_logprobs",
        "_line",
        "_rest",
        "attempt_from",
        "attempts",
        "cached_tokens",
        "closing",
        "drafts",
        "emitted",
        "ending",
        "first_at_s",
        "guard",
        "is_fresh",
        "itl_max_s",
        "last_at_s",
        "listener",
        "pipe",
        "placed",
        "prefill_us",
        "prompt_logprobs",
        "resumes",
        "score",
        "spec",
        "was_nudged",
    )

    def __init__(self, spec: GenerationSpec) -> None:
        self.spec = spec
        self.pipe = spec.new_pipe()
        self._line: LogprobLine | None = None
        self._format_logprobs: LogprobFormat | None = None
        if spec.new_logprobs is not None:
            self._line, self._format_logprobs = spec.new_logprobs()
        self.guard = None if spec.new_guard is None else spec.new_guard()
        if isinstance(self.guard, JudgedAnswer):
            self.guard.on_release = self._take_released
        self._rest: tuple[AnswerDelta, list[TokenLogprob]] | None = None
        self.emitted = array("I")
        self.first_at_s = self.last_at_s = self.itl_max_s = 0.0
        self.placed: AttemptPlacement | None = None
        self.cached_tokens = 0
        self.closing = b""
        self.attempt_from = 0
        self.attempts: list[Attempt] = []
        self.prefill_us = 0
        self.drafts: engine.Drafts | None = None
        asked = spec.prompt_logprobs is not None
        self.prompt_logprobs = PromptLogprobLine(spec.prompt) if asked else None
        self.resumes = 0
        self.score: engine.Score | None = None
        self.is_fresh = True
        self.was_nudged = False
        self.ending: GenerationEnd | None = None
        self.listener: Callable[[], None] | None = None

    def push_one(self, token: int, now_s: float) -> None:
        """Process the token of a step that computed exactly one token, which is the usual case."""
        self.push((token,), now_s)

    @abstractmethod
    def push(self, tokens: Sequence[int], now_s: float) -> None:
        """Process one engine step's tokens, or raise IndexError if the model lacks a token id."""

    def learn_logprobs(self, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        """Record the log probabilities of a token that a later `push` will process."""
        if self._line is not None:
            self._line.learn(logprob, top)

    def taken(self, tokens: Sequence[int]) -> tuple[AnswerDelta, list[TokenLogprob]]:
        """Run the last tokens through the pipe, and return the delta and log probabilities.

        A message may have tokens after the answer's end. They are dropped and not counted, because
        their number depends only on how the engine groups tokens.
        """
        pipe, line = self.pipe, self._line
        if line is None and (len(tokens) == 1 or not pipe.may_stop):
            return pipe.push(tokens), []
        known = [] if line is None else line.entries(tokens)
        delta, told = NOTHING, list[TokenLogprob]()
        # Tokens pass one by one, because log probabilities need the text of each token.
        for index, token in enumerate(tokens):
            if pipe.is_stopped:
                del self.emitted[index - len(tokens) :]
                break
            before = pipe.characters
            delta = joined(delta, pipe.push((token,)))
            if line is None:
                continue
            line.push(known[index : index + 1], pipe.characters - before)
            # A parsed answer is split into content, reasoning and calls, so that a token cannot be
            # assigned to one of these parts with certainty.
            told += line.rest() if pipe.is_parsed else line.shown(pipe.shown)
        return delta, told

    @property
    def is_filtered(self) -> bool:
        """Whether a tenant's rule has ended the answer. Read this only after the answer's end."""
        if self.guard is None:
            return False
        self.held_back()  # a rule may match only at the end of the text
        return bool(self.guard.blocked_by)

    def held_back(self) -> tuple[AnswerDelta, list[TokenLogprob]]:
        """Return the rest of an ended answer that the pipe and the guard had not yet released."""
        guard = self.guard
        if guard is None:
            return self._piped_rest()
        if self._rest is None:
            self._rest = guard.finished(*self._piped_rest(), len(self.emitted))
        return self._rest

    def _take_released(self, delta: AnswerDelta, entries: list[TokenLogprob]) -> None:
        """Show text that verdicts of judges release, or end the answer if a verdict blocks it."""
        if self._rest is not None:  # the answer has ended, so the text joins the rest
            self._rest = joined(self._rest[0], delta), self._rest[1] + entries
        elif delta is not NOTHING or entries:
            self.show(delta, entries)
        if self.guard is not None and self.guard.blocked_by:
            self.end(GenerationEnd(EndKind.FILTERED, ErrorCode.CONTENT_FILTER))

    @abstractmethod
    def show(self, delta: AnswerDelta, entries: list[TokenLogprob]) -> None:
        """Add a piece of the answer to the output."""

    def _piped_rest(self) -> tuple[AnswerDelta, list[TokenLogprob]]:
        pipe, line = self.pipe, self._line
        was_stopped = pipe.is_stopped
        delta = pipe.flush()
        if line is None:
            return delta, []
        return delta, line.shown(pipe.shown) if was_stopped or pipe.is_stopped else line.rest()

    def note_time(self, now_s: float) -> float:
        """Record the time of tokens. Returns the seconds since the previous tokens, at first 0."""
        if self.is_fresh:
            self.is_fresh = False
            if self.attempts:
                self.attempts[-1].first_at_s = now_s
            self._notify()
            if self.first_at_s == 0.0:
                self.first_at_s = self.last_at_s = now_s
                return 0.0
        gap_s = now_s - self.last_at_s
        self.last_at_s = now_s
        self.itl_max_s = max(self.itl_max_s, gap_s)
        return gap_s

    def place(self, placed: wire.Placed) -> None:
        """Record the replica and waits of the current attempt."""
        if self.placed is None:
            self.cached_tokens = placed.cached_tokens
        self.placed = placement_of(placed)
        if not self.attempts:
            return
        self._learn_interruptions(placed.before)
        if self.attempts[-1].placed is not None:  # an older router omits the reason
            self._learn_interruptions([wire.Interruption(ended_us=placed.queue_us)])
        self.attempts[-1].placed = self.placed

    def _learn_interruptions(self, before: Iterable[wire.Interruption]) -> None:
        """Record dispatches that ended while the router kept the request in its queue."""
        for it in before:
            begun(self.attempts, self.attempts[-1].interrupted(it, len(self.emitted)))

    @abstractmethod
    def expect_end(self) -> None:
        """Record that the next tokens end the answer, so that their output may wait for the end."""

    def learn_outcome(self, outcome: wire.Outcome) -> None:
        """Record the router's report at the end of the current attempt."""
        self.prefill_us = outcome.prefill_us
        if outcome.HasField("drafts"):
            self.drafts = summed(self.drafts, outcome.drafts)
        if self.spec.scored_tokens and outcome.HasField("score"):
            self.score = outcome.score
        if self.attempts:
            self._learn_interruptions(outcome.before)
        if self.attempts and outcome.HasField("decision"):
            self.attempts[-1].decision = detached(outcome.decision)
        self.end(ending_of(outcome))

    def end(self, ending: GenerationEnd) -> None:
        """End the current attempt. Later calls have no effect until the next attempt begins."""
        if self.ending is None:
            self.ending = ending
            self._notify()

    def nudge(self) -> None:
        """Call the listener, because a keep-alive is due after a long time without tokens."""
        self.was_nudged = True
        self._notify()

    @property
    def has_begun(self) -> bool:
        """Whether the client has received a part of the request's answer, or a keep-alive."""
        return bool(self.emitted) or self.was_nudged or self.spec.is_begun

    @property
    def output_tokens_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self.spec.output_tokens_max - len(self.emitted)

    def begin_attempt(self) -> GenerationEnd | None:
        """Begin an attempt. If the answer is already complete, return its ending instead."""
        self.ending = None
        self.is_fresh = True
        if self._line is not None:
            self._line.unlearn()
        if self.emitted and not self.spec.ignore_eos and self.emitted[-1] in self.spec.end_ids:
            self.ending = GenerationEnd(EndKind.STOP)
        elif self.output_tokens_left <= 0:
            self.ending = GenerationEnd(EndKind.LENGTH)
        return self.ending

    def use_pool(self, pool_id: str) -> None:
        """Let later attempts be in another pool."""
        self.spec = self.spec._replace(pool_id=pool_id)
        if self.closing:
            # A later value of a field replaces an earlier one in the same message.
            self.closing += RequestEvent(pool_id=pool_id).SerializeToString()

    def begin_submission(self, cell_id: str, router_id: str, now_s: float) -> None:
        """Record the cell of the attempt, before `submit_message` is called."""
        number = self.attempts[-1].number + 1 if self.attempts else 0
        self.prefill_us = 0
        begun(self.attempts, Attempt(number, cell_id, router_id, now_s, len(self.emitted)))

    def end_submission(self, now_s: float) -> None:
        """Record the end of the attempt. An attempt without an ending was cancelled."""
        attempt = self.attempts[-1]
        attempt.ended_at_s = now_s
        if (ending := self.ending) is not None:
            attempt.outcome, attempt.reason = ending.outcome, ending.message
        attempt.prefill_us = self.prefill_us
        attempt.output_tokens = len(self.emitted) - attempt.emitted_before

    def submit_message(
        self,
        handle: int,
        cell_id: str,
        deadline_ms: int,
        admission_ms: int = 0,
        make: Callable[..., wire.Submit] = wire.Submit,
        *,
        reads_prompt_ids: bool = True,
    ) -> wire.Submit:
        """Return the message that submits the rest of the answer to a router.

        `make` constructs the message. The method `submits.add` of a batch constructs it in place.
        `reads_prompt_ids` is false for routers of the last release.
        """
        spec, self.attempt_from = self.spec, len(self.emitted)
        prompt, hashes = spec.prompt, spec.block_hashes
        if self.emitted:
            prompt = array("I", spec.prompt) + self.emitted
            hashes = chained_hashes(prompt, spec.cache_root, known=hashes)
        message = make(
            handle=handle,
            request_id=spec.request_id,
            cell_id=cell_id,
            tenant_id=spec.tenant_id,
            tier_priority=spec.tier_priority,
            tenant_weight=spec.tenant_weight,
            tier_reserved_permille=spec.tier_reserved_permille,
            is_preemptible=spec.is_preemptible,
            prompt=() if reads_prompt_ids else prompt,
            prompt_ids=packed_ids(prompt) if reads_prompt_ids else b"",
            block_hashes=hashes,
            output_tokens_max=self.output_tokens_left,
            sampling=spec.sampling,
            cache_root=spec.cache_root,
            adapter_digest=spec.adapter_digest,
            session_hash=spec.session_hash,
            deadline_ms=deadline_ms,
            admission_ms=admission_ms,
            ignore_eos=spec.ignore_eos,
            resumed_tokens=len(self.emitted),
            is_begun=spec.is_begun,
            absence_ms=0 if self.has_begun else spec.absence_ms,
            traceparent=self._traceparent(),
            tracestate=spec.tracestate,
            closing=self.closing,
            was_placed=self.placed is not None,
            attempt=self._number,
        )
        if spec.scored_tokens or spec.pinned_blocks:
            message.scored_tokens = spec.scored_tokens
            message.pinned_blocks = spec.pinned_blocks
        line = self.prompt_logprobs
        if line is not None and spec.prompt_logprobs is not None and not line.is_whole:
            message.prompt_logprobs = spec.prompt_logprobs
            message.block_hashes = b""  # log probabilities need the whole prompt computed
        if spec.prediction:
            message.prediction.extend(spec.prediction)
        return message

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens that an attempt begins with: the prompt, and the tokens emitted."""
        return len(self.spec.prompt) + len(self.emitted)

    @property
    def _number(self) -> int:
        """Number of the current attempt."""
        return self.attempts[-1].number if self.attempts else 0

    def _traceparent(self) -> str:
        spec = self.spec
        if not spec.traceparent:
            return ""
        return attempt_traceparent(spec.traceparent, spec.choice, self._number)

    def _notify(self) -> None:
        if self.listener is not None:
            self.listener()


class WholeGeneration(Generation):
    """Collects one answer.

    Attributes:
        answer: Visible text so far.
    """

    __slots__ = ("answer",)

    def __init__(self, spec: GenerationSpec) -> None:
        super().__init__(spec)
        self.answer = ChoiceText()

    @property
    def logprobs(self) -> dict[str, object] | None:
        """Log probabilities of the visible text in the client's form, or None if not requested."""
        form, prompt = self._format_logprobs, self.prompt_logprobs
        if form is None:
            return None
        answer = [] if self.spec.is_echo_alone else self.answer.logprobs
        return form(answer if prompt is None else [*prompt.entries, *answer])

    def push(self, tokens: Sequence[int], now_s: float) -> None:
        """Collect the text of one engine step's tokens."""
        if self.ending is None:
            self.emitted.extend(tokens)
            self.note_time(now_s)
            delta, entries = self.taken(tokens)
            if (guard := self.guard) is not None:
                delta, entries = guard.passed(delta, entries, len(self.emitted))
                if guard.blocked_by:
                    self.end(GenerationEnd(EndKind.FILTERED, ErrorCode.CONTENT_FILTER))
            self.show(delta, entries)
            if self.pipe.is_stopped:
                self.end(GenerationEnd(EndKind.STOP))

    def show(self, delta: AnswerDelta, entries: list[TokenLogprob]) -> None:
        """Add a piece to the answer."""
        self.answer.add(delta, entries)

    def expect_end(self) -> None:
        """Do nothing, because a collected answer has no write that could wait."""

    def finish(self) -> None:
        """Add the text that was held back until the end of the answer."""
        self.answer.add(*self.held_back())
