"""Copies requests for the shadow stage of a rollout, where the canary answers the copies.

A copy has the lowest priority, costs the caller nothing, and can neither delay nor fail the
original request. The number of copies is bounded, and a stopping server creates no copies.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from gateway.bases.assets import AssetCache
from gateway.dispatch.dispatcher import GatewayDispatcher
from gateway.dispatch.generation import WholeGeneration
from gateway.dispatch.routers import RouterLinks
from gateway.dispatch.tally import Tally
from gateway.endpoints.exchange import HttpExchange, finish_reason, flaws_in
from gateway.endpoints.scores import ScoreSampler
from gateway.endpoints.spare_tasks import SpareTasks, as_last
from gateway.endpoints.submission import specs_of
from gateway.endpoints.task import TextTask
from gateway.metrics import GatewayMetrics
from gateway.resolved import ResolvedModel
from gateway.rollouts.open_requests import OpenRequests
from gateway.server.identity import CallerIdentity
from sluice import tracecontext
from sluice.errors import ErrorCode, PlatformError

log = structlog.get_logger(__name__)

_COPY_S_MAX = 120.0  # seconds after which a copy is cancelled, since no client would cancel it


class Copies:
    """The shadow copies of one worker's requests."""

    def __init__(
        self,
        *,
        assets: AssetCache,
        dispatcher: GatewayDispatcher,
        open_requests: OpenRequests,
        metrics: GatewayMetrics,
        emit: Callable[[bytes], None],
        gateway_id: str,
        spare: SpareTasks,
        scores: ScoreSampler,
    ) -> None:
        """All arguments are parts of the same worker.

        Args:
            assets: Assets of the bases.
            dispatcher: Dispatcher of copies alone, so that copies use no retries of other requests.
            open_requests: Records copies while they run.
            metrics: Counts copies.
            emit: Queues one event per copy and never blocks.
            gateway_id: Id of this worker.
            spare: Tasks that run copies, whose number is bounded.
            scores: Scores the canary's answers.
        """
        self._assets = assets
        self._dispatcher = dispatcher
        self._open = open_requests
        self._emit = emit
        self._gateway_id = gateway_id
        self._spare = spare
        self._scores = scores
        self._sent, self._dropped = (metrics.copies.labels(fate) for fate in ("sent", "dropped"))

    def make(
        self,
        task: TextTask,
        identity: CallerIdentity,
        original: HttpExchange,
        shadow: ResolvedModel,
    ) -> None:
        """Schedule a copy of an accepted request for `shadow`, unless too many copies run."""
        if self._spare.is_stopped:
            return
        if self._spare.is_full:
            self._dropped.inc()
            return
        self._sent.inc()
        self._spare.begin(self._run(task, _copied(identity), original, shadow))

    def emit_fault(
        self, original: HttpExchange, identity: CallerIdentity, tally: Tally, fault: PlatformError
    ) -> None:
        """Emit an event for a canary that failed to begin a request. Control answers the request.

        Rollouts count this event as a failed copy, because the request's own event counts for
        control.
        """
        names = _copied(identity)
        exchange = replace(
            original,
            task=None,
            generations=(),
            uid=names.uid,
            request_id=names.request_id,
            upstream=names.upstream,
            reservation=None,
            applied=None,
            is_copy=True,
            _begun=b"",
        )
        exchange.end_by(fault)
        self._emit(exchange.event(tally, self._gateway_id, time.monotonic()))

    async def _run(
        self,
        task: TextTask,
        identity: CallerIdentity,
        original: HttpExchange,
        shadow: ResolvedModel,
    ) -> None:
        exchange = HttpExchange(
            uid=identity.uid,
            request_id=identity.request_id,
            trace_id=identity.trace_id,
            upstream=identity.upstream,
            endpoint=task.endpoint,
            received_at_s=time.monotonic(),
            received_at_unix_ms=time.time_ns() // 1_000_000,
            principal=original.principal,
            model=shadow.model,
            requested_model=original.requested_model,
            reservation=None,
            is_stream=original.is_stream,
            decision=shadow.decision,
            choices=original.choices,
            task=task,
            answers_per_prompt=task.choices,
            is_copy=True,
        )
        del task  # so that the body is freed while the answer is awaited
        self._open.add(identity.uid, exchange.received_at_unix_ms)
        error: BaseException | None = None
        try:
            async with asyncio.timeout(_COPY_S_MAX):
                await self._answer(exchange, identity, shadow)
        except TimeoutError:
            error = PlatformError(ErrorCode.DEADLINE_EXCEEDED, "The copy took too long.")
        except PlatformError as refusal:
            error = refusal
        except asyncio.CancelledError as cancelled:
            error = cancelled
            raise
        except Exception as bug:
            # An error of a copy must not end the worker, so all errors are caught here.
            log.exception("shadow_copy_failed", request_id=identity.request_id)
            error = bug
        finally:
            exchange.end_by(error)
            tally = exchange.tally
            if exchange.is_stream:  # the time at which a client would have received the first token
                exchange.first_sent_at_s = tally.first_at_s
            elif error is None:
                exchange.first_sent_at_s = time.monotonic()
            self._emit(exchange.event(tally, self._gateway_id, time.monotonic()))
            self._open.discard(identity.uid)

    async def _answer(
        self, exchange: HttpExchange, identity: CallerIdentity, shadow: ResolvedModel
    ) -> None:
        """Wait for all answers, or raise PlatformError if the copy is refused."""
        specs = await specs_of(
            exchange.body,
            identity=identity,
            principal=exchange.principal,
            resolved=shadow,
            cache=self._assets,
        )
        exchange.specs = [as_last(spec) for spec in specs]
        generations = [WholeGeneration(spec) for spec in exchange.specs]
        exchange.begin(generations, self._gateway_id)
        exchange.forget_body()
        with self._dispatcher.dispatch(generations, exchange.answers_per_prompt) as answers:
            refusal = await answers.finished()
        if refusal is not None:
            raise PlatformError(refusal.code, refusal.message)
        exchange.outcome, exchange.status = finish_reason(generations[0]), 200
        exchange.flaws = flaws_in(generations[0])
        self._scores.offer(exchange)


