"""A client's end of HTTP/2 by `h2`, on the protocol of a server in this process."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    InformationalResponseReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)

from gateway.http2.server import Http2Server
from gateway.server.bounds import ServerLimits
from gateway.server.protocol import HttpServer
from gateway.server.routes import Handler


class PatientClient(H2Connection):
    """A client that goes on with its streams after a GOAWAY, as most do; h2's own does not."""

    def __init__(self) -> None:
        super().__init__(H2Configuration(client_side=True, header_encoding="utf-8"))

    def _receive_goaway_frame(self, frame: Any) -> tuple[list[Any], list[Event]]:
        event = ConnectionTerminated()
        event.error_code, event.last_stream_id = frame.error_code, frame.last_stream_id
        event.additional_data = frame.additional_data
        return [], [event]


HEAD = [(":scheme", "http"), (":authority", "x")]


class Answers:
    """The answers that a client has received.

    Attributes:
        state: State of the client.
        events: All that has come.
    """

    def __init__(self) -> None:
        self.state = PatientClient()
        self.events: list[Event] = []

    def add_request(
        self,
        number: int,
        body: bytes | None,
        path: str,
        method: str,
        more: Sequence[tuple[str, str]],
    ) -> None:
        """Begin a request; without a body (None), its head alone and no end."""
        head = [*HEAD, (":method", method), (":path", path), *more]
        self.state.send_headers(number, head, end_stream=body == b"")
        if body:
            self.state.send_data(number, body, end_stream=True)

    def status(self, number: int = 1) -> int:
        heads = [
            it for it in self.events if isinstance(it, ResponseReceived) and it.stream_id == number
        ]
        return int(dict(heads[0].headers)[":status"]) if heads else 0  # type: ignore[arg-type]

    def fields(self, number: int = 1) -> dict[str, str]:
        heads = [
            it for it in self.events if isinstance(it, ResponseReceived) and it.stream_id == number
        ]
        return dict(heads[0].headers)  # type: ignore[arg-type]

    def body(self, number: int = 1) -> bytes:
        parts = [it for it in self.events if isinstance(it, DataReceived)]
        return b"".join(it.data or b"" for it in parts if it.stream_id == number)

    def has_ended(self, number: int = 1) -> bool:
        return any(isinstance(it, StreamEnded) and it.stream_id == number for it in self.events)

    def was_reset(self, number: int = 1) -> int | None:
        """The code with which the server has ended a stream."""
        found = [it for it in self.events if isinstance(it, StreamReset) and it.stream_id == number]
        return int(found[0].error_code or 0) if found else None

    def goodbyes(self) -> list[ConnectionTerminated]:
        return [it for it in self.events if isinstance(it, ConnectionTerminated)]

    def was_told_to_go_on(self) -> bool:
        return any(isinstance(it, InformationalResponseReceived) for it in self.events)


class Wire(asyncio.Transport):
    """A socket that takes everything at once, or nothing while `is_full`."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.writes: list[bytes] = []
        self.unread = 0
        self.is_full = self.is_closed = self.is_aborted = False

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))
        if self.is_full:
            was_full, self.unread = self.unread > 65536, self.unread + len(data)
            if self.unread > 65536 and not was_full:
                self.protocol.pause_writing()

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None:
        self.is_aborted = True
        self.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class Peer(Answers):
    """A client that has connected; `settle` lets both sides work until nothing moves."""

    def __init__(
        self,
        handler: Handler,
        *,
        limits: ServerLimits | None = None,
        streams_max: int = 100,
        begin: bool = True,
    ) -> None:
        super().__init__()
        limits = limits or ServerLimits()
        self.malformed: list[Any] = []
        self.http = HttpServer(handler, limits, lambda error, _: self.malformed.append(error))
        self.server = Http2Server(self.http, limits, streams_max)
        self.wire = Wire()
        self.wire.protocol = self.http()
        self.wire.protocol.connection_made(self.wire)
        self._read = 0
        if begin:
            self.state.initiate_connection()
            self.send()

    def send(self, raw: bytes = b"") -> None:
        """Let the server have what the client has to tell, and `raw` bytes behind it."""
        if (data := self.state.data_to_send() + raw) and not self.wire.is_closed:
            self.wire.protocol.data_received(data)

    async def settle(self, passes: int = 12) -> None:
        for _ in range(passes):
            await asyncio.sleep(0)
            while self._read < len(self.wire.writes):
                self._read += 1
                self.events += self.state.receive_data(self.wire.writes[self._read - 1])
            self.send()

    def ask(
        self,
        number: int = 1,
        *,
        body: bytes | None = None,
        path: str = "/",
        method: str = "POST",
        more: Sequence[tuple[str, str]] = (),
    ) -> None:
        """See `add_request`."""
        self.add_request(number, body, path, method, more)
        self.send()

    def credit(self, number: int, size: int) -> None:
        """Read so many bytes of an answer."""
        self.state.increment_flow_control_window(size)
        self.state.increment_flow_control_window(size, number)
        self.send()

    async def close(self) -> None:
        self.wire.close()
        await asyncio.sleep(0)
        await self.server.close(1.0)
        self.http.heads.close()
        self.http.idle.close()


class SocketPeer(Answers):
    """A client at a real port. Its answers are read while it waits for something."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__()
        self._reader, self._writer = reader, writer
        self.is_over = False

    @classmethod
    async def connect(cls, port: int, **options: Any) -> "SocketPeer":
        made = cls(*await asyncio.open_connection("127.0.0.1", port, **options))
        made.state.initiate_connection()
        made.send()
        return made

    def send(self, raw: bytes = b"") -> None:
        self._writer.write(self.state.data_to_send() + raw)

    def ask(
        self, number: int, body: bytes = b"", path: str = "/", more: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.add_request(number, body, path, "POST" if body else "GET", more)
        self.send()

    async def until(self, is_so: Callable[[], bool], *, credit: bool = True) -> None:
        """Read until something is so; `credit`: let the server send on."""
        async with asyncio.timeout(60):
            while not is_so():
                data = await self._reader.read(65536)
                if not data:
                    self.is_over = True
                    assert is_so(), self.events[-3:]
                    return
                for event in self.state.receive_data(data):
                    self.events.append(event)
                    if credit and isinstance(event, DataReceived) and event.flow_controlled_length:
                        size = event.flow_controlled_length
                        self.state.acknowledge_received_data(size, event.stream_id)
                self.send()

    async def close(self) -> None:
        self._writer.close()
