"""From a validated request to one accepted exchange: limits, the model that answers, the event."""

import time
from collections.abc import Callable

from aiohttp import web

from gateway.bases.assets import AssetCache
from gateway.directory import Directory, Principal
from gateway.dispatch.exchange import Exchange, Tally
from gateway.dispatch.generation import GenerationSpec
from gateway.endpoints.run import Means, Run, now_s
from gateway.endpoints.submission import generation_specs
from gateway.endpoints.task import Plan, Task
from gateway.limits.limiter import Limiter, Reservation
from gateway.metrics import GatewayMetrics
from gateway.server.identity import Identity, identity_of
from gateway.server.middleware import note_outcome
from sluice.errors import ErrorCode, PlatformError, RejectedError
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

# Refusals after which a model that stands in may answer: the wanted one is saturated or down.
_STAND_IN = frozenset(
    {
        ErrorCode.NO_CAPACITY,
        ErrorCode.QUEUE_FULL,
        ErrorCode.OVERLOADED,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.ENGINE_BUSY,
        ErrorCode.UNAVAILABLE,
        ErrorCode.REPLICA_LOST,
    }
)


class Completer:
    """Answers tasks."""

    def __init__(
        self,
        *,
        directory: Directory,
        assets: AssetCache,
        limiter: Limiter,
        means: Means,
        metrics: GatewayMetrics,
        emit: Callable[[RequestEvent], None],
        gateway_id: str,
    ) -> None:
        """Compose; `emit` takes one event per accepted request and never blocks."""
        self._directory = directory
        self._assets = assets
        self._limiter = limiter
        self._means = means
        self._metrics = metrics
        self._emit = emit
        self._gateway_id = gateway_id

    async def answer(
        self, request: web.Request, principal: Principal, task: Task
    ) -> web.StreamResponse:
        """Answer one task, by the model that it names or by one that stands in for it."""
        received_at_s, received_at_unix_ms = now_s(), time.time_ns() // 1_000_000
        identity = identity_of(request)
        plan = await self._plan(task, identity, principal, task.fields.model)
        exchange = Exchange(
            uid=identity.uid,
            request_id=identity.request_id,
            trace_id=identity.trace_id,
            endpoint=task.endpoint,
            received_at_s=received_at_s,
            received_at_unix_ms=received_at_unix_ms,
            principal=principal,
            model=plan.resolved.model,
            requested_model=plan.resolved.name,
            reservation=await self._reserve(principal, task, plan),
            is_stream=bool(task.fields.stream),
        )
        run = Run(self._close, request, task, exchange, plan)
        with run:
            try:
                return await run.answer(self._means)
            except PlatformError as refusal:
                if not await self._stands_in(run, refusal):
                    raise
            return await run.answer(self._means)

    async def _plan(self, task: Task, identity: Identity, principal: Principal, name: str) -> Plan:
        resolved = self._directory.resolve(principal, name)
        assets = await self._assets.get(resolved.model.base_digest)
        task.fields.check_vocabulary(len(assets.table.fragments))
        prompts = await task.prompts(assets, resolved)
        specs = list[GenerationSpec]()
        for prompt in prompts:
            specs += generation_specs(
                task.fields,
                identity=identity,
                principal=principal,
                resolved=resolved,
                assets=assets,
                prompt=prompt,
                first_index=len(specs),
                grammar=task.grammar(assets, prompt),
            )
        return Plan(resolved, assets, prompts, specs)

    async def _reserve(self, principal: Principal, task: Task, plan: Plan) -> Reservation:
        return await self._limiter.reserve(
            principal,
            plan.resolved.model.id,
            prompt_tokens=plan.prompt_tokens,
            output_tokens_max=plan.output_tokens_max,
            is_bounded=task.fields.output_tokens_max is not None,
            answers=len(plan.specs),
        )

    async def _stands_in(self, run: Run, refusal: PlatformError) -> bool:
        """Prepare `run` for the model that stands in; False when the refusal is the answer."""
        exchange, task = run.exchange, run.task
        if refusal.code not in _STAND_IN or run.has_begun or self._means.dispatcher.is_draining:
            return False
        principal = exchange.principal
        name = self._directory.fallback(principal, task.fields.model)
        if name is None:
            return False
        try:
            plan = await self._plan(task, identity_of(run.request), principal, name)
            plan = _with_time_left(plan, task, now_s() - exchange.received_at_s)
            tally = run.tally
            self._settle(exchange, tally, was_served=tally.output_tokens > 0)
            exchange.reservation = await self._reserve(principal, task, plan)
        except PlatformError:
            return False
        self._metrics.fallbacks.inc()
        exchange.model = plan.resolved.model
        run.start_over(plan)
        return True

    def _settle(self, exchange: Exchange, tally: Tally, *, was_served: bool) -> None:
        """Settle what is reserved, if anything still is, and count its tokens."""
        reservation, exchange.reservation = exchange.reservation, None
        if reservation is None:
            return
        is_computed = was_served or tally.placed is not None
        prompt_tokens = tally.prompt_tokens if is_computed else 0
        self._limiter.settle(
            reservation,
            prompt_tokens=prompt_tokens,
            output_tokens=tally.output_tokens,
            was_served=was_served,
        )
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.cached_tokens.inc(tally.cached_tokens)
        self._metrics.output_tokens.inc(tally.output_tokens)

    def _close(self, run: Run) -> None:
        """Settle, count and tell: once per accepted request, whatever happened."""
        ended_at_s, exchange, metrics, tally = now_s(), run.exchange, self._metrics, run.tally
        was_served = tally.output_tokens > 0 or not exchange.has_failed
        self._settle(exchange, tally, was_served=was_served)
        if run.has_begun and not exchange.first_sent_at_s:  # it began with a sign of life
            exchange.first_sent_at_s = tally.first_at_s
        note_outcome(run.request, exchange.outcome)
        if exchange.first_sent_at_s:
            metrics.ttft.observe(exchange.first_sent_at_s - exchange.received_at_s)
        if exchange.submitted_at_s:
            metrics.before_router.observe(exchange.submitted_at_s - exchange.received_at_s)
        metrics.total.observe(ended_at_s - exchange.received_at_s)
        if tally.resumes:
            metrics.resumes.inc(tally.resumes)
        self._emit(exchange.event(tally, self._gateway_id, ended_at_s))


def _with_time_left(plan: Plan, task: Task, spent_s: float) -> Plan:
    """Return a plan with what the caller's deadline leaves; RejectedError: nothing.

    A tier's deadline starts again: it says how long somebody waits in one queue.
    """
    if task.fields.deadline_ms is None:
        return plan
    left_ms = task.fields.deadline_ms - round(spent_s * 1000)
    if left_ms <= 0:
        raise RejectedError(ErrorCode.DEADLINE_EXCEEDED, "The deadline has passed.")
    deadline_ms = min(left_ms, plan.specs[0].deadline_ms)
    return plan._replace(specs=[it._replace(deadline_ms=deadline_ms) for it in plan.specs])
