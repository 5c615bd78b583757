"""One HTTP/2 connection with its streams, and with bounds on the frames of its client."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import structlog
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError

from gateway.http2.flood import REFUSED, TOO_LARGE, FloodMeter
from gateway.http2.frames import ANY_STREAM, FrameScanner, goaway
from gateway.http2.heads import request_message, response_fields
from gateway.http2.outflow import Http2Outflow
from gateway.http2.state import Http2State
from gateway.http2.stream import Http2Stream
from gateway.server import bounds
from gateway.server.body import BodyBudget
from gateway.server.errors import HttpError

log = structlog.get_logger(__name__)

_CLOSE_S = 5.0  # Seconds for the client to read the reason before the connection is aborted.
# Payload of the ping after the first GOAWAY. A ping has exactly eight bytes.
_GOODBYE = b"goodbye?"


class Http2Connection(asyncio.Protocol):
    """One HTTP/2 connection of a client.

    Attributes:
        is_surplus: Whether this connection exceeds the worker's maximum number of connections.
        streams: Streams that have not ended, by stream number.
    """

    def __init__(self, server: Any, transport: asyncio.Transport, *, is_surplus: bool) -> None:
        """The `server` is an `Http2Server`, which passes the client's first bytes to `begin`."""
        self._server, self._transport = server, transport
        self._loop = asyncio.get_running_loop()
        self._meter, self._scanner = FloodMeter(self._loop.time()), FrameScanner()
        self._state = Http2State(server.streams_max)
        self._outflow = Http2Outflow(transport, self._state, self._meter, self._note_moved)
        self.is_surplus, self.streams = is_surplus, dict[int, Http2Stream]()
        self._has_settings = self._is_leaving = self._is_left = self._is_closed = False
        self._is_deaf = False
        self._stalled: asyncio.TimerHandle | None = None

    # --- the protocol -----------------------------------------------------------------------

    def begin(self, data: bytes) -> None:
        """Process the client's first bytes."""
        self._server.heads.begin(self)
        if self._server.is_draining:
            self.say_goodbye()
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Process the client's frames."""
        if self._is_closed:
            return
        if flaw := self._meter.charge(self._scanner.heads(data), self._loop.time()):
            is_flood = flaw != TOO_LARGE
            self._server.floods += is_flood
            log.warning("connection_cut", because=flaw)
            code = ErrorCodes.ENHANCE_YOUR_CALM if is_flood else ErrorCodes.FRAME_SIZE_ERROR
            self.end(code, flaw)
            return
        try:
            events = self._state.receive_data(data)
        except ProtocolError as error:  # h2 has sent the client a GOAWAY
            log.info("connection_broken", error=type(error).__name__)
            self._close()
            return
        for event in events:
            if (act := self._ACTS.get(type(event))) is not None:
                act(self, event)
        if self._meter.is_in_head or not self._has_settings:
            self._server.heads.begin(self)
        else:
            self._server.heads.end(self)
        self._outflow.wake()

    def pause_writing(self) -> None:
        """Start the deadline of a client that reads more slowly than the server writes."""
        self._outflow.is_paused = True
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop the deadline, because the client has read most of the written bytes."""
        self._outflow.is_paused = False
        self._stop_watching_reader()
        self._outflow.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the connection and cancel its requests."""
        del exc
        self._is_closed = True
        self._stop_watching_reader()
        self._server.forget(self)
        for stream in list(self.streams.values()):
            self._lose(stream)

    def _watch_reader(self) -> None:
        waiting = self._transport.get_write_buffer_size()
        self._stalled = self._loop.call_later(bounds.STALLED_S, self._check_reader, waiting)

    def _check_reader(self, waiting_before: int) -> None:
        if self._transport.get_write_buffer_size() >= waiting_before:
            self._transport.abort()
        else:
            self._watch_reader()

    def _stop_watching_reader(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    # --- the interface that its streams use -------------------------------------------------

    @property
    def body_budget(self) -> BodyBudget:
        """The byte budget of all unfinished request bodies of the worker."""
        return self._server.body_budget

    @property
    def note_due(self) -> Callable[[Http2Stream], None]:
        """The function with which a stream reports that it has bytes or its end to send."""
        return self._outflow.note_due

    def extra_info(self, name: str, default: object) -> object:
        """Return extra information of the socket or of TLS, by name."""
        return self._transport.get_extra_info(name, default)

    def send_head(self, number: int, status: int, fields: Iterable[tuple[str, str]]) -> None:
        """Send the head of an answer, or raise ValueError if a field has a control character."""
        self._state.send_headers(number, response_fields(status, fields))
        self._outflow.wake()

    def acknowledge(self, number: int, size: int) -> None:
        """Grant flow-control credit, so that the client may send `size` more bytes of a body."""
        if not self._is_closed:
            self._state.acknowledge_received_data(size, number)
            self._outflow.wake()

    def reset(self, stream: Http2Stream, code: ErrorCodes = ErrorCodes.INTERNAL_ERROR) -> None:
        """End a stream at once, without cancelling the task that answers it."""
        if not self._is_closed:
            with suppress(ProtocolError):  # the stream may have ended meanwhile
                self._state.reset_stream(stream.number, code)
            self._outflow.wake()
        stream.lose()
        self._note_moved(stream, True)

    def finish(self, stream: Http2Stream) -> None:
        """Send the end of an answer.

        The rest of an unfinished request body is read for at most `bounds.LINGER_S` seconds.
        """
        if stream.is_answered:
            return
        stream.task, stream.is_answered = None, True
        if stream.is_gone:
            self._note_moved(stream, True)
            return
        if not stream.is_heard:
            stream.resume_reading()
            self._server.lingering.begin(stream)
        self.note_due(stream)
        if self.is_surplus:
            self.say_goodbye()

    def _note_moved(self, stream: Http2Stream, has_moved: bool) -> None:
        """Set a deadline for a stream that waits for flow control, and drop an ended stream."""
        stalled = self._server.stalled
        if stream.is_behind and has_moved:
            stalled.end(stream)
        stream.is_behind = bool(stream.size)
        if stream.is_behind:
            stalled.begin(stream)
        elif stream.has_ended and self.streams.pop(stream.number, None) is not None:
            self._server.lingering.end(stream)
            if not self.streams:
                self._rest()

    def _lose(self, stream: Http2Stream) -> None:
        stream.lose()
        if stream.task is not None:
            stream.task.cancel()
        self._note_moved(stream, True)

    def stream_stalled(self, stream: Http2Stream) -> None:
        """End a stream whose client has accepted no bytes for `bounds.STALLED_S` seconds."""
        self.reset(stream, ErrorCodes.CANCEL)
        self._lose(stream)

    def stream_lingers(self, stream: Http2Stream) -> None:
        """Stop reading the body of an answered request, if the client has received the answer."""
        if stream.is_sent:
            self.reset(stream, ErrorCodes.NO_ERROR)
        else:
            self._server.lingering.begin(stream)

    # --- its end ----------------------------------------------------------------------------

    def say_goodbye(self) -> None:
        """Request by a GOAWAY that the client opens no more streams.

        Streams that the client opens before it receives the GOAWAY are still answered.
        """
        if not self._is_leaving and not self._is_closed:
            self._is_leaving = True
            self._outflow.add_frame(goaway(ANY_STREAM, ErrorCodes.NO_ERROR))
            self._state.ping(_GOODBYE)

    def refuse_more(self) -> None:
        """Refuse further streams, and close the connection after the open streams have ended."""
        if not self._is_deaf and not self._is_closed:
            self._is_deaf = self._is_leaving = True
            last = self._state.highest_inbound_stream_id
            self._outflow.add_frame(goaway(last, ErrorCodes.NO_ERROR))
            if not self.streams:
                self._rest()

    def head_timed_out(self) -> None:
        """End a connection on which a request's head was incomplete at its deadline."""
        self.end(ErrorCodes.ENHANCE_YOUR_CALM, "the head of a request did not arrive in time")

    def idle_timed_out(self) -> None:
        """End a connection that has had no requests for the idle timeout."""
        if not self.streams:
            self.end(ErrorCodes.NO_ERROR)

    def end(self, code: ErrorCodes, text: str = "") -> None:
        """Send the client a GOAWAY with the reason, close, and cancel all requests."""
        if not self._is_closed:
            last = self._state.highest_inbound_stream_id
            self._outflow.add_frame(goaway(last, code, text.encode()))
            self._close()

    def _close(self) -> None:
        self._is_closed = True
        self._outflow.flush_last()
        for stream in list(self.streams.values()):
            self._lose(stream)
        self._server.heads.end(self)
        self._transport.close()
        self._loop.call_later(_CLOSE_S, self._transport.abort)

    def _rest(self) -> None:
        """Wait for another request, or close if no further request is accepted."""
        if self._is_closed:
            return
        if self._is_deaf or self._is_left:
            self._loop.call_soon(self._close_idle)  # runs after the last answer was written
        else:
            self._server.idle.begin(self)

    def _close_idle(self) -> None:
        if not self.streams and not self._is_closed:
            self._close()

    # --- frames -----------------------------------------------------------------------------

    def _request(self, event: RequestReceived) -> None:
        number = event.stream_id
        state = self._state.streams.get(number)
        if state is None or state.closed:
            return  # a later frame in the same bytes has ended the stream
        if self._is_deaf or len(self.streams) >= self._server.streams_max:
            self._meter.pay(REFUSED)
            self._state.reset_stream(number, ErrorCodes.REFUSED_STREAM)
            return
        self._server.idle.end(self)
        has_body = event.stream_ended is None
        stream = Http2Stream(self, number, state, has_body=has_body)
        self.streams[number] = stream
        try:
            message = request_message(event.headers, has_body=has_body)
        except HttpError as error:
            status, fields, body = self._server.refusal(error)
            stream.begin_answer(status, fields)
            stream.write(body)
            self.finish(stream)
        else:
            stream.begin(self._server.answer(stream, message))

    def _data(self, event: DataReceived) -> None:
        stream, credit = self.streams.get(event.stream_id), event.flow_controlled_length or 0
        if stream is not None:
            stream.receive(event.data or b"", credit)
        else:
            self.acknowledge(event.stream_id, credit)

    def _body_ended(self, event: StreamEnded) -> None:
        if (stream := self.streams.get(event.stream_id)) is not None:
            stream.end_body()
            self._note_moved(stream, False)

    def _reset_by_client(self, event: StreamReset) -> None:
        if (stream := self.streams.get(event.stream_id)) is not None:
            self._lose(stream)

    def _window(self, event: WindowUpdated) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None and stream.size:
            # Stream 0 stands for the connection. Its waiting streams are already in the queue.
            self.note_due(stream)

    def _settings(self, event: RemoteSettingsChanged) -> None:
        del event
        if not self._has_settings:
            self._has_settings = True
            if not self.streams:
                self._server.idle.begin(self)
        for stream in self.streams.values():
            if stream.size:
                self.note_due(stream)

    def _note_pong(self, event: PingAckReceived) -> None:
        if event.ping_data == _GOODBYE and self._is_leaving:
            self.refuse_more()

    def _left(self, event: ConnectionTerminated) -> None:
        del event
        self._is_left = True
        if not self.streams:
            self._rest()

    _ACTS: ClassVar[Mapping[type[Event], Callable[[Any, Any], None]]] = {
        RequestReceived: _request,
        DataReceived: _data,
        StreamEnded: _body_ended,
        StreamReset: _reset_by_client,
        WindowUpdated: _window,
        RemoteSettingsChanged: _settings,
        PingAckReceived: _note_pong,
        ConnectionTerminated: _left,
    }
