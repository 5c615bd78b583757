"""Scores answers during the rollout of an adapter, by log probabilities of adapter and base.

Both the adapter and the base compute the log probabilities of an answer at the end of its prompt.
If the answer is equally likely under both, the adapter has no effect. Scores have the lowest
priority, neither delay the answer nor cost the caller anything, and exist only for a sample.
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog

from gateway.dispatch.dispatcher import GatewayDispatcher
from gateway.dispatch.generation import GenerationSpec, WholeGeneration
from gateway.endpoints.exchange import AnswerScore, HttpExchange, finish_reason
from gateway.endpoints.spare_tasks import SpareTasks, as_last
from gateway.metrics import GatewayMetrics
from gateway.rollouts.decision import ReleaseDecision
from gateway.text.pipe import TextPipe
from sluice.errors import ErrorCode, PlatformError
from sluice.hashing import cache_root, chained_hashes
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.telemetry.v1 import telemetry_pb2 as wire

log = structlog.get_logger(__name__)

_ANSWER_TOKENS_MAX = 256  # Scored tokens of an answer. More tokens would not improve the score.
_TOKENS_MAX = 4096  # Maximum number of tokens of prompt and answer. Longer requests are not scored.
_SCORE_S_MAX = 30.0
_DEADLINE_MS = 20_000  # Maximum wait in the router's queue, in milliseconds.
_PAUSE_S = 1.0  # Seconds between two scores of one release in this worker.
_FAILED_PAUSE_S = 60.0  # Pause after a failure, in seconds, because the cause (overload) may last.
_GREEDY = engine.Sampling()
_NO_SCORES = (
    "The engine scores no answers, so some gates of this rollout have no evidence: serve the model"
    " with an engine that does (openvino), or give its plan golden prompts."
)


class ScoreSampler:
    """Scores a sample of one worker's answers."""

    def __init__(
        self,
        *,
        spare: SpareTasks,
        dispatcher: GatewayDispatcher,
        metrics: GatewayMetrics,
        emit: Callable[[bytes], None],
        gateway_id: str,
    ) -> None:
        """All arguments are parts of the same worker.

        Args:
            spare: Tasks that compute scores, whose number is bounded.
            dispatcher: Dispatcher of scores alone, so that scores use no retries of other requests.
            metrics: Counts scores.
            emit: Queues one event per score and never blocks.
            gateway_id: Id of this worker.
        """
        self._spare = spare
        self._dispatcher = dispatcher
        self._made, self._failed = (metrics.scores.labels(fate) for fate in ("made", "failed"))
        self._emit = emit
        self._gateway_id = gateway_id
        # Releases that are being scored or were scored recently. A timer removes each release.
        self._busy: set[tuple[str, wire.Arm]] = set()

    def offer(self, original: HttpExchange) -> None:
        """Score the first answer of a request that has ended well, if its release is due.

        The score's event has the request's session, by which rollouts group dependent answers. A
        rollout's window ends without waiting for scores.
        """
        decision = original.decision
        if decision is None or decision.is_pinned or not original.model.adapter_digest:
            return
        release = decision.rollout_id, decision.arm
        if release in self._busy or not all(release) or self._spare.is_full:
            return
        specs = _specs(original)
        if specs is None:
            return
        self._busy.add(release)
        self._spare.begin(self._run(_score_of(original, decision), specs, release))

    async def _run(
        self,
        exchange: HttpExchange,
        specs: tuple[GenerationSpec, GenerationSpec],
        release: tuple[str, wire.Arm],
    ) -> None:
        try:
            pause_s = _PAUSE_S if await self._scored(exchange, specs) else _FAILED_PAUSE_S
            # The pause occupies no slot of the spare tasks.
            asyncio.get_running_loop().call_later(pause_s, self._busy.discard, release)
        except asyncio.CancelledError:
            self._busy.discard(release)
            raise

    async def _scored(
        self, exchange: HttpExchange, specs: tuple[GenerationSpec, GenerationSpec]
    ) -> bool:
        """Compute a score and emit its event, and return whether there is a score."""
        error: BaseException | None = None
        try:
            async with asyncio.timeout(_SCORE_S_MAX):
                await self._answer(exchange, specs)
        except TimeoutError:
            error = PlatformError(ErrorCode.DEADLINE_EXCEEDED, "The score took too long.")
        except PlatformError as refusal:
            error = refusal
        except asyncio.CancelledError as cancelled:
            error = cancelled
            raise
        except Exception as bug:
            # the outermost place, where an error of a score must not end the worker
            log.exception("score_failed", request_id=exchange.request_id)
            error = bug
        finally:
            exchange.end_by(error)
            (self._made if error is None else self._failed).inc()
            self._emit(exchange.event(exchange.tally, self._gateway_id, time.monotonic()))
        return error is None

    async def _answer(
        self, exchange: HttpExchange, specs: tuple[GenerationSpec, GenerationSpec]
    ) -> None:
        """Compute both scores, or raise PlatformError if a router refuses."""
        generations = [WholeGeneration(spec) for spec in specs]
        exchange.begin(generations, self._gateway_id)
        with self._dispatcher.dispatch(generations, exchange.answers_per_prompt) as answers:
            refusal = await answers.finished()
        if refusal is not None:
            raise PlatformError(refusal.code, refusal.message)
        own, base = [generation.score for generation in generations]
        exchange.outcome, exchange.status = finish_reason(generations[0]), 200
        if own is None or base is None:
            raise PlatformError(ErrorCode.UNSUPPORTED_PARAMETER, _NO_SCORES)
        exchange.score = AnswerScore(base.logprob, own.logprob, own.entropy)


def _score_of(original: HttpExchange, decision: ReleaseDecision) -> HttpExchange:
    """Return the exchange of a score, which no client has requested."""
    return replace(
        original,
        uid=f"{original.uid}-score",
        request_id=f"{original.request_id}-score",
        received_at_s=time.monotonic(),
        received_at_unix_ms=time.time_ns() // 1_000_000,
        reservation=None,
        applied=None,
        lost=None,
        is_stream=False,
        is_copy=True,
        decision=None,
        scored=decision,
        choices=2,
        answers_per_prompt=1,
        task=None,
        specs=(),
        generations=(),
        first_sent_at_s=0.0,
        outcome="",
        status=0,
        _begun=b"",
    )


def _specs(original: HttpExchange) -> tuple[GenerationSpec, GenerationSpec] | None:
    """Return the specs for the adapter and the base, or None if there is no text to score."""
    generation, model = original.generations[0], original.model
    spec, answer = generation.spec, generation.emitted[:_ANSWER_TOKENS_MAX]
    ids = array("I", spec.prompt) + answer
    if not answer or len(ids) >= _TOKENS_MAX:
        return None
    own = as_last(spec)._replace(
        request_id=f"{spec.request_id}-score",
        absence_ms=0,
        admission_ms=0,
        choice=0,
        prompt=ids,
        block_hashes=chained_hashes(ids, spec.cache_root, spec.block_hashes),
        output_tokens_max=1,  # The least that engines allow. The token is not billed.
        new_pipe=partial(TextPipe, generation.pipe.table),
        sampling=_GREEDY,
        deadline_ms=_DEADLINE_MS,
        ignore_eos=False,
        traceparent="",
        tracestate="",
        prediction=(),
        scored_tokens=len(answer),
    )
    root = cache_root(model.base_digest, "", original.principal.tenant.cache_salt)
    base = own._replace(
        request_id=f"{own.request_id}-base",
        choice=1,
        session_hash=0,
        adapter_digest="",
        cache_root=root,
        block_hashes=chained_hashes(ids, root),
    )
    return own, base
