"""Runs the loop of an answer with server tools, where rounds of the model and tool calls alternate.

Each round is a separate request in this process, with its own limits, usage event and trace span.
The tokens of a round are written into the client's response.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import structlog
from aiohttp import web

from gateway.directory import Principal
from gateway.endpoints.reply import STREAM_HEADERS
from gateway.endpoints.task import TextTask
from gateway.server.identity import CallerIdentity, further_identity, identity_of, new_uid
from gateway.server.in_process import in_process_request
from gateway.server.middleware import note_outcome
from gateway.server.relayed import RelayedResponse
from gateway.text.sse import KEEP_ALIVE
from gateway.tools.approval_leases import ApprovalLeases, ApprovedWork, KnownOutcome
from gateway.tools.call_events import CallFacts, event_of
from gateway.tools.failures import ToolCallError
from gateway.tools.loop import (
    AnswerCall,
    AskModel,
    CallFailure,
    CallMode,
    EndLoop,
    LoopAction,
    LoopBudget,
    LoopCall,
    StartCall,
    StopCall,
    ToolLoop,
)
from gateway.tools.plan import PlannedTool
from gateway.tools.rounds import RoundCall, RoundEvents, RoundTask, output_tokens_of
from gateway.tools.runner import ToolRunner
from sluice.errors import PlatformError

log = structlog.get_logger(__name__)

_CUT = frozenset({"length", "content_filter"})
_BROKEN = "the call could not be made"


class Answering(Protocol):
    """Answers one request by its model."""

    def answer(
        self, request: web.Request, principal: Principal, task: TextTask
    ) -> Awaitable[web.StreamResponse]:
        """Return the HTTP response."""
        ...


class ToolAnswering:
    """Answers the requests of one worker. An answer with server tools may need several rounds."""

    def __init__(
        self,
        answering: Answering,
        runner: ToolRunner,
        leases: ApprovalLeases,
        budget: LoopBudget,
        *,
        keep_alive_s: float,
        emit: Callable[[bytes], None],
        gateway_id: str,
    ) -> None:
        """All arguments are parts of the same worker.

        Args:
            answering: Answers single rounds.
            runner: Calls tools.
            leases: Leases of approved calls.
            budget: Upper bounds of one answer. A request may set lower bounds.
            keep_alive_s: Longest silence of a stream, in seconds.
            emit: Sends one event per call and never blocks.
            gateway_id: Id of this worker.
        """
        self._answering, self._runner, self._leases = answering, runner, leases
        self._budget, self._keep_alive_s = budget, keep_alive_s
        self._emit, self._gateway_id = emit, gateway_id

    def answer(
        self, request: web.Request, principal: Principal, task: TextTask
    ) -> Awaitable[web.StreamResponse]:
        """Answer one request, in several rounds if the task has rounds.

        A request without rounds leaves no frame of this class, because the frame would reference
        the body while the stream runs.
        """
        if not task.has_rounds:
            return self._answering.answer(request, principal, task)
        rounds = cast("RoundTask", task)
        return self._answer_in_rounds(request, principal, task.endpoint, rounds)

    async def _answer_in_rounds(
        self, request: web.Request, principal: Principal, endpoint: str, rounds: RoundTask
    ) -> web.StreamResponse:
        calls = min(self._budget.calls, rounds.max_tool_calls or self._budget.calls)
        budget = LoopBudget(calls, self._budget.tokens, self._budget.seconds, self._budget.micros)
        run = _ToolRun(
            self._answering, self._runner, self._leases, request, principal, endpoint, rounds
        )
        run.tell = partial(self._send_event, run.caller)
        try:
            return await run.answer(ToolLoop(budget, time.monotonic()), self._keep_alive_s)
        finally:
            run.tell_cut()

    def _send_event(self, caller: "_Caller", tool: PlannedTool, facts: CallFacts) -> None:
        """Emit the usage event of a tool call."""
        identity = caller.identity
        event = event_of(
            facts,
            tool,
            caller.principal,
            request_id=identity.request_id,
            trace_id=identity.trace_id,
            parent_span_id=identity.uid[16:],
            is_sampled=identity.upstream.is_sampled,
            model=caller.model,
            endpoint=caller.endpoint,
            gateway_id=self._gateway_id,
        )
        self._emit(event)


class _Caller(NamedTuple):
    """The client's request on whose behalf tools are called."""

    identity: CallerIdentity
    principal: Principal
    model: str
    endpoint: str


