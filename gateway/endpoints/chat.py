"""POST /v1/chat/completions: from the body to the answer, streamed or whole.

The status line waits for the first token: until then a failure is a plain JSON answer with its own
status; after it, an `error` event ends the stream, without `[DONE]`. A client that hangs up
cancels the handler, which cancels the request upstream.
"""

import asyncio
import time
from collections.abc import Callable

import orjson
from aiohttp import HttpVersion11, web

from gateway.bases.assets import AssetCache
from gateway.bodies.chat import ChatRequest, parse_chat_request
from gateway.dialects.hermes import ToolCallParser
from gateway.directory import Directory
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.exchange import Exchange
from gateway.dispatch.generation import Ending, EndKind, Generation
from gateway.dispatch.streamed import StreamedGeneration
from gateway.endpoints.sampling import generation_spec, output_budget
from gateway.limits.limiter import Limiter
from gateway.metrics import GatewayMetrics
from gateway.server.errors import error_body
from gateway.server.middleware import authenticate, identity_of, note_outcome
from gateway.text.pipe import TextPipe
from gateway.text.sse import DONE, ChunkWriter, error_event
from sluice.errors import STATUS, BadRequestError, ErrorCode, PlatformError
from sluice.ids import new_id
from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent

ENDPOINT = "/v1/chat/completions"

_BODY_TIMEOUT_S = 60.0
_WRITE_TIMEOUT_S = 30.0  # for the beginning and the end of a stream; between them see `streamed`
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the chunks
}


class ChatCompletions:
    """The endpoint."""

    def __init__(
        self,
        *,
        directory: Directory,
        assets: AssetCache,
        limiter: Limiter,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        emit: Callable[[RequestEvent], None],
        gateway_id: str,
    ) -> None:
        """Compose; `emit` takes one event per accepted request and never blocks."""
        self._directory = directory
        self._assets = assets
        self._limiter = limiter
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._emit = emit
        self._gateway_id = gateway_id

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        principal = authenticate(self._directory, request)
        body = await _read_body(request)
        received_at_s, received_at_unix_ms = _now_s(), time.time_ns() // 1_000_000
        chat = parse_chat_request(body)
        resolved = self._directory.resolve(principal, chat.model)
        assets = await self._assets.get(resolved.model.base_digest)
        tools = () if chat.tool_choice == "none" else chat.tools or ()
        prompt = await assets.encode_chat(chat.messages, tools, resolved.cache_root)
        output_max = output_budget(chat, len(prompt.ids), resolved.context_tokens_max)
        identity = identity_of(request)
        spec = generation_spec(
            chat,
            identity=identity,
            principal=principal,
            resolved=resolved,
            assets=assets,
            prompt=prompt,
            output_tokens_max=output_max,
        )
        pipe = TextPipe(
            assets.table.stream(),
            chat.stops,
            ToolCallParser(lambda: new_id("call")) if tools else None,
        )
        reservation = await self._limiter.reserve(
            principal,
            resolved.model.id,
            prompt_tokens=len(prompt.ids),
            output_tokens_max=output_max,
            is_bounded=chat.output_tokens_max is not None,
        )
        exchange = Exchange(
            uid=identity.uid,
            request_id=identity.request_id,
            trace_id=identity.trace_id,
            endpoint=ENDPOINT,
            received_at_s=received_at_s,
            received_at_unix_ms=received_at_unix_ms,
            principal=principal,
            model=resolved.model,
            reservation=reservation,
            is_stream=bool(chat.stream),
        )
        if not chat.stream:
            return await self._whole(request, exchange, Generation(spec, pipe))
        chunks = ChunkWriter(
            f"chatcmpl-{exchange.uid}",
            resolved.model.id,
            received_at_unix_ms // 1000,
            usage=chat.include_usage,
        )
        stream = StreamedGeneration(spec, pipe, assets.table, chunks, self._metrics.itl)
        return await self._stream(request, chat, exchange, stream)

    async def _whole(
        self, request: web.Request, exchange: Exchange, generation: Generation
    ) -> web.StreamResponse:
        with _Closing(self, request, exchange, generation):
            ending = await self._dispatcher.run(generation, self._on_submit(exchange), _nothing)
            _raise_refusal(ending)
            text = "".join(generation.parts) + generation.pipe.flush()
            calls = [call.as_dict() for _, call in generation.pipe.new_calls()]
            exchange.outcome = _finish_reason(ending, generation)
            exchange.status = 200
            exchange.first_sent_at_s = _now_s()
            message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
            answer = {
                "id": f"chatcmpl-{exchange.uid}",
                "object": "chat.completion",
                "created": exchange.received_at_unix_ms // 1000,
                "model": exchange.model.id,
                "choices": [
                    {
                        "index": 0,
                        "message": message,
                        "logprobs": None,
                        "finish_reason": exchange.outcome,
                    }
                ],
                "usage": _usage(generation),
            }
            return web.Response(
                body=orjson.dumps(answer),
                content_type="application/json",
                headers=exchange.reservation.headers,
            )

    async def _stream(
        self,
        request: web.Request,
        chat: ChatRequest,
        exchange: Exchange,
        stream: StreamedGeneration,
    ) -> web.StreamResponse:
        headers = {
            **_STREAM_HEADERS,
            **exchange.reservation.headers,
            "x-request-id": exchange.request_id,
        }
        response = _EventStream(headers=headers)

        async def write_first() -> None:
            await response.prepare(request)
            exchange.status = 200
            await response.write(stream.chunks.role() + stream.take_early())
            exchange.first_sent_at_s = _now_s()
            while early := stream.take_early():
                await response.write(early)

        async def begin() -> None:
            try:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await write_first()
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the client does not read") from None
            if request.transport is not None:
                stream.go_live(request.transport, is_chunked=request.version >= HttpVersion11)

        with _Closing(self, request, exchange, stream):
            ending = await self._dispatcher.run(stream, self._on_submit(exchange), begin)
            if not response.prepared:
                _raise_refusal(ending)
                await begin()
            if ending.kind is EndKind.REFUSED:
                exchange.outcome = ending.code
                last = error_event(
                    error_body(ending.code, ending.message, status=STATUS[ending.code])
                )
            else:
                exchange.outcome = _finish_reason(ending, stream)
                last = _last_chunks(stream, exchange.outcome, with_usage=chat.include_usage)
            await _send_last(request, response, last, is_cut=ending.code is ErrorCode.SLOW_READER)
            return response

    def _on_submit(self, exchange: Exchange) -> Callable[[str, str], None]:
        def submitted(cell_id: str, router_id: str) -> None:
            exchange.submitted(cell_id, router_id, _now_s())

        return submitted

    def close(self, request: web.Request, exchange: Exchange, generation: Generation) -> None:
        """Settle, count and tell: once per accepted request, whatever happened."""
        now_s = _now_s()
        emitted, metrics = len(generation.emitted), self._metrics
        was_served = emitted > 0 or exchange.status == 200
        prompt_used = len(generation.spec.prompt) if was_served or generation.placed else 0
        self._limiter.settle(
            exchange.reservation,
            prompt_tokens=prompt_used,
            output_tokens=emitted,
            was_served=was_served,
        )
        note_outcome(request, exchange.outcome)
        if exchange.first_sent_at_s:
            metrics.ttft.observe(exchange.first_sent_at_s - exchange.received_at_s)
        if exchange.submitted_at_s:
            metrics.before_router.observe(exchange.submitted_at_s - exchange.received_at_s)
        metrics.total.observe(now_s - exchange.received_at_s)
        metrics.prompt_tokens.inc(prompt_used)
        metrics.cached_tokens.inc(generation.cached_tokens)
        metrics.output_tokens.inc(emitted)
        if generation.resumes:
            metrics.resumes.inc(generation.resumes)
        self._emit(exchange.event(generation, self._gateway_id, now_s))


