"""From a validated request to one accepted exchange: limits, the model that answers, the event."""

import time
from collections.abc import Callable
from functools import partial

from aiohttp import hdrs, web

from gateway.bases.assets import AssetCache
from gateway.directory import Directory, Principal, ResolvedModel
from gateway.dispatch.exchange import Exchange, Lost, Tally
from gateway.endpoints.copies import Copies
from gateway.endpoints.keep_alive import KeepAlives
from gateway.endpoints.run import Means, Run, now_s
from gateway.endpoints.task import Plan, Task, plan_of
from gateway.endpoints.texts import Texts
from gateway.limits.limiter import Limiter, Reservation
from gateway.metrics import GatewayMetrics
from gateway.rollouts.decided import Decided
from gateway.rollouts.decision import Decision
from gateway.rollouts.open_requests import OpenRequests
from gateway.server.identity import Identity, identity_of
from gateway.server.middleware import note_outcome
from sluice.errors import ErrorCode, PlatformError, RejectedError

# How long a request waits for replicas of a pool that has none, where another model may answer. An
# engine that starts again at once, or a router that attaches its own, takes a second or two.
_ABSENCE_MS = 3000
# Above this a body takes work before its tokens are known: it is counted as a request first.
_COUNTED_LATER_BYTES_MAX = 16 << 10


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
        emit: Callable[[bytes], None],
        gateway_id: str,
        open_requests: OpenRequests,
        decided: Decided,
        copies: Copies,
        texts: Texts,
    ) -> None:
        """Compose.

        Args:
            directory: Knows names.
            assets: Of the bases.
            limiter: Of all callers.
            means: What answering takes.
            metrics: Of this worker.
            emit: Takes one event per accepted request and never blocks.
            gateway_id: Of this worker.
            open_requests: Where those are noted that a split decided about.
            decided: Counts what pins and splits decided.
            copies: Makes copies for shadow stages.
            texts: Keeps what tenants that opted in say and are answered.
        """
        self._directory = directory
        self._assets = assets
        self._limiter = limiter
        self._means = means
        self._keep_alives = KeepAlives(means.keep_alive_s)
        self._metrics = metrics
        self._emit = emit
        self._gateway_id = gateway_id
        self._open = open_requests
        self._decided = decided
        self._copies = copies
        self._texts = texts

    async def answer(
        self, request: web.Request, principal: Principal, task: Task
    ) -> web.StreamResponse:
        """Answer one task, by the model that it names or by one that stands in for it."""
        received_at_s, received_at_unix_ms = now_s(), time.time_ns() // 1_000_000
        identity = identity_of(request)
        resolved = self._resolve(task, identity, principal, task.fields.model, received_at_unix_ms)
        counted: Reservation | None = None
        try:
            if _takes_work(request):
                counted = await self._limiter.count(principal, resolved.model.id)
            plan = await self._plan(task, identity, principal, resolved)
            if principal.tenant.fallbacks:
                plan = self._with_patience(plan, task, principal)
            exchange = Exchange(
                uid=identity.uid,
                request_id=identity.request_id,
                trace_id=identity.trace_id,
                upstream=identity.upstream,
                endpoint=task.endpoint,
                received_at_s=received_at_s,
                received_at_unix_ms=received_at_unix_ms,
                principal=principal,
                model=resolved.model,
                requested_model=resolved.name,
                reservation=await self._reserve(principal, task, plan, counted),
                is_stream=bool(task.fields.stream),
                decision=resolved.decision,
                choices=len(plan.specs),
            )
            if resolved.shadow is not None:
                self._copies.make(task, identity, exchange, resolved.shadow)
            run = Run(self._close, request, task, exchange, plan)
            if principal.text_policy is not None:
                run.kept = self._texts.begin(principal.text_policy, task, identity.request_id)
            with run:
                return await self._answer(run)
        finally:
            if counted is not None:  # still so, if no answer was begun
                self._limiter.settle(counted, prompt_tokens=0, output_tokens=0, was_served=True)
            self._open.discard(identity.uid)

    async def _answer(self, run: Run) -> web.StreamResponse:
        """Return what the wanted model answers, or one that stands in for it."""
        try:
            return await self._answer_by_release(run)
        except PlatformError as refusal:
            if not await self._stands_in(run, refusal):
                raise
            wanted = refusal.with_traceback(None)  # whose frames hold all of the first attempt
        try:
            return await run.answer(self._means, self._keep_alives)
        except PlatformError as other:
            policy = other.code.policy
            if not (policy.lets_stand_in or policy.is_passed_over):
                raise
            raise wanted from other  # nobody asked for the other model
        finally:
            del wanted  # when raised, it holds this frame

    async def _answer_by_release(self, run: Run) -> web.StreamResponse:
        """Return the answer of the release that a split chose, of control if it is not loaded."""
        try:
            return await run.answer(self._means, self._keep_alives)
        except PlatformError as refusal:
            control = run.plan.resolved.instead
            if control is None or not refusal.code.policy.goes_to_control or run.has_begun:
                raise
            self._copies.tell_fault(run.exchange, identity_of(run.request), run.tally, refusal)
        exchange, task = run.exchange, run.task
        plan = await self._plan(task, identity_of(run.request), exchange.principal, control)
        plan = _with_time_left(plan, task, now_s() - exchange.received_at_s)
        exchange.stand_in(control.model, control.decision, None)
        run.start_over(plan)
        return await run.answer(self._means, self._keep_alives)

    def _resolve(
        self,
        task: Task,
        identity: Identity,
        principal: Principal,
        name: str,
        received_at_unix_ms: int,
    ) -> ResolvedModel:
        """Return what answers; that holds for all of the request's life."""
        resolved = self._directory.resolve(
            principal, name, task.fields.session, identity.request_id
        )
        if resolved.decision is not None and resolved.decision.rollout_id:
            self._open.add(identity.uid, received_at_unix_ms)
        return resolved

    async def _plan(
        self, task: Task, identity: Identity, principal: Principal, resolved: ResolvedModel
    ) -> Plan:
        return await plan_of(
            task, identity=identity, principal=principal, resolved=resolved, cache=self._assets
        )

    def _with_patience(self, plan: Plan, task: Task, principal: Principal) -> Plan:
        """Return a plan that does not wait long for replicas if another model could answer it."""
        name = self._directory.fallback(principal, task.fields.model)
        if name is None:
            return plan
        try:
            request_id = plan.specs[0].request_id
            other = self._directory.resolve(principal, name, task.fields.session, request_id)
        except PlatformError:
            return plan
        longest, context = max([len(it.ids) for it in plan.prompts]), other.context_tokens_max
        if context and longest >= context:
            return plan
        pool_id = other.model.pool_id
        if pool_id == plan.specs[0].pool_id or not self._means.dispatcher.serves(pool_id):
            return plan
        return plan._replace(specs=[it._replace(absence_ms=_ABSENCE_MS) for it in plan.specs])

    async def _reserve(
        self, principal: Principal, task: Task, plan: Plan, counted: Reservation | None = None
    ) -> Reservation:
        limiter = self._limiter
        take = limiter.reserve if counted is None else partial(limiter.reserve_counted, counted)
        return await take(
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
        if not refusal.code.policy.lets_stand_in or run.has_begun:
            return False
        if self._means.dispatcher.is_draining:
            return False
        principal = exchange.principal
        name = self._directory.fallback(principal, task.fields.model)
        if name is None:
            return False
        try:
            identity, received_at_unix_ms = identity_of(run.request), exchange.received_at_unix_ms
            resolved = self._resolve(task, identity, principal, name, received_at_unix_ms)
            plan = await self._plan(task, identity, principal, resolved)
            plan = _with_time_left(plan, task, now_s() - exchange.received_at_s)
            tally = run.tally
            self._settle(exchange, tally, was_served=tally.output_tokens > 0)
            exchange.reservation = await self._reserve(principal, task, plan)
        except PlatformError:
            return False
        self._metrics.fallbacks.inc()
        lost = None
        if tally.placed is not None:
            lost = Lost(exchange.model.id, tally.placed_prompt_tokens, tally.output_tokens)
        exchange.stand_in(resolved.model, resolved.decision, lost)
        run.start_over(plan)
        return True

    def _settle(self, exchange: Exchange, tally: Tally, *, was_served: bool) -> None:
        """Settle what is reserved, if anything still is, and count its tokens."""
        reservation, exchange.reservation = exchange.reservation, None
        exchange.applied = reservation or exchange.applied
        if reservation is None:
            return
        is_computed = was_served or tally.placed is not None
        prompt_tokens = tally.prompt_tokens if is_computed else 0
        self._limiter.settle(
            reservation,
            prompt_tokens=prompt_tokens,
            output_tokens=tally.output_tokens,
            was_served=was_served or exchange.is_charged,
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
        if tally.submitted_at_s:
            metrics.before_router.observe(tally.submitted_at_s - exchange.received_at_s)
        metrics.total.observe(ended_at_s - exchange.received_at_s)
        metrics.ended(
            exchange.principal.tenant.id,
            exchange.outcome if exchange.has_failed else "",
            ttft_s=(exchange.first_sent_at_s or tally.first_at_s or ended_at_s)
            - exchange.received_at_s,
            decode_s=ended_at_s - (tally.first_at_s or ended_at_s),
            prefill_s=tally.prefill_us / 1e6,
            prompt_tokens=tally.prompt_tokens,
            output_tokens=tally.output_tokens,
            answers=exchange.choices,
        )
        if tally.resumes:
            metrics.resumes.inc(tally.resumes)
        if exchange.decision is not None:
            self._note(run, exchange.decision)
        self._emit(exchange.event(tally, self._gateway_id, ended_at_s))
        if run.kept is not None:
            self._texts.offer(run.kept, exchange, run.plan, run.generations)

    def _note(self, run: Run, decision: Decision) -> None:
        """Count a request whose release was not just what its name stands for."""
        exchange = run.exchange
        self._decided.note(exchange.principal.tenant.id, exchange.model.id, decision)
        if decision.rollout_id and not exchange.has_failed:
            exchange.flaws = run.flaws


def _takes_work(request: web.Request) -> bool:
    """Return whether a body may be large: by its length, or since that is not known."""
    length = request.content_length
    is_packed = hdrs.CONTENT_ENCODING in request.headers
    return length is None or length > _COUNTED_LATER_BYTES_MAX or is_packed


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
