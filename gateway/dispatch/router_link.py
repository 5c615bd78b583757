"""The connection of this worker to one router, which sends submits and cancels and receives tokens.

All requests to a router share one gRPC stream. A received message carries the new tokens of many
requests in columns. One synchronous loop passes the tokens to the generations, so that no request
or token needs a task switch.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc.aio
import structlog
from google.protobuf.message import DecodeError

from gateway.dispatch.cell_choice import CellView
from gateway.dispatch.generation import EndKind, Generation, GenerationEnd
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.tier_gate import NO_GATES, told_gates
from sluice.channels import channel_to
from sluice.errors import ErrorCode
from sluice.identity import CertificateRole
from sluice.lifecycle import backoff_s
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub

log = structlog.get_logger(__name__)

if TYPE_CHECKING:  # the class accepts no type arguments at run time
    _Call = grpc.aio.StreamStreamCall[wire.ConnectRequest, wire.ConnectResponse]

_WELCOME_TIMEOUT_S = 2.0
# A router sends a message at least every 0.25 s, so a silent router is frozen. Silence is counted
# in sleeps of this process, so that a pause of this process does not count as silence.
_NAPS_TOGETHER = 3  # naps in one sleep while the limit is far, which saves most of the wake-ups
_NAP_S = 0.1  # seconds of one sleep of the silence check
_SILENT_NAPS_MAX = 9  # sleeps without a message after which the connection is closed
_STUCK_NAPS_MAX = 50  # sleeps during one write after which the connection is closed
_UNSENT_MAX = 20_000  # submits that may wait for the socket, above which the link refuses more
# Tokens at which a message is full. A token has up to five bytes, and routers accept messages of 64
# MiB. A submit's other fields, such as a grammar of 64 KiB, count as `_SUBMIT_TOKENS` tokens.
_BATCH_TOKENS = 1 << 19
_SUBMIT_TOKENS = 4096
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_SUCCESSES = (wire.OUTCOME_KIND_STOP, wire.OUTCOME_KIND_LENGTH)

# Errors of a lost connection. InvalidStateError follows a write to a call that the router has
# ended.
_EXPECTED = (
    grpc.aio.AioRpcError,
    TimeoutError,
    EOFError,
    asyncio.InvalidStateError,
    DecodeError,
)


class RouterLink:
    """Connects to one router and reconnects whenever the connection ends.

    `run` must run in a TaskGroup.

    Attributes:
        router_id: Id that the router reports, or empty before the first connection.
        is_up: Whether requests can be submitted.
        cells: The router's last report on each of its cells, by cell id. Requests are sent only for
            these cells. When a cell moves, its new router refuses requests until it owns the cell.
        is_gated: Whether any report in `cells` has a gate, so that some requests are refused early.
    """

    def __init__(
        self,
        address: str,
        gateway_id: str,
        on_change: Callable[[], None],
        pace: AttemptPace,
        emit: Callable[[bytes], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
        learn: Callable[[wire.CellSketch], None] = lambda _: None,
        on_cells: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Remain disconnected until `run`.

        Args:
            address: Address of the router, `host:port`.
            gateway_id: Id of this gateway, sent to the router.
            on_change: Called when the link connects or disconnects, or reports a new cell.
            pace: Pace of this worker, to which the link reports begin and end of steps.
            emit: Queues events that the router wrote for requests of a gateway that was killed.
            on_lost: Called when the router is lost, since its record of ended requests is lost too.
            learn: Receives the parts of cells' sketches.
            on_cells: Called with the monotonic time after a report on cells.
        """
        self.address = address
        self.router_id = ""
        self.is_up = False
        self.is_gated = False
        self.cells: dict[str, CellView] = {}
        self._gateway_id = gateway_id
        self._reads_prompt_ids = False
        self._on_change = on_change
        self._pace = pace
        self._emit = emit
        self._on_lost = on_lost
        self._learn = learn
        self._on_cells = on_cells
        self._generations: dict[int, Generation] = {}
        self._last_handle = 0
        self._batches: deque[wire.ConnectRequest] = deque()
        self._batch_tokens = 0  # tokens in the last batch
        self._unsent = 0
        self._cancels: list[int] = []
        self._cancel_took: list[int] = []
        self._cancel_placed: list[bool] = []
        self._turned_away: Counter[tuple[str, int]] = Counter()
        self._has_outgoing = asyncio.Event()
        self._received_at_s = 0.0
        self._writes = 0
        self._is_writing = False

    @property
    def in_flight(self) -> int:
        """Number of requests at the router."""
        return len(self._generations)

    def submit(
        self, generation: Generation, cell_id: str, deadline_ms: int, admission_ms: int
    ) -> int:
        """Send a request to the router with the next batch, and return the request's handle.

        The generation ends at once as LOST if the link is down or has too many unsent requests.
        """
        self._last_handle += 1
        if not self.is_up or self._unsent >= _UNSENT_MAX:
            generation.end(GenerationEnd(EndKind.LOST, ErrorCode.UNAVAILABLE, "no router answers"))
            return self._last_handle
        self._generations[self._last_handle] = generation
        # The message is built inside the batch, because a copy of a prompt of 55,000 tokens needs
        # more than a millisecond.
        make = self._open_batch().submits.add
        generation.submit_message(
            self._last_handle,
            cell_id,
            deadline_ms,
            admission_ms,
            make,
            reads_prompt_ids=self._reads_prompt_ids,
        )
        prompt_tokens = generation.prompt_tokens
        self._unsent += 1
        self._batch_tokens += prompt_tokens + _SUBMIT_TOKENS
        # The router's next report replaces this count.
        if (cell := self.cells.get(cell_id)) is not None:
            cell.tokens_owed += prompt_tokens
        self._has_outgoing.set()
        return self._last_handle

    def turned_away(self, cell_id: str, priority: int) -> None:
        """Report to the router that the gateway refused a request because of the router's gates.

        The router counts the refused request as demand.
        """
        if self.is_up:
            self._turned_away[cell_id, priority] += 1
            self._has_outgoing.set()

    def _open_batch(self) -> wire.ConnectRequest:
        if not self._batches or self._batch_tokens >= _BATCH_TOKENS:
            self._batches.append(wire.ConnectRequest())
            self._batch_tokens = 0
        return self._batches[-1]

    def cancel(self, handle: int) -> None:
        """Send the router the cancellation of a request, unless the request has ended."""
        generation = self._generations.pop(handle, None)
        if generation is not None:
            self._cancels.append(handle)
            self._cancel_took.append(len(generation.emitted) - generation.attempt_from)
            self._cancel_placed.append(generation.placed is not None)
            self._has_outgoing.set()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        attempt = 0
        while True:
            reason = ""
            try:
                async with channel_to(
                    self.address, CertificateRole.ROUTER, options=_CHANNEL_OPTIONS
                ) as channel:
                    await self._session(channel)
            except* _EXPECTED as errors:
                reason = "; ".join(_text(error) for error in errors.exceptions)
            finally:
                was_up = self._disconnect()
            task = asyncio.current_task()
            # The cancellation and an error have occurred together, so the cancellation is restored.
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
            attempt = 0 if was_up else attempt + 1
            if was_up or attempt == 1:
                log.warning("router_lost", address=self.address, reason=reason)
            await asyncio.sleep(backoff_s(attempt, first_s=0.05, max_s=1.0))

    async def _session(self, channel: grpc.aio.Channel) -> None:
        call = RouterServiceStub(channel).Connect()
        try:
            async with asyncio.timeout(_WELCOME_TIMEOUT_S):
                hello = wire.Hello(
                    gateway_id=self._gateway_id, takes_closings=True, counts_prompts=True
                )
                await call.write(wire.ConnectRequest(hello=hello))
                first = await call.read()
            if not isinstance(first, wire.ConnectResponse):  # the value is grpc.aio.EOF
                raise EOFError("no welcome")  # noqa: TRY004 - not about a type
            self._connect(first)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(call))
                tasks.create_task(self._watch())
                await self._read(call)
        finally:
            call.cancel()

    async def _read(self, call: "_Call") -> None:
        while True:
            message = await call.read()
            if not isinstance(message, wire.ConnectResponse):  # the value is grpc.aio.EOF
                raise EOFError("the router ended the stream")  # noqa: TRY004 - not about a type
            self._received_at_s = time.monotonic()  # the loop's clock counts whole milliseconds
            self.deliver(message, self._received_at_s)

    async def _write(self, call: "_Call") -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            while (batch := self.take_batch()) is not None:
                self._writes += 1
                self._is_writing = True
                await call.write(batch)
                self._is_writing = False

    def take_batch(self) -> wire.ConnectRequest | None:
        """Return the next message to send, of bounded size, or None if nothing waits.

        A cancel is sent after all waiting batches, so that it never precedes its submit.
        """
        batch = self._batches.popleft() if self._batches else wire.ConnectRequest()
        self._unsent -= len(batch.submits)
        if self._cancels and not self._batches:
            batch.cancels.extend(self._cancels)
            batch.cancel_took.extend(self._cancel_took)
            batch.cancel_placed.extend(self._cancel_placed)
            self._clear_cancels()
        if self._turned_away and not self._batches:
            for (cell_id, priority), requests in self._turned_away.items():
                batch.turned_away.add(cell_id=cell_id, priority=priority, requests=requests)
            self._turned_away.clear()
        return batch if batch.submits or batch.cancels or batch.turned_away else None

    def _clear_cancels(self) -> None:
        self._cancels.clear()
        self._cancel_took.clear()
        self._cancel_placed.clear()

    async def _watch(self) -> None:
        """Raise TimeoutError if the router is silent or a write to the router is stuck.

        The state is polled, because a timer per write would cost more than most writes.
        """
        heard_at_s, silent_naps = self._received_at_s, 0
        writes, stuck_naps = self._writes, 0
        while silent_naps < _SILENT_NAPS_MAX and stuck_naps < _STUCK_NAPS_MAX:
            naps = _NAPS_TOGETHER if silent_naps <= _NAPS_TOGETHER else 1
            await asyncio.sleep(naps * _NAP_S)
            silent_naps += naps
            if heard_at_s != self._received_at_s:
                heard_at_s = self._received_at_s
                silent_naps = min(naps, int((time.monotonic() - heard_at_s) / _NAP_S))
            is_stuck = self._is_writing and writes == self._writes
            stuck_naps = stuck_naps + naps if is_stuck else 0
            writes = self._writes
        naps, what = (stuck_naps, "takes nothing") if stuck_naps else (silent_naps, "is silent")
        raise TimeoutError(f"it {what} for {_NAP_S * naps:g} s")

    def deliver(self, message: wire.ConnectResponse, now_s: float) -> None:
        """Pass the placements of a message to generations, then its tokens, and then its outcomes.

        Raises:
            EOFError: The message contradicts itself. No part of it was passed on.
        """
        generations = self._generations
        tokens, counts = _columns(message)
        for placed in message.placed:
            if (generation := generations.get(placed.handle)) is not None:
                generation.place(placed)
        if message.prompt_logprobs or message.HasField("logprobs"):
            self._hand_out_logprobs(message)
        outcomes = message.outcomes
        for outcome in outcomes:
            if outcome.kind in _SUCCESSES and (ends := generations.get(outcome.handle)) is not None:
                ends.expect_end()
        self._hand_out_tokens(message.handle[:], counts, tokens, now_s)
        for outcome in outcomes:
            if (generation := generations.pop(outcome.handle, None)) is not None:
                generation.learn_outcome(outcome)
        for closing in message.closings:
            self._emit(closing)
        if message.cells or message.sketches:
            self._learn_cells(message, now_s)

    def _hand_out_tokens(
        self, handles: list[int], counts: list[int], tokens: list[int], now_s: float
    ) -> None:
        generations = self._generations
        before = self._pace.begin_step()
        start = 0
        for handle, count in zip(handles, counts, strict=True):
            generation = generations.get(handle)
            if generation is not None:
                try:
                    if count == 1:
                        generation.push_one(tokens[start], now_s)
                    else:
                        generation.push(tokens[start : start + count], now_s)
                except IndexError:
                    text = "The engine sent a token that the model does not have; try again."
                    generation.end(GenerationEnd(EndKind.REFUSED, ErrorCode.ENGINE_FAILED, text))
                except Exception:
                    # A parser may fail on the model's text. Only the answer with this text ends.
                    request_id = generation.spec.request_id
                    log.exception("router_answer_unreadable", request_id=request_id)
                    text = "The model's answer could not be parsed; try again."
                    generation.end(GenerationEnd(EndKind.REFUSED, ErrorCode.INTERNAL, text))
                if generation.ending is not None:  # a stop string or a slow reader ended the answer
                    self.cancel(handle)
            start += count
        self._pace.end_step(before)

    def _hand_out_logprobs(self, message: wire.ConnectResponse) -> None:
        generations, columns = self._generations, message.logprobs
        for part in message.prompt_logprobs:
            generation = generations.get(part.sequence)
            if generation is not None and (line := generation.prompt_logprobs) is not None:
                told = zip(part.top_token, part.top_logprob, strict=True)
                line.learn(part.first, part.logprob, part.top_count, list(told))
        top = list(zip(columns.top_token, columns.top_logprob, strict=True))
        start = 0
        entries = zip(columns.sequence, columns.logprob, columns.top_count, strict=True)
        for handle, logprob, count in entries:
            if (generation := generations.get(handle)) is not None:
                generation.learn_logprobs(logprob, top[start : start + count])
            start += count

    def _learn_cells(self, message: wire.ConnectResponse, now_s: float) -> None:
        for sketch in message.sketches:
            self._learn(sketch)
        has_news = False
        for state in message.cells:
            before = self.cells.get(state.cell_id)
            self.cells[state.cell_id] = CellView(
                cell_id=state.cell_id,
                replicas_ready=state.replicas_ready,
                tokens_owed=state.tokens_owed,
                wait_ms=state.wait_ms,
                is_refusing=state.is_draining,
                queued=state.queued,
                running=state.running,
                gates=told_gates(state) if state.tier_gates else NO_GATES,
                told_at_s=now_s,
            )
            has_news = has_news or before is None
        self.is_gated = any(view.gates for view in self.cells.values())
        if has_news and self.is_up:
            self._on_change()
        self._on_cells(now_s)

    def _connect(self, first: wire.ConnectResponse) -> None:
        self.router_id = first.welcome.router_id
        self._reads_prompt_ids = first.welcome.reads_prompt_ids
        self.is_up = True
        self._received_at_s = time.monotonic()
        log.info("router_connected", address=self.address, router_id=self.router_id)
        self.deliver(first, self._received_at_s)
        self._on_change()

    def _disconnect(self) -> bool:
        """End all requests at the router as LOST, and return whether the link was up."""
        was_up, self.is_up = self.is_up, False
        self._is_writing = False
        self._batches.clear()
        self._unsent = 0
        self._clear_cancels()
        self._turned_away.clear()
        self._has_outgoing.clear()
        self.cells.clear()
        self.is_gated = False
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.end(
                GenerationEnd(EndKind.LOST, ErrorCode.UNAVAILABLE, "the router was lost")
            )
        if was_up:
            self._on_lost()
            self._on_change()
        return was_up


def _columns(message: wire.ConnectResponse) -> tuple[list[int], list[int]]:
    # A slice becomes a list in C. An iteration over the protobuf column would cost three times as
    # much.
    tokens, counts = message.token[:], message.count[:]
    if len(message.handle) != len(counts) or sum(counts) != len(tokens):
        raise EOFError("the columns of a message do not agree")
    if message.HasField("logprobs"):
        columns = message.logprobs
        tops = len(columns.top_token)
        agree = len(columns.sequence) == len(columns.logprob) == len(columns.top_count)
        if not agree or len(columns.top_logprob) != tops or sum(columns.top_count) != tops:
            raise EOFError("the columns of log probabilities do not agree")
    for part in message.prompt_logprobs:
        rows, tops = len(part.logprob), len(part.top_token)
        agree = len(part.top_count) == rows and len(part.top_logprob) == tops
        if not agree or sum(part.top_count) != tops:
            raise EOFError("the columns of a prompt's log probabilities do not agree")
    return tokens, counts


def _text(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or type(error).__name__
