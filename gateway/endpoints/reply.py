"""Writes the reply to an accepted request, from its first byte to its last.

The status line is sent with the first token. A failure before the first token is a JSON answer with
its own status. After the first token, an error event ends the stream. Between begin and end,
`dispatch.streamed` itself writes the chunks, one per token. A client that closes its connection
cancels the handler, which cancels the generations. A stored response may continue without a client.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress

from aiohttp import web

from gateway.bodies.mistakes import bad_value
from gateway.bodies.schema_keywords import left_out
from gateway.dispatch.dispatcher import GatewayDispatcher
from gateway.dispatch.generation import Generation, GenerationEnd, WholeGeneration
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.streamed import StreamedGeneration
from gateway.endpoints.exchange import HttpExchange, finish_reason
from gateway.endpoints.keep_alive import KeepAlive, KeepAlives
from gateway.endpoints.settling import settled
from gateway.endpoints.task import LastingEnd, StreamEnd, TextTask, prompt_annotations
from gateway.metrics import FastHistogram
from gateway.server.errors import AnsweredError
from gateway.server.identity import identity_of
from gateway.server.live_response import LiveResponse
from sluice.errors import ErrorCode, PlatformError

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # prevents nginx from buffering the chunks
}


class ReplyWriter:
    """Writes the replies of one worker."""

    def __init__(
        self,
        dispatcher: GatewayDispatcher,
        *,
        itl: FastHistogram,
        pace: AttemptPace,
        keep_alive_s: float,
        gateway_id: str,
    ) -> None:
        """All arguments are parts of the same worker.

        Args:
            dispatcher: Submits requests.
            itl: Histogram of all gaps between tokens.
            pace: Decides whether a token may wait for the next step.
            keep_alive_s: Longest silence of a stream, in seconds.
            gateway_id: Id of this worker.
        """
        self._dispatcher = dispatcher
        self._itl = itl
        self._pace = pace
        self._keep_alives = KeepAlives(keep_alive_s)
        self._gateway_id = gateway_id

    def reply(
        self, request: web.Request, exchange: HttpExchange
    ) -> Coroutine[None, None, web.StreamResponse]:
        """Return a coroutine that writes the reply.

        The coroutine raises PlatformError if the request is refused before any byte was sent.
        """
        return (self._stream if exchange.is_stream else self._whole)(request, exchange)

    # --- streamed ---------------------------------------------------------------------------

    async def _stream(self, request: web.Request, exchange: HttpExchange) -> web.StreamResponse:
        streams, end = self._streams(exchange)
        api = type(exchange.body)
        response = LiveResponse(request, STREAM_HEADERS | _headers(request, exchange, streams))
        exchange.begin(streams, self._gateway_id)
        with (
            self._dispatcher.dispatch(streams, exchange.answers_per_prompt) as answers,
            KeepAlive(streams, self._keep_alives),
        ):
            if (refusal := await answers.begun()) is not None:
                raise _error_of(refusal, exchange)
            _begin(response, streams, exchange)
            last = b""
            while True:
                try:
                    # no coroutine around this loop, because it would use memory in each stream
                    while True:
                        for ended in answers.take_ended():
                            if ended.guard is not None:
                                await settled(ended)
                            last = _end_choice(streams, ended.spec.choice, exchange)
                        if answers.is_over:
                            break
                        await answers.next_change()
                    last += await _ending(answers.refusal, end, exchange, api)
                    break
                except asyncio.CancelledError:
                    if not _detach(response, streams, end):
                        raise
        if exchange.outcome == ErrorCode.SLOW_READER:
            response.cut()
        else:
            await _end(response, streams, last)
        return response

    def _streams(self, exchange: HttpExchange) -> tuple[list[StreamedGeneration], StreamEnd]:
        """Return the choices, and the writer of the stream's end."""
        body = exchange.body
        writers = body.stream_writers(
            exchange.uid,
            model=exchange.model.id,
            created_unix_s=exchange.received_at_unix_ms // 1000,
            fingerprint=exchange.fingerprint,
            specs=exchange.specs,
        )
        streams = [
            body.streamed(spec, chunks, self._itl, self._pace)
            for spec, chunks in zip(exchange.specs, writers.chunks, strict=True)
        ]
        key, tenant = exchange.principal.key, exchange.principal.tenant
        interval_ms = key.interval_ms if body.interval_ms is None else body.interval_ms
        if interval_ms or tenant.gather_ms:
            for stream in streams:
                stream.write_every(interval_ms / 1000)
                stream.gather_for(tenant.gather_ms / 1000)
        if writers.counted is not None:
            for stream in streams:
                stream.count_usage(writers.counted)
        if writers.head is not None and (
            found := prompt_annotations(streams, exchange.answers_per_prompt)
        ):
            streams[0].send(writers.head.prompt_chunk(found))
        return streams, writers.end

    # --- whole ------------------------------------------------------------------------------

    async def _whole(self, request: web.Request, exchange: HttpExchange) -> web.StreamResponse:
        generations = [WholeGeneration(spec) for spec in exchange.specs]
        exchange.begin(generations, self._gateway_id)
        with self._dispatcher.dispatch(generations, exchange.answers_per_prompt) as answers:
            refusal = await answers.finished()
        if refusal is not None:
            raise _error_of(refusal, exchange)
        for generation in generations:
            await settled(generation)
            generation.finish()
        exchange.outcome, exchange.status = finish_reason(generations[0]), 200
        exchange.first_sent_at_s = time.monotonic()
        body = exchange.body
        answer = await body.whole(
            exchange.uid,
            model=exchange.model.id,
            created_unix_s=exchange.received_at_unix_ms // 1000,
            fingerprint=exchange.fingerprint,
            answers=[(it, finish_reason(it)) for it in generations],
            usage=_usage(exchange, type(body)),
            ended_unix_s=int(time.time()),
        )
        return web.Response(
            body=answer,
            content_type="application/json",
            headers=_headers(request, exchange, generations),
        )


