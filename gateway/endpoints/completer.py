"""Handles requests for generated text, from authentication to the usage event."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web
from multidict import istr

from gateway.auto.board import AutoBoard
from gateway.auto.decision import AutoDecision
from gateway.bases.assets import AssetCache
from gateway.bodies.parsing import parse
from gateway.directory import Directory, Principal
from gateway.dispatch.dispatcher import GatewayDispatcher
from gateway.dispatch.generation import GenerationSpec
from gateway.dispatch.tally import Tally
from gateway.dispatch.tier_gate import GateAsk
from gateway.endpoints.copies import Copies
from gateway.endpoints.exchange import HttpExchange, Lost, flaws_in
from gateway.endpoints.guards import GuardBoard
from gateway.endpoints.reading import read_parsed, takes_work
from gateway.endpoints.reply import ReplyWriter
from gateway.endpoints.scores import ScoreSampler
from gateway.endpoints.submission import specs_of
from gateway.endpoints.task import TextTask
from gateway.endpoints.texts import KeptRequest, Texts
from gateway.guard.findings import rule_ids
from gateway.limits.limiter import Limiter, Reservation
from gateway.metrics import GatewayMetrics
from gateway.model_pools import PoolChooser
from gateway.resolved import ResolvedModel
from gateway.rollouts.decided import Decided
from gateway.rollouts.decision import ReleaseDecision
from gateway.rollouts.open_requests import OpenRequests
from gateway.server.identity import CallerIdentity, identity_of
from gateway.server.middleware import authenticate, note_outcome
from sluice.errors import ErrorCode, PlatformError, RejectedError

# Maximum wait in milliseconds for a pool without replicas if another model may answer. An engine
# that restarts, or a router that attaches to its engines, needs a second or two.
_ABSENCE_MS = 3000
# Request header. With `true`, the answer contains the findings of the tenant's rules.
_FILTER_RESULTS = istr("x-sluice-filter-results")


class Completer:
    """Serves every API of generated text."""

    def __init__(
        self,
        *,
        directory: Directory,
        assets: AssetCache,
        limiter: Limiter,
        dispatcher: GatewayDispatcher,
        replies: ReplyWriter,
        metrics: GatewayMetrics,
        emit: Callable[[bytes], None],
        gateway_id: str,
        open_requests: OpenRequests,
        decided: Decided,
        copies: Copies,
        scores: ScoreSampler,
        texts: Texts,
        guards: GuardBoard,
        auto: AutoBoard,
        pools: PoolChooser,
    ) -> None:
        """All arguments are parts of the same worker.

        Args:
            directory: Names of models, and the rights of callers.
            assets: Tokenizers and templates of the bases.
            limiter: Limits of all callers.
            dispatcher: Submits requests. It also reports the served pools, and whether it drains.
            replies: Writes replies to clients.
            metrics: Metrics of this worker.
            emit: Queues one event per accepted request and never blocks.
            gateway_id: Id of this worker.
            open_requests: Records the requests whose release a rollout's split has chosen.
            decided: Counts the requests whose release a pin or a rollout's split has chosen.
            copies: Creates copies for shadow stages.
            scores: Scores answers of adapters in rollout.
            texts: Retains requests and answers of tenants that opted in.
            guards: Applies the rules of tenants to requests and answers.
            auto: Chooses the model that answers `auto`, and the fallback of a failing model.
            pools: Chooses the pool of a model that several pools serve.
        """
        self._directory = directory
        self._assets = assets
        self._limiter = limiter
        self._dispatcher = dispatcher
        self._replies = replies
        self._metrics = metrics
        self._emit = emit
        self._gateway_id = gateway_id
        self._open = open_requests
        self._decided = decided
        self._copies = copies
        self._scores = scores
        self._texts = texts
        self._guards = guards
        self._auto = auto
        self._pools = pools

    async def handle(self, api: type[TextTask], request: web.Request) -> web.StreamResponse:
        """Answer one request of an API."""
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, api.scope)
        # No local variable references the task, so that its body is freed while a stream runs.
        return await self.answer(
            request, principal, await read_parsed(request, partial(parse, api))
        )

    async def resolved(
        self, principal: Principal, task: TextTask, identity: CallerIdentity
    ) -> ResolvedModel:
        """Return the model that would answer a request now."""
        auto = await self._auto.decide(principal, task, identity.uid)
        name = task.model if auto is None else auto.model
        found = self._directory.resolve(principal, name, task.session, identity.request_id)
        return self._pools.place(found, task.session, identity.request_id)

    async def answer(
        self, request: web.Request, principal: Principal, task: TextTask
    ) -> web.StreamResponse:
        """Answer one request body, by its model or by a fallback model."""
        exchange, control, kept = await self._accepted(request, principal, task)
        del task, principal  # frees the body while a stream runs
        try:
            try:
                if control is None:  # the usual case
                    return await self._replies.reply(request, exchange)
                return await self._answer_by_release(request, exchange, control)
            except PlatformError as refusal:
                if not await self._stands_in(request, exchange, refusal):
                    raise
                # frees the frames, which reference the first attempt
                wanted = refusal.with_traceback(None)
            try:
                return await self._replies.reply(request, exchange)
            except PlatformError as other:
                policy = other.code.policy
                if not (policy.lets_stand_in or policy.is_passed_over):
                    raise
                raise wanted from other  # the client knows only the model that it requested
            finally:
                del wanted  # breaks the reference cycle of the raised error and this frame
        except BaseException as error:
            exchange.end_by(error)
            raise
        finally:
            self._close(request, exchange, kept)
            self._open.discard(exchange.uid)

    async def _accepted(
        self, request: web.Request, principal: Principal, task: TextTask
    ) -> tuple[HttpExchange, ResolvedModel | None, KeptRequest | None]:
        """Choose the model, encode the prompts and reserve the limits of a request.

        Returns:
            The exchange, control's model if control answers after a failure of the canary, and the
            texts to keep.

        Raises:
            PlatformError: The request is refused.
        """
        received_at_s, received_at_unix_ms = time.monotonic(), time.time_ns() // 1_000_000
        identity = identity_of(request)
        auto = await self._auto.decide(principal, task, identity.uid)
        name = task.model if auto is None else auto.model
        resolved = self._resolve(task, identity, principal, name, received_at_unix_ms)
        counted: Reservation | None = None
        try:
            counted = await self._entered(request, principal, task, resolved, auto)
            specs = await self._specs(task, request, principal, resolved)
            if auto is not None or principal.tenant.fallbacks:
                specs = self._with_patience(specs, task, principal, auto)
            exchange = HttpExchange(
                uid=identity.uid,
                request_id=identity.request_id,
                trace_id=identity.trace_id,
                upstream=identity.upstream,
                endpoint=task.endpoint,
                received_at_s=received_at_s,
                received_at_unix_ms=received_at_unix_ms,
                principal=principal,
                model=resolved.model,
                requested_model=task.model,
                reservation=await self._reserve(principal, resolved, task, specs, counted),
                is_stream=bool(task.stream),
                decision=resolved.decision,
                auto=auto,
                choices=len(specs),
                task=task,
                specs=specs,
                answers_per_prompt=task.choices,
                param_names=task.param_names,
            )
            if resolved.shadow is not None:
                self._copies.make(task, identity, exchange, resolved.shadow)
            kept = None
            if principal.text_policy is not None:
                kept = self._texts.begin(principal.text_policy, task, identity.request_id)
        except BaseException:
            if counted is not None:  # the request was counted, but no answer was begun
                self._limiter.settle(counted, prompt_tokens=0, output_tokens=0, was_served=True)
            self._open.discard(identity.uid)
            raise
        return exchange, resolved.instead, kept

    async def _entered(
        self,
        request: web.Request,
        principal: Principal,
        task: TextTask,
        resolved: ResolvedModel,
        auto: AutoDecision | None,
    ) -> Reservation | None:
        """Refuse a request before any work if possible, and count a large request in its limits."""
        if self._dispatcher.is_gated and self._may_be_gated(principal, task, auto):
            self._require_open_gate(principal, task, resolved.model.pool_id)
        if not takes_work(request):
            return None
        return await self._limiter.count(principal, resolved.model.id)

    def _may_be_gated(
        self, principal: Principal, task: TextTask, auto: AutoDecision | None
    ) -> bool:
        """Return whether this gateway may refuse a request early, if routers refuse its tier.

        Only the router can decide about a request that sets its own deadline, or that a fallback
        model may answer.
        """
        if task.deadline_ms or self._auto.other(principal, task.model, auto) is not None:
            return False
        return task.is_lowered or not self._directory.is_highest(principal.tier)

    def _require_open_gate(self, principal: Principal, task: TextTask, pool_id: str) -> None:
        ask = GateAsk(task.queue_priority(principal.tier.priority), principal.tenant.id)
        retry_s = self._dispatcher.refused_for_s(pool_id, ask, time.monotonic())
        if retry_s is None:
            return
        self._metrics.gate_refusals.inc()
        raise RejectedError(
            ErrorCode.OVERLOADED,
            "More requests of your tier come than this model has room for. "
            f"Try again in {retry_s:.1f} s.",
            retry_after_s=retry_s,
        )

    async def _answer_by_release(
        self, request: web.Request, exchange: HttpExchange, control: ResolvedModel
    ) -> web.StreamResponse:
        """Return the answer of the release that a split chose. If it fails, control answers."""
        try:
            return await self._replies.reply(request, exchange)
        except PlatformError as refusal:
            if not refusal.code.policy.goes_to_control or exchange.has_begun:
                raise
            self._copies.emit_fault(exchange, identity_of(request), exchange.tally, refusal)
        control = self._pools.place(control, exchange.body.session, exchange.request_id)
        specs = await self._specs_with_time_left(request, exchange, control)
        exchange.stand_in(control.model, control.decision, specs, None)
        return await self._replies.reply(request, exchange)

    def _resolve(
        self,
        task: TextTask,
        identity: CallerIdentity,
        principal: Principal,
        name: str,
        received_at_unix_ms: int,
    ) -> ResolvedModel:
        """Choose model, release and pool of a request once, for the whole request."""
        resolved = self._directory.resolve(principal, name, task.session, identity.request_id)
        if resolved.options is not None:
            resolved = self._pools.place(resolved, task.session, identity.request_id)
        if resolved.decision is not None and resolved.decision.rollout_id:
            self._open.add(identity.uid, received_at_unix_ms)
        return resolved

    async def _specs(
        self,
        task: TextTask,
        request: web.Request,
        principal: Principal,
        resolved: ResolvedModel,
    ) -> list[GenerationSpec]:
        identity, plan, found = identity_of(request), None, None
        if principal.guard_sets:
            plan = await self._guards.plan(principal, (task.model, resolved.model.id))
        if plan is not None:
            assets = await self._assets.get(resolved.model.base_digest)
            request_id = identity.request_id
            found = await self._guards.check(task, plan, assets.table, principal, request_id)
        specs = await specs_of(
            task, identity=identity, principal=principal, resolved=resolved, cache=self._assets
        )
        if plan is None or found is None:
            return specs
        is_told = request.headers.get(_FILTER_RESULTS) == "true"
        return self._guards.guarded(specs, plan, found, is_told=is_told)

    async def _specs_with_time_left(
        self, request: web.Request, exchange: HttpExchange, resolved: ResolvedModel
    ) -> list[GenerationSpec]:
        """Return the specs for another model, or raise RejectedError after the caller's deadline.

        A tier's deadline starts again, because it bounds the wait in a single queue.
        """
        task = exchange.body
        specs = await self._specs(task, request, exchange.principal, resolved)
        if task.deadline_ms is None:
            return specs
        left_ms = task.deadline_ms - round((time.monotonic() - exchange.received_at_s) * 1000)
        if left_ms <= 0:
            raise RejectedError(
                ErrorCode.DEADLINE_EXCEEDED, "'deadline_ms' has passed; send a later one."
            )
        deadline_ms = min(left_ms, specs[0].deadline_ms)
        return [it._replace(deadline_ms=deadline_ms) for it in specs]

    def _with_patience(
        self,
        specs: list[GenerationSpec],
        task: TextTask,
        principal: Principal,
        auto: AutoDecision | None,
    ) -> list[GenerationSpec]:
        """Return specs that wait only briefly for replicas if another model may answer."""
        name = self._auto.other(principal, task.model, auto)
        if name is None:
            return specs
        try:
            request_id = specs[0].request_id
            other = self._directory.resolve(principal, name, task.session, request_id)
        except PlatformError:
            return specs
        longest, context = max([len(it.prompt) for it in specs]), other.context_tokens_max
        if context and longest >= context:
            return specs
        pool_id = other.model.pool_id
        if pool_id == specs[0].pool_id or not self._dispatcher.serves(pool_id):
            return specs
        return [it._replace(absence_ms=_ABSENCE_MS) for it in specs]

    async def _reserve(
        self,
        principal: Principal,
        resolved: ResolvedModel,
        task: TextTask,
        specs: Sequence[GenerationSpec],
        counted: Reservation | None = None,
    ) -> Reservation:
        limiter = self._limiter
        take = limiter.reserve if counted is None else partial(limiter.reserve_counted, counted)
        if len(specs) == 1:  # the usual case
            prompt_tokens, output_tokens = len(specs[0].prompt), specs[0].output_tokens_max
        else:
            prompt_tokens = sum([len(it.prompt) for it in specs[:: task.choices]])
            output_tokens = sum([it.output_tokens_max for it in specs])
        return await take(
            principal,
            resolved.model.id,
            prompt_tokens=prompt_tokens,
            output_tokens_max=output_tokens,
            is_bounded=task.output_tokens_max is not None,
            answers=len(specs),
        )

    async def _stands_in(
        self, request: web.Request, exchange: HttpExchange, refusal: PlatformError
    ) -> bool:
        """Prepare the request for a fallback model, and return False if the refusal is final."""
        if not refusal.code.policy.lets_stand_in or exchange.has_begun:
            return False
        if self._dispatcher.is_draining:
            return False
        principal, task = exchange.principal, exchange.body
        name = self._auto.other(principal, task.model, exchange.auto)
        if name is None:
            return False
        try:
            identity, received_at_unix_ms = identity_of(request), exchange.received_at_unix_ms
            resolved = self._resolve(task, identity, principal, name, received_at_unix_ms)
            specs = await self._specs_with_time_left(request, exchange, resolved)
            tally = exchange.tally
            self._settle(exchange, tally, was_served=tally.output_tokens > 0)
            exchange.reservation = await self._reserve(principal, resolved, task, specs)
        except PlatformError:
            return False
        self._metrics.fallbacks.inc()
        lost = None
        if tally.placed is not None:
            lost = Lost(exchange.model.id, tally.placed_prompt_tokens, tally.output_tokens)
        exchange.stand_in(resolved.model, resolved.decision, specs, lost)
        if exchange.auto is not None:
            exchange.auto = exchange.auto.moved_to(name)
        return True

    def _settle(self, exchange: HttpExchange, tally: Tally, *, was_served: bool) -> None:
        """Settle the reservation, if there is one, and count its tokens."""
        reservation, exchange.reservation = exchange.reservation, None
        exchange.applied = reservation or exchange.applied
        if reservation is None:
            return
        is_computed = was_served or tally.placed is not None
        prompt_tokens = tally.prompt_tokens if is_computed else 0
        self._limiter.settle(
            reservation,
            prompt_tokens=prompt_tokens,
            output_tokens=tally.output_tokens - tally.unshown_tokens,
            was_served=was_served or exchange.is_charged,
        )
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.cached_tokens.inc(tally.cached_tokens)
        self._metrics.output_tokens.inc(tally.output_tokens)

    def _close(
        self, request: web.Request, exchange: HttpExchange, kept: KeptRequest | None
    ) -> None:
        """Settle the limits, count the request and emit its event, once for every outcome."""
        ended_at_s, metrics, tally = time.monotonic(), self._metrics, exchange.tally
        if exchange.principal.guard_sets:
            tenant_id = exchange.principal.tenant.id
            found = self._guards.close(exchange.generations, tenant_id, exchange.request_id)
            exchange.guard_rules = rule_ids(found)
        was_served = tally.output_tokens > 0 or not exchange.is_aborted
        self._settle(exchange, tally, was_served=was_served)
        # If a keep-alive comment began the stream, the first token was sent later.
        if exchange.has_begun and not exchange.first_sent_at_s:
            exchange.first_sent_at_s = tally.first_at_s
        note_outcome(request, exchange.outcome)
        if exchange.first_sent_at_s:
            metrics.ttft.observe(exchange.first_sent_at_s - exchange.received_at_s)
        if tally.submitted_at_s:
            metrics.before_router.observe(tally.submitted_at_s - exchange.received_at_s)
        metrics.total.observe(ended_at_s - exchange.received_at_s)
        metrics.ended(
            exchange.principal.tenant.id,
            exchange.outcome if exchange.is_aborted else "",
            ttft_s=(exchange.first_sent_at_s or tally.first_at_s or ended_at_s)
            - exchange.received_at_s,
            decode_s=ended_at_s - (tally.first_at_s or ended_at_s),
            prefill_s=tally.prefill_us / 1e6,
            prompt_tokens=tally.prompt_tokens,
            output_tokens=tally.output_tokens,
            answers=exchange.choices,
        )
        if tally.drafts is not None:
            pool_id = tally.pool_id
            metrics.drafts.labels(pool_id, "proposed").inc(tally.drafts.tried)
            metrics.drafts.labels(pool_id, "accepted").inc(tally.drafts.accepted)
        if tally.resumes:
            metrics.resumes.inc(tally.resumes)
        if exchange.decision is not None:
            self._note(exchange, exchange.decision)
        self._note_auto(exchange, tally, ended_at_s)
        self._emit(exchange.event(tally, self._gateway_id, ended_at_s))
        if kept is not None:
            self._texts.offer(kept, exchange)

    def _note_auto(self, exchange: HttpExchange, tally: Tally, ended_at_s: float) -> None:
        """Report an answer to `auto`, and count the reason of the model's choice."""
        auto = exchange.auto
        if auto is not None:
            self._metrics.auto.labels(auto.reason).inc()
        if not exchange.is_aborted:
            pool_id, answers = tally.pool_id or exchange.model.pool_id, exchange.choices
            self._auto.note(auto, pool_id, tally, answers, ended_at_s)

    def _note(self, exchange: HttpExchange, decision: ReleaseDecision) -> None:
        """Count a request whose release a pin or a split has decided."""
        self._decided.note(exchange.principal.tenant.id, exchange.model.id, decision)
        if decision.rollout_id and not exchange.is_aborted:
            exchange.flaws = flaws_in(exchange.generations[0])
            self._scores.offer(exchange)
