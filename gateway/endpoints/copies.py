"""Copies of requests for the shadow stage of a rollout: canary answers them, and nobody reads it.

A copy goes behind everything else, costs the caller nothing, and can neither delay nor fail the
request that it was made of. There are never more than a few, and none while the server stops.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from gateway.bases.assets import AssetCache
from gateway.directory import ResolvedModel
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.exchange import Exchange, Tally, tally_of
from gateway.dispatch.generation import Generation, WholeGeneration
from gateway.endpoints.run import finish_reason, flaws_in, now_s
from gateway.endpoints.task import Plan, Task, plan_of
from gateway.metrics import GatewayMetrics
from gateway.rollouts.open_requests import OpenRequests
from gateway.server.identity import Identity
from sluice import tracecontext
from sluice.errors import ErrorCode, PlatformError
from sluice.priority import CLASSES, queue_priority

log = structlog.get_logger(__name__)

_COPY_S_MAX = 120.0  # no client hangs up on an answer that does not end
_LAST_PRIORITY = queue_priority(0, CLASSES - 1)


class Copies:
    """Those of one worker; `run` belongs into a TaskGroup and owns them."""

    def __init__(
        self,
        *,
        assets: AssetCache,
        dispatcher: Dispatcher,
        open_requests: OpenRequests,
        metrics: GatewayMetrics,
        emit: Callable[[bytes], None],
        gateway_id: str,
        copies_max: int,
    ) -> None:
        """Compose.

        Args:
            assets: Of the bases.
            dispatcher: One for copies alone: what it may try again is not taken from others.
            open_requests: Where copies are noted while they run.
            metrics: Counts copies.
            emit: Takes one event per copy and never blocks.
            gateway_id: Of this worker.
            copies_max: How many may be under way at once.
        """
        self._assets = assets
        self._dispatcher = dispatcher
        self._open = open_requests
        self._emit = emit
        self._gateway_id = gateway_id
        self._copies_max = copies_max
        self._sent, self._dropped = (metrics.copies.labels(fate) for fate in ("sent", "dropped"))
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()

    @property
    def open(self) -> int:
        """How many are under way."""
        return len(self._running)

    async def run(self) -> None:
        """Let copies be made until cancelled, or told to stop."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    def stop(self) -> None:
        """Cancel what runs, and make no more."""
        self._tasks = None
        for task in self._running:
            task.cancel()

    def make(
        self, task: Task, identity: Identity, original: Exchange, shadow: ResolvedModel
    ) -> None:
        """Send a copy of an accepted request to `shadow` a moment later, if there is room."""
        if self._tasks is None:
            return
        if len(self._running) >= self._copies_max:
            self._dropped.inc()
            return
        self._sent.inc()
        running = self._tasks.create_task(
            self._run(task.copied(), _copied(identity), original, shadow)
        )
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def tell_fault(
        self, original: Exchange, identity: Identity, tally: Tally, fault: PlatformError
    ) -> None:
        """Tell that canary could not begin with a request, which control answers instead.

        Rollouts count it as a copy that failed: the request's own event is one of control.
        """
        names = _copied(identity)
        exchange = replace(
            original,
            uid=names.uid,
            request_id=names.request_id,
            upstream=names.upstream,
            reservation=None,
            applied=None,
            is_copy=True,
            _begun=b"",
        )
        exchange.end_by(fault)
        self._emit(exchange.event(tally, self._gateway_id, now_s()))

    async def _run(
        self, task: Task, identity: Identity, original: Exchange, shadow: ResolvedModel
    ) -> None:
        exchange = Exchange(
            uid=identity.uid,
            request_id=identity.request_id,
            trace_id=identity.trace_id,
            upstream=identity.upstream,
            endpoint=task.endpoint,
            received_at_s=now_s(),
            received_at_unix_ms=time.time_ns() // 1_000_000,
            principal=original.principal,
            model=shadow.model,
            requested_model=original.requested_model,
            reservation=None,
            is_stream=original.is_stream,
            decision=shadow.decision,
            choices=original.choices,
            is_copy=True,
        )
        self._open.add(identity.uid, exchange.received_at_unix_ms)
        copy = _Copy(task, exchange)
        error: BaseException | None = None
        try:
            async with asyncio.timeout(_COPY_S_MAX):
                plan = await plan_of(
                    task,
                    identity=identity,
                    principal=original.principal,
                    resolved=shadow,
                    cache=self._assets,
                )
                await copy.run(_as_last(plan), self._dispatcher, self._gateway_id)
        except TimeoutError:
            error = PlatformError(ErrorCode.DEADLINE_EXCEEDED, "The copy took too long.")
        except PlatformError as refusal:
            error = refusal
        except asyncio.CancelledError as cancelled:
            error = cancelled
            raise
        except Exception as bug:
            # The outermost place: what goes wrong with a copy must not end the worker.
            log.exception("copy_failed", request_id=identity.request_id)
            error = bug
        finally:
            copy.end(error)
            self._emit(exchange.event(copy.tally, self._gateway_id, now_s()))
            self._open.discard(identity.uid)


class _Copy:
    """One copy, from its plan to what its event says."""

    def __init__(self, task: Task, exchange: Exchange) -> None:
        self._task = task
        self._exchange = exchange
        self._generations: Sequence[Generation] = ()
        self._plan: Plan | None = None

    async def run(self, plan: Plan, dispatcher: Dispatcher, gateway_id: str) -> None:
        """Get everything answered; PlatformError when it is refused."""
        exchange = self._exchange
        generations = [
            WholeGeneration(spec, plan.pipe(self._task, index))
            for index, spec in enumerate(plan.specs)
        ]
        self._plan, self._generations = plan, generations
        exchange.prepare_closings(generations, plan.answers_per_prompt, gateway_id)
        self._task.forget_request()
        with dispatcher.ask(generations, plan.answers_per_prompt) as answers:
            refusal = await answers.finished()
        if refusal is not None:
            raise PlatformError(refusal.code, refusal.message)
        assert generations[0].ending is not None
        exchange.outcome = finish_reason(generations[0].ending, generations[0])
        exchange.status = 200
        exchange.flaws = flaws_in(plan.pipe(self._task, 0), generations[0])

    @property
    def tally(self) -> Tally:
        """What it has come to."""
        per_prompt = 1 if self._plan is None else self._plan.answers_per_prompt
        return tally_of(self._generations, per_prompt)

    def end(self, error: BaseException | None) -> None:
        """Note how it ended, and when a client would have got the first token."""
        exchange = self._exchange
        exchange.end_by(error)
        if exchange.is_stream:
            exchange.first_sent_at_s = self.tally.first_at_s
        elif error is None:
            exchange.first_sent_at_s = now_s()


def _copied(identity: Identity) -> Identity:
    """Return the names of a copy; its trace hangs below the request's."""
    uid, of_request = f"{identity.uid}-copy", tracecontext.request_span_id(identity.uid)
    upstream = identity.upstream._replace(span_id=of_request)
    own = tracecontext.traceparent(
        identity.trace_id, tracecontext.request_span_id(uid), sampled=upstream.is_sampled
    )
    request_id = f"{identity.request_id}-copy"
    return Identity(uid, request_id, identity.trace_id, own, upstream)


def _as_last(plan: Plan) -> Plan:
    """Return a plan whose work goes behind all other, and gives way to it."""
    return plan._replace(
        specs=[
            spec._replace(
                tier_priority=_LAST_PRIORITY,
                tier_reserved_permille=0,
                is_preemptible=True,
                is_begun=False,
            )
            for spec in plan.specs
        ]
    )