def _begin(
    response: LiveResponse, streams: Sequence[StreamedGeneration], exchange: HttpExchange
) -> None:
    """Write the first bytes. Afterwards the streams write without this function.

    Raises:
        ConnectionResetError: The client has closed the connection.
    """
    exchange.has_begun, exchange.status = True, 200
    first = [stream.chunks.first() for stream in streams]
    early = [stream.take_early() for stream in streams]
    transport = response.begin(b"".join(first + early))
    # A stream that begins with a keep-alive comment has no token yet.
    if streams[0].emitted or any(it.emitted for it in streams):
        exchange.first_sent_at_s = time.monotonic()
    for stream in streams:
        stream.go_live(transport, is_chunked=response.is_chunked)
    exchange.forget_body()


async def _ending(
    refusal: GenerationEnd | None, end: StreamEnd, exchange: HttpExchange, api: type[TextTask]
) -> bytes:
    """Return the last bytes of a stream, which are none for a client that reads too slowly."""
    if refusal is None:
        return await end.last(_usage(exchange, api), int(time.time()))
    exchange.outcome = refusal.code
    if refusal.code is ErrorCode.SLOW_READER:
        return b""
    return end.failure(_failure_of(refusal, exchange))


def _detach(response: LiveResponse, streams: Sequence[StreamedGeneration], end: StreamEnd) -> bool:
    """Continue a cancelled stream without its client, and return whether that is possible.

    The stream ends if it is cancelled for another reason, or if its text may still be blocked.
    """
    task = asyncio.current_task()
    stream = streams[0]
    if task is None or not isinstance(end, LastingEnd):
        return False
    if not response.is_lost or stream.guard is not None:
        return False
    with suppress(RuntimeError):  # the rest of an interval cannot be written any more
        stream.stop_writing()
    transport = end.detach()
    if transport is None:
        return False
    response.move_to(transport)
    stream.go_live(transport, is_chunked=False)
    task.uncancel()
    return True


def _end_choice(streams: Sequence[StreamedGeneration], index: int, exchange: HttpExchange) -> bytes:
    """Send the withheld rest of a choice that has ended, with its finish reason.

    Returns:
        Chunks that are not sent yet, to be sent together with the stream's end. They are empty if
        the stream has several choices.
    """
    stream = streams[index]
    reason = finish_reason(stream)
    if not index:
        exchange.outcome = reason
    chunk = stream.last_chunks(reason)
    if len(streams) == 1:
        return chunk
    stream.send(chunk)
    return b""


async def _end(response: LiveResponse, streams: Sequence[StreamedGeneration], last: bytes) -> None:
    unsent = [stream.stop_writing() for stream in streams]
    await response.end(b"".join([*unsent, last]))


def _headers(
    request: web.Request, exchange: HttpExchange, generations: Sequence[Generation]
) -> dict[str, str]:
    headers = {**identity_of(request).headers, "x-sluice-model": exchange.model.id}
    if (schemas := exchange.body.free_schemas) and (ignored := left_out(schemas)):
        headers["x-sluice-ignored-keywords"] = ", ".join(sorted(ignored))
    if dropped_turns := exchange.specs[0].dropped_turns:
        headers["x-sluice-dropped-turns"] = str(dropped_turns)
    if (decision := exchange.decision) is not None and decision.has_decided:
        headers["x-sluice-release"] = exchange.model.release
    if exchange.auto is not None:
        headers |= exchange.auto.headers
    if exchange.principal.guard_sets:
        guards = [it.guard for it in generations if it.guard is not None]
        if unjudged := {name for guard in guards for name in guard.unjudged}:
            headers["x-sluice-unjudged"] = ", ".join(sorted(unjudged))
    return headers if exchange.reservation is None else headers | exchange.reservation.headers


def _usage(exchange: HttpExchange, api: type[TextTask]) -> dict[str, object]:
    reasoning_tokens = sum([it.pipe.reasoning_tokens for it in exchange.generations])
    return api.usage_of(exchange.finish(), reasoning_tokens)


def _error_of(refusal: GenerationEnd, exchange: HttpExchange) -> PlatformError:
    """Return the error for the client, with the headers of the checked limits."""
    reservation, body = exchange.reservation, exchange.body
    headers = {} if reservation is None else dict(reservation.headers)
    error = _failure_of(refusal, exchange)
    if body.deadline_ms is not None and refusal.code is ErrorCode.DEADLINE_EXCEEDED:
        error.message = (
            f"No first token within 'deadline_ms', {body.deadline_ms} ms; allow more time."
        )
        headers["x-should-retry"] = "false"  # official SDKs would retry with the same deadline
    return AnsweredError(error, headers)


def _failure_of(refusal: GenerationEnd, exchange: HttpExchange) -> PlatformError:
    param = exchange.param_names.get(refusal.param)
    if param is not None and refusal.code is ErrorCode.INVALID_REQUEST:
        return bad_value(param, refusal.message)
    message = refusal.message or "The request could not be served; try again."
    return PlatformError(refusal.code, message, retry_after_s=refusal.retry_after_s, param=param)
