"""The protocol of a connection, on a transport that only notes what is written."""

import asyncio
import gc
import weakref

import pytest
from aiohttp import web
from aiohttp.http_parser import HttpRequestParser
from aiohttp.streams import StreamReader
from hypothesis import given, settings
from hypothesis import strategies as st

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


async def test_a_request_cancelled_by_a_hang_up_is_freed_without_the_collector() -> None:
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


def held() -> set[int]:
    """Return what there is of parsers, and of bodies that have been read."""
    gc.collect()
    return {
        id(it)
        for it in gc.get_objects()
        if isinstance(it, HttpRequestParser) or (isinstance(it, StreamReader) and it.total_bytes)
    }


async def test_a_request_forgets_its_head_and_body_and_keeps_its_notes() -> None:
    kept: list[HttpRequest] = []
    goes_on = asyncio.Event()
    before = held()

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
        assert not held() - before
        protocol.resume_reading()  # nothing was paused
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


BODIES = (b"", b"hello", b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"0\r\n\r\n" * 9)
HEADS = (
    b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b",
    b"\r\nPOST /%d HTTP/1.1\r\nContent-Length: %d\r\nHost: x\r\n\r\n%b",
    b"POST /%d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
)


def spelled(number: int, form: int, body: bytes) -> bytes:
    """Return one request; the last of the forms is chunked."""
    if form < 2:
        return HEADS[form] % (number, len(body), body)
    chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return HEADS[form] % number + chunk + b"0\r\n\r\n"


@settings(max_examples=300, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(BODIES)), min_size=1, max_size=5
    ),
    cuts=st.lists(st.integers(0, 600), max_size=12),
    turns=st.lists(st.integers(0, 4), min_size=13, max_size=13),
)
def test_a_parser_that_is_dropped_takes_nothing_along(
    requests: list[tuple[int, bytes]], cuts: list[int], turns: list[int]
) -> None:
    answered: list[tuple[str, bytes]] = []

    async def handler(request: web.BaseRequest) -> web.Response:
        assert isinstance(request, HttpRequest)
        path, body = request.path, await read_body(request)
        request.forget()
        await asyncio.sleep(0)  # more may come meanwhile
        request.forget()
        answered.append((path, body))
        return web.Response(text="ok")

    async def run() -> None:
        server = HttpServer(handler, ServerLimits(), lambda *_: None)
        protocol = server()
        protocol.connection_made(Transport())
        sent = b"".join(spelled(number, *it) for number, it in enumerate(requests))
        places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
        for start, end, loops in zip(places, places[1:], turns, strict=False):
            protocol.data_received(sent[start:end])
            for _ in range(loops):
                await asyncio.sleep(0)
        for _ in range(60):
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        server.idle.close()
        server.heads.close()

    asyncio.run(run())
    assert answered == [(f"/{number}", body) for number, (_, body) in enumerate(requests)]


async def test_a_head_with_other_line_ends_is_refused() -> None:
    """Where heads end is looked for by the one ending that the parser takes."""
    transport = Transport()

    async def handler(_: web.BaseRequest) -> web.Response:
        raise AssertionError("no request came")

    server = HttpServer(handler, ServerLimits(), lambda *_: None)
    protocol = server()
    protocol.connection_made(transport)
    protocol.data_received(SIMPLE.replace(b"\r\n", b"\n"))
    async with asyncio.timeout(10):
        while not transport.written:  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.001)
    assert transport.written.startswith(b"HTTP/1.0 400"), transport.written
    protocol.connection_lost(None)
    server.heads.close()


async def test_a_head_behind_a_running_request_has_the_same_bounds() -> None:
    may_answer = asyncio.Event()

    async def handler(_: web.BaseRequest) -> web.Response:
        await may_answer.wait()
        return web.Response(text="ok")

    head = b"GET / HTTP/1.1\r\n" + b"X-Y: %b\r\n" % (b"a" * 9_000)
    server = HttpServer(handler, ServerLimits(head_timeout_s=0.1), lambda *_: None)
    large, slow = Ending(), Ending()
    protocols = [server(), server()]
    for protocol, transport in zip(protocols, (large, slow), strict=True):
        protocol.connection_made(transport)
        protocol.data_received(SIMPLE)
        protocol.data_received(head)
    await asyncio.sleep(0.3)
    assert not slow.is_closed.is_set(), "the request before has its time"
    for _ in range(3):
        assert not large.is_closed.is_set()
        protocols[0].data_received(b"X-Z: %b\r\n" % (b"a" * 9_000))
    assert large.is_closed.is_set()
    may_answer.set()
    async with asyncio.timeout(10):
        await slow.is_closed.wait()
    assert slow.written.index(b"200 OK") < slow.written.index(b" 408 ")
    for protocol in protocols:
        protocol.connection_lost(None)
    server.idle.close()
    server.heads.close()


async def test_bytes_behind_a_refused_request_are_no_head() -> None:
    may_answer = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.Response:
        assert isinstance(request, HttpRequest)
        with pytest.raises(web.RequestPayloadError):
            await request.content.read()
        await may_answer.wait()
        return web.Response(text="refused")

    server = HttpServer(handler, ServerLimits(), lambda *_: None)
    protocol, transport = server(), Ending()
    protocol.connection_made(transport)
    protocol.data_received(chunked(1)[:-5])
    await asyncio.sleep(0)
    for _ in range(9):
        protocol.data_received(b"no chunk" * 1_000)
        await asyncio.sleep(0)
    assert not transport.is_closed.is_set(), "the answer is on its way"
    may_answer.set()
    async with asyncio.timeout(10):
        await transport.is_closed.wait()
    assert b"refused" in transport.written
    protocol.connection_lost(None)
    server.idle.close()
    server.heads.close()


async def test_so_has_one_that_comes_while_a_slow_client_takes_its_answer() -> None:
    async def handler(_: web.BaseRequest) -> web.Response:
        return web.Response(body=b"x" * 1_000_000)

    server = HttpServer(handler, ServerLimits(), lambda *_: None)
    protocol, transport = server(), Ending()
    protocol.connection_made(transport)
    protocol.pause_writing()
    protocol.data_received(SIMPLE)
    async with asyncio.timeout(10):
        while not transport.written:  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    protocol.data_received(b"GET / HTTP/1.1\r\n")
    for _ in range(4):
        assert not transport.is_closed.is_set()
        protocol.data_received(b"X-Y: %b\r\n" % (b"a" * 9_000))
    assert transport.is_closed.is_set()
    protocol.connection_lost(None)
    server.idle.close()
    server.heads.close()