def spare_work(
    *,
    tasks_max: int,
    assets: AssetCache,
    links: RouterLinks,
    open_requests: OpenRequests,
    metrics: GatewayMetrics,
    emit: Callable[[bytes], None],
    gateway_id: str,
) -> tuple[SpareTasks, ScoreSampler, Copies]:
    """Return the background tasks, the score sampler and the copies of a worker.

    Scores and copies each have their own dispatcher, so their retries do not use the retry budget
    of requests.
    """
    spare = SpareTasks(tasks_max)
    scores = ScoreSampler(
        spare=spare,
        dispatcher=GatewayDispatcher(links),
        metrics=metrics,
        emit=emit,
        gateway_id=gateway_id,
    )
    copies = Copies(
        assets=assets,
        dispatcher=GatewayDispatcher(links),
        open_requests=open_requests,
        metrics=metrics,
        emit=emit,
        gateway_id=gateway_id,
        spare=spare,
        scores=scores,
    )
    return spare, scores, copies


def _copied(identity: CallerIdentity) -> CallerIdentity:
    """Return the ids of a copy, whose trace is a child of the request's trace."""
    uid, of_request = f"{identity.uid}-copy", tracecontext.request_span_id(identity.uid)
    upstream = identity.upstream._replace(span_id=of_request)
    own = tracecontext.traceparent(
        identity.trace_id, tracecontext.request_span_id(uid), sampled=upstream.is_sampled
    )
    request_id = f"{identity.request_id}-copy"
    return CallerIdentity(uid, request_id, identity.trace_id, own, upstream)