class _EventStream(web.StreamResponse):
    # Headers leave together with the first chunk: one `send()` less per request.
    _send_headers_immediately = False


class _Closing:
    """Closes an exchange at the end of a block, with the outcome of whatever ended the block."""

    def __init__(
        self,
        endpoint: ChatCompletions,
        request: web.Request,
        exchange: Exchange,
        generation: Generation,
    ) -> None:
        self._endpoint = endpoint
        self._request = request
        self._exchange = exchange
        self._generation = generation

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        exchange = self._exchange
        if isinstance(error, PlatformError):
            exchange.outcome, exchange.status = error.code, error.status
        elif isinstance(error, asyncio.CancelledError | ConnectionError):
            exchange.outcome, exchange.status = ErrorCode.CLIENT_CLOSED, 499
        elif error is not None:
            exchange.outcome, exchange.status = ErrorCode.INTERNAL, 500
        self._endpoint.close(self._request, exchange, self._generation)


async def _read_body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        text = f"The request body did not arrive within {_BODY_TIMEOUT_S:g} s."
        raise BadRequestError(ErrorCode.INVALID_REQUEST, text) from None


async def _send_last(
    request: web.Request, response: web.StreamResponse, last: bytes, *, is_cut: bool
) -> None:
    """Write the end of a stream; a reader that does not take it in time is cut."""
    try:
        if not is_cut:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await response.write_eof(last)
            return
    except TimeoutError:
        pass
    if request.transport is not None:
        request.transport.abort()


def _last_chunks(stream: StreamedGeneration, reason: str, *, with_usage: bool) -> bytes:
    chunks = stream.chunks
    parts = [stream.last_chunks(), chunks.finish(reason)]
    if with_usage:
        parts.append(chunks.usage(_usage(stream)))
    return b"".join((*parts, DONE))


def _finish_reason(ending: Ending, generation: Generation) -> str:
    if ending.kind is EndKind.LENGTH:
        return "length"
    return "tool_calls" if generation.pipe.has_calls else "stop"


def _raise_refusal(ending: Ending) -> None:
    if ending.kind is EndKind.REFUSED:
        message = ending.message or "The request could not be served."
        raise PlatformError(ending.code, message, retry_after_s=ending.retry_after_s)


def _usage(generation: Generation) -> dict[str, object]:
    prompt, output = len(generation.spec.prompt), len(generation.emitted)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


async def _nothing() -> None:
    return None


def _now_s() -> float:
    """Return precise monotonic time: that of uvloop's loop is cached and has milliseconds."""
    return time.monotonic()
