"""The protocol of a connection, on a transport that only notes what is written."""

import asyncio
import gc
import weakref

import pytest
from aiohttp import web
from aiohttp.streams import StreamReader

from gateway.server.body import read_body
from gateway.server.protocol import HttpServer, ServerLimits
from gateway.server.request import HttpRequest


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


def chunked(count: int) -> bytes:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"1\r\na\r\n" * count + b"0\r\n\r\n"


SIMPLE = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
NOTE = web.RequestKey("note", str)
# So many chunks may be unread before aiohttp pauses; the case is a last one that is one too many.
UNREAD_CHUNKS_MAX = 2**18 // 16


@pytest.mark.parametrize("extra", [0, 1, 2])
async def test_a_body_of_very_many_chunks_stops_no_later_request(extra: int) -> None:
    read: asyncio.Queue[bytes] = asyncio.Queue()

    async def handler(request: web.BaseRequest) -> web.Response:
        assert isinstance(request, web.Request)
        read.put_nowait(await read_body(request))
        return web.Response(text="ok")

    protocol = HttpServer(handler, ServerLimits(), lambda *_: None)()
    protocol.connection_made(Transport())
    try:
        async with asyncio.timeout(8):  # less than a slow body has
            for sent, body in (
                (chunked(UNREAD_CHUNKS_MAX + extra), b"a" * (UNREAD_CHUNKS_MAX + extra)),
                (SIMPLE, b"hello"),
                (chunked(2), b"aa"),
            ):
                protocol.data_received(sent)  # all of it at once, nothing comes later
                assert await read.get() == body
    finally:
        protocol.connection_lost(None)


class Ending(Transport):
    """Says when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = asyncio.Event()

    def close(self) -> None:
        self.is_closed.set()


async def test_a_connection_ends_when_no_request_has_come_for_long_and_not_before() -> None:
    may_answer = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.Response:
        await may_answer.wait()
        return web.Response(text="ok")

    server = HttpServer(handler, ServerLimits(idle_timeout_s=0.05), lambda *_: None)
    protocol, transport = server(), Ending()
    protocol.connection_made(transport)
    async with asyncio.timeout(10):
        protocol.data_received(SIMPLE)
        await asyncio.sleep(0.2)
        assert not transport.is_closed.is_set()  # it is being answered
        may_answer.set()
        await transport.is_closed.wait()
    assert b"200 OK" in transport.written
    protocol.connection_lost(None)
    assert not len(server.idle)
    server.heads.close()


async def test_requests_that_wait_for_their_turn_have_it_in_their_order() -> None:
    numbers = iter(range(100))

    async def handler(request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(0)
        return web.Response(text=f"<{next(numbers)}:{request.path}>")

    server = HttpServer(handler, ServerLimits(), lambda *_: None)
    protocol, transport = server(), Transport()
    protocol.connection_made(transport)
    wanted = [f"<{number}:/{number}>".encode() for number in range(100)]
    async with asyncio.timeout(10):
        protocol.data_received(
            b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in range(100))
        )
        while wanted[-1] not in transport.written:  # noqa: ASYNC110 - the transport has no event
            await asyncio.sleep(0.001)
    assert [transport.written.find(it) for it in wanted] == sorted(
        transport.written.find(it) for it in wanted
    )
    assert -1 not in [transport.written.find(it) for it in wanted]
    protocol.connection_lost(None)
    server.idle.close()
    server.heads.close()


class Noted:
    """Somewhere in what answers a request."""


async def test_what_a_hang_up_has_cancelled_is_gone_without_the_collector() -> None:
    noted: list[weakref.ref[Noted]] = []

    async def handler(request: web.BaseRequest) -> web.Response:
        held = Noted()
        noted.append(weakref.ref(held))
        await asyncio.sleep(60)
        raise AssertionError(held)

    server = HttpServer(handler, ServerLimits(), lambda *_: None)
    protocol = server()
    protocol.connection_made(Transport())
    gc.disable()
    try:
        async with asyncio.timeout(10):
            protocol.data_received(SIMPLE)
            while not noted:  # noqa: ASYNC110 - see above
                await asyncio.sleep(0.001)
            protocol.connection_lost(None)
            del protocol
            while noted[0]() is not None:  # noqa: ASYNC110 - see above
                await asyncio.sleep(0.001)
    finally:
        gc.enable()
        server.heads.close()


async def test_a_request_forgets_its_head_and_body_and_keeps_what_was_noted_in_it() -> None:
    kept: list[HttpRequest] = []
    goes_on = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.Response:
        assert isinstance(request, HttpRequest)
        assert await read_body(request) == b"hello"
        assert (request.path, request.headers["host"]) == ("/", "x")
        request[NOTE] = "noted"
        request.forget()
        kept.append(request)
        await goes_on.wait()
        return web.Response(text="ok")

    server = HttpServer(handler, ServerLimits(), lambda *_: None)
    protocol, transport = server(), Transport()
    protocol.connection_made(transport)
    protocol.data_received(SIMPLE)
    async with asyncio.timeout(10):
        while not kept:  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.001)
        [request] = kept
        gc.collect()
        alive = [it for it in gc.get_objects() if isinstance(it, StreamReader) and it.total_bytes]
        assert not alive
        assert not request.headers
        assert request[NOTE] == "noted"
        assert request.keep_alive
        goes_on.set()
        while b"200 OK" not in transport.written:  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.001)
        protocol.data_received(SIMPLE)  # the next one has its own
        while len(kept) < 2:  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.001)
    protocol.connection_lost(None)
    server.idle.close()
    server.heads.close()