class _ToolRun:
    """The loop of one answer with server tools."""

    def __init__(
        self,
        answering: Answering,
        runner: ToolRunner,
        leases: ApprovalLeases,
        request: web.Request,
        principal: Principal,
        endpoint: str,
        task: RoundTask,
    ) -> None:
        self._answering, self._runner, self._leases = answering, runner, leases
        self._request, self._principal, self._task = request, principal, task
        self._identity, self._rounds = identity_of(request), task.rounds
        headers = {**STREAM_HEADERS, **self._identity.headers}
        self._client = RelayedResponse(request, headers, is_stream=bool(task.stream))
        self._usage: dict[str, Any] = {}
        self._rounds_begun = self._run = 0
        self._calls = dict[str, tuple[PlannedTool, str]]()
        self._outputs: dict[str, str] = {}
        self._leased: dict[str, ApprovedWork] = {}
        self._known: dict[str, KnownOutcome] = {}
        self._error: PlatformError | None = None
        self._began = dict[str, tuple[int, float]]()  # first start: Unix ms, and monotonic s
        self.caller = _Caller(self._identity, principal, task.model, endpoint)
        self.tell: Callable[[PlannedTool, CallFacts], None] = _drop

    @property
    def _events(self) -> RoundEvents:
        return self._rounds.events

    async def answer(self, loop: ToolLoop, keep_alive_s: float) -> web.StreamResponse:
        """Run the loop, and return the response or raise the error of the first round."""
        self._task.begin_rounds(self._identity.uid)
        actions = loop.begin(await self._approved(loop.budget.seconds), time.monotonic())
        while True:
            last = await self._run_calls(loop, actions, keep_alive_s)
            if isinstance(last, EndLoop):
                return await self._end("" if last.reason is None else str(last.reason))
            if self._tokens_left() == 0:
                return await self._end("length")
            calls = await self._round()
            if calls is None:
                return await self._end("")
            actions = loop.on_round(
                [self._loop_call(it) for it in calls],
                self._round_tokens(),
                time.monotonic(),
                is_cut=self._events.round_reason in _CUT,
            )

    # --- calls ------------------------------------------------------------------------------

    async def _approved(self, seconds: float) -> list[LoopCall]:
        """Return the approved calls, and open a lease and an output item for each call.

        Raises PlatformError if another response is running one of the calls at present, or if
        Valkey is needed for a lease and cannot be reached.
        """
        calls: list[LoopCall] = []
        for it in self._rounds.approved:
            named, tenant_id = (
                (it.tool.label, it.tool.name, it.arguments),
                self._principal.tenant.id,
            )
            work = ApprovedWork(tenant_id, it.request_id, named, it.tool.is_idempotent)
            known = await self._leases.claim(work, self._task.answer_id, seconds)
            item_id = self._events.begin_approved(it.request_id, it.tool, it.arguments)
            if known is None:
                self._leased[item_id] = work
            else:
                self._known[item_id] = known
            self._calls[item_id] = (it.tool, it.arguments)
            calls.append(it.call(item_id))
        return calls

    def _loop_call(self, made: RoundCall) -> LoopCall:
        if made.tool is None:
            return LoopCall(made.item_id, CallMode.CLIENT)
        self._calls[made.item_id] = (made.tool, made.arguments)
        return made.tool.call(made.item_id, made.arguments)

    async def _run_calls(
        self, loop: ToolLoop, actions: Sequence[LoopAction], keep_alive_s: float
    ) -> AskModel | EndLoop:
        """Perform actions until the next round or the end of the loop, and return that action."""
        pending = deque(actions)
        ended: asyncio.Queue[tuple[str, CallFailure | None]] = asyncio.Queue()
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                while pending:
                    match pending.popleft():
                        case StartCall() as start:
                            attempt = self._attempt(start, ended)
                            running[start.call_id] = tasks.create_task(attempt)
                        case StopCall(call_id):
                            running.pop(call_id).cancel()
                        case AnswerCall() as answer:
                            self._send_event(answer)
                        case AskModel() | EndLoop() as last:
                            return last
                wait_s = min(keep_alive_s, max(0.0, loop.ends_at_s - time.monotonic()))
                try:
                    async with asyncio.timeout(wait_s):
                        call_id, failure = await ended.get()
                except TimeoutError:
                    self._client.tell(KEEP_ALIVE)
                    pending.extend(loop.on_time(time.monotonic()))
                    continue
                now_s = time.monotonic()
                if failure is None:
                    pending.extend(loop.on_result(call_id, now_s))
                else:
                    pending.extend(loop.on_failure(call_id, failure, now_s))

    async def _attempt(
        self, start: StartCall, ended: asyncio.Queue[tuple[str, CallFailure | None]]
    ) -> None:
        """Run one attempt of a call, and report its result to the queue."""
        self._run += 1
        call_id, failure = start.call_id, None
        tool, _ = self._calls[call_id]
        self._began.setdefault(call_id, (time.time_ns() // 1_000_000, time.monotonic()))
        if start.after_s:
            await asyncio.sleep(start.after_s)
        try:
            self._outputs[call_id] = await self._output(call_id, start.timeout_s)
        except ToolCallError as error:
            failure = CallFailure(error.message, error.may_repeat)
        except Exception:  # a fault of one call must not end the whole answer
            log.exception("tool_call_broken", request_id=self._identity.request_id, tool=tool.name)
            failure = CallFailure(_BROKEN)
        ended.put_nowait((call_id, failure))

    async def _output(self, call_id: str, timeout_s: float) -> str:
        """Return the output of one attempt, or the stored outcome of an earlier identical call.

        Raises ToolCallError if the call failed.
        """
        known, (tool, arguments) = self._known.get(call_id), self._calls[call_id]
        if known is None:
            return await self._runner.attempt(tool, arguments, timeout_s)
        if known.failure is not None:
            raise ToolCallError(known.failure, is_fault=False)
        return known.output or ""

    def _send_event(self, answer: AnswerCall) -> None:
        output = self._outputs.pop(answer.call_id, "")
        self._settle(answer, output)
        tool, _ = self._calls.pop(answer.call_id)
        self._client.tell(self._events.answer(answer.call_id, output, answer.failure))
        began_at_unix_ms, _ = self._began.pop(answer.call_id, (time.time_ns() // 1_000_000, 0.0))
        outcome = "answered" if answer.failure is None else "failed"
        facts = CallFacts(
            new_uid(),
            began_at_unix_ms,
            answer.duration_s,
            answer.attempts,
            len(output.encode()),
            outcome if answer.was_run else "refused",
        )
        if answer.call_id not in self._known:
            self.tell(tool, facts)
        log.info(
            "tool_called",
            request_id=self._identity.request_id,
            tenant_id=self._principal.tenant.id,
            server=tool.label,
            tool=tool.name,
            was_run=answer.was_run,
            attempts=answer.attempts,
            duration_s=round(answer.duration_s, 3),
            has_failed=answer.failure is not None,
        )

    def _settle(self, answer: AnswerCall, output: str) -> None:
        """Store the outcome of an approved call in its lease."""
        work = self._leased.pop(answer.call_id, None)
        if work is None:
            return
        if not answer.was_run:
            self._leases.release(work)
            return
        failure = answer.failure
        self._leases.settle(work, KnownOutcome(output if failure is None else None, failure))

    def tell_cut(self) -> None:
        """Emit events of the calls that were running when the answer was cancelled."""
        for item_id, work in self._leased.items():
            (self._leases.cut if item_id in self._began else self._leases.release)(work)
        now_s = time.monotonic()
        for call_id, (began_at_unix_ms, began_at_s) in self._began.items():
            tool, _ = self._calls[call_id]
            duration_s = now_s - began_at_s
            self.tell(tool, CallFacts(new_uid(), began_at_unix_ms, duration_s, 1, 0, "cut"))
        self._began.clear()

    # --- rounds -----------------------------------------------------------------------------

    async def _round(self) -> list[RoundCall] | None:
        """Run a round of the model.

        Returns:
            The model's calls, or None if the round failed after its start.

        Raises:
            PlatformError: The first round was refused before anything was written or run.
        """
        is_first = not self._rounds_begun
        task = self._task.next_round(
            self._rounds.messages(), self._tokens_left(), is_first=is_first
        )
        identity = self._identity if is_first else further_identity(self._identity)
        request = in_process_request(self.caller.endpoint, b"", self._client.sink(), identity)
        self._rounds_begun += 1
        try:
            await self._answering.answer(request, self._principal, task)
        except PlatformError as error:
            if is_first and not self._run:
                raise
            self._error = error
            return None
        rounds = self._rounds
        rounds.commit()
        if rounds.usage is None:
            self._error = rounds.error
            return None
        self._usage = _sum(self._usage, rounds.usage)
        return self._events.round_calls

    def _tokens_left(self) -> int | None:
        """Return the remaining output tokens, or None if only the context bounds the output."""
        wanted = self._task.output_tokens_max
        return None if wanted is None else max(0, wanted - output_tokens_of(self._usage))

    def _round_tokens(self) -> int:
        usage: dict[str, Any] = self._rounds.usage or {}
        return usage.get("total_tokens", 0)

    # --- the end ----------------------------------------------------------------------------

    async def _end(self, reason: str) -> web.StreamResponse:
        events, error = self._events, self._error
        if error is not None:
            last, whole = self._task.failed(error)
            return await self._sent(last, whole, str(error.code))
        outcome = reason or events.round_reason
        events.end_as(outcome)
        last, whole = await self._task.ended(self._usage, int(time.time()))
        return await self._sent(last, whole, outcome)

    async def _sent(self, last: bytes, response: bytes, outcome: str) -> web.StreamResponse:
        note_outcome(self._request, outcome)
        if self._task.stream:
            if not self._events.has_begun:
                last = self._events.first() + last
            await self._client.end(last)
            assert self._client.response is not None, "it was just ended"
            return self._client.response
        headers = {
            name: value
            for name, value in self._client.headers.items()
            if name not in STREAM_HEADERS
        }
        return web.Response(body=response, content_type="application/json", headers=headers)


def _drop(tool: PlannedTool, facts: CallFacts) -> None:
    """Drop an event, as the default until a receiver of events is set."""


def _sum(before: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    """Return the summed usage of several rounds."""
    return {
        name: _sum(before.get(name, {}), value)
        if isinstance(value, dict)
        else before.get(name, 0) + value
        for name, value in usage.items()
    }
