"""HTTP/2 between h2's client and our protocol, in one process."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from gateway.http2 import outflow
from gateway.http2.flood import HEAD_BYTES_MAX, PURSE_MAX, FloodMeter
from gateway.http2.frames import (
    CONTINUATION,
    DATA,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    FrameHead,
    FrameScanner,
    data_head,
    goaway,
)
from gateway.http2.heads import request_message, response_fields
from gateway.http2.state import STREAM_WINDOW_BYTES
from gateway.server import bounds
from gateway.server.body import read_body
from gateway.server.bounds import ServerLimits
from gateway.server.errors import HttpError
from gateway.server.live_response import LiveResponse
from tests.support.http2_peer import HEAD, Peer


async def echo(request: web.Request) -> web.StreamResponse:
    return web.Response(body=await read_body(request), headers={"X-Path": request.path})


class Live:
    """A handler that streams what a test writes."""

    def __init__(self) -> None:
        self.streams: dict[str, Any] = {}
        self.ended: list[str] = []
        self.cancelled: list[str] = []
        self.may_end = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = LiveResponse(request, {"Content-Type": "text/event-stream"})
        assert not response.is_chunked
        path = request.path
        self.streams[path] = response.begin(b"first ")
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled.append(path)
            raise
        await response.end(b"last")
        self.ended.append(path)
        return response


@asynccontextmanager
async def peer(handler: Any = echo, **options: Any) -> AsyncGenerator[Peer]:
    made = Peer(handler, **options)
    async with asyncio.timeout(20):
        await made.settle()
        try:
            yield made
        finally:
            await made.close()


# --- frames ---------------------------------------------------------------------------------


FRAMES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 255), st.binary(max_size=40)), max_size=20
)


@given(FRAMES, st.data())
def test_frames_are_found_however_their_bytes_are_cut(frames: Any, data: Any) -> None:
    sent = PREFACE
    for kind, flags, body in frames:
        sent += len(body).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + body
    places = data.draw(st.lists(st.integers(0, len(sent)), max_size=30).map(sorted))
    scanner, found = FrameScanner(), list[FrameHead]()
    for begin, end in zip([0, *places], [*places, len(sent)], strict=True):
        found += scanner.heads(sent[begin:end])
    assert found == [FrameHead(kind, flags, len(body)) for kind, flags, body in frames]


def test_a_purse_pays_for_frames_and_is_filled_by_time_and_answers() -> None:
    meter = FloodMeter(0.0)
    ping = FrameHead(6, 0, 8)
    assert not meter.charge([ping] * int(PURSE_MAX), 0.0)
    assert "ask for nothing" in meter.charge([ping], 0.0)
    meter.earn(1)
    assert not meter.charge([ping] * 9, 0.0)
    assert meter.charge([ping], 0.0)
    assert not meter.charge([ping] * 50, 1.0)
    meter.earn(10**9)
    assert meter.charge([ping] * int(PURSE_MAX + 1), 1.0)  # no more than a full one


@pytest.mark.parametrize(
    ("frame", "may_come"),
    [
        (FrameHead(DATA, 0, 16384), 10**4),  # the window bounds it
        (FrameHead(DATA, 1, 10), 10**4),  # a small request
        (FrameHead(HEADERS, 5, 100), 10**4),  # the bound of streams
        (FrameHead(DATA, 0, 0), PURSE_MAX),
        (FrameHead(RST_STREAM, 0, 4), PURSE_MAX / 8),
        (FrameHead(SETTINGS, 0, 480), PURSE_MAX / 11),
        (FrameHead(WINDOW_UPDATE, 0, 4), PURSE_MAX),
        (FrameHead(99, 0, 0), PURSE_MAX),
    ],
)
def test_each_kind_of_frame_has_a_price(frame: FrameHead, may_come: float) -> None:
    assert not FloodMeter(0.0).charge([frame] * int(may_come), 0.0)
    if may_come < 10**4:
        assert FloodMeter(0.0).charge([frame] * int(may_come + 1), 0.0)


def test_a_head_in_many_frames_has_a_bound() -> None:
    meter = FloodMeter(0.0)
    assert not meter.charge([FrameHead(HEADERS, 0, 10_000)], 0.0)
    assert meter.is_in_head
    assert not meter.charge([FrameHead(CONTINUATION, 4, 10_000)], 0.0)
    assert not meter.is_in_head
    more = [FrameHead(HEADERS, 0, 1), FrameHead(CONTINUATION, 0, HEAD_BYTES_MAX)]
    assert "too long" in meter.charge(more, 0.0)


# --- heads ----------------------------------------------------------------------------------

GOOD = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/a?b=c"), (b":authority", b"h")]


def test_the_head_of_a_request() -> None:
    made = request_message([*GOOD, (b"x-one", b"1"), (b"cookie", b"a")], has_body=False)
    assert (made.method, made.path, made.url.path, made.url.query_string) == (
        "GET",
        "/a?b=c",
        "/a",
        "b=c",
    )
    assert dict(made.headers) == {"x-one": "1", "cookie": "a", "Host": "h"}
    assert request_message([*GOOD[:2], (b":path", b"*"), GOOD[3]], has_body=False).path == "*"


BROKEN: dict[str, tuple[list[tuple[bytes, bytes]], int]] = {
    "no method": (GOOD[1:], 400),
    "no path": ([*GOOD[:2], GOOD[3]], 400),
    "no scheme": ([GOOD[0], *GOOD[2:]], 400),
    "no host": (GOOD[:3], 400),
    "twice": ([GOOD[0], *GOOD], 400),
    "unknown pseudo": ([*GOOD, (b":protocol", b"websocket")], 400),
    "pseudo after a field": ([(b"x", b"1"), *GOOD], 400),
    "empty path": ([*GOOD[:2], (b":path", b""), GOOD[3]], 400),
    "relative path": ([*GOOD[:2], (b":path", b"a"), GOOD[3]], 400),
    "absolute path": ([*GOOD[:2], (b":path", b"http://x/"), GOOD[3]], 400),
    "path with space": ([*GOOD[:2], (b":path", b"/a b"), GOOD[3]], 400),
    "path with bytes": ([*GOOD[:2], (b":path", b"/\xff"), GOOD[3]], 400),
    "bad method": ([(b":method", b"G T"), *GOOD[1:]], 400),
    "connect": ([(b":method", b"CONNECT"), *GOOD[1:]], 400),
    "upper case": ([*GOOD, (b"X-One", b"1")], 400),
    "empty name": ([*GOOD, (b"", b"1")], 400),
    "space in a name": ([*GOOD, (b"a b", b"1")], 400),
    "colon in a name": ([*GOOD, (b"a:b", b"1")], 400),
    "line in a value": ([*GOOD, (b"a", b"1\r\nb: 2")], 400),
    "nul in a value": ([*GOOD, (b"a", b"\x00")], 400),
    "space before a value": ([*GOOD, (b"a", b" 1")], 400),
    "space behind a value": ([*GOOD, (b"a", b"1\t")], 400),
    "connection": ([*GOOD, (b"connection", b"close")], 400),
    "transfer coding": ([*GOOD, (b"transfer-encoding", b"chunked")], 400),
    "upgrade": ([*GOOD, (b"upgrade", b"websocket")], 400),
    "te": ([*GOOD, (b"te", b"gzip")], 400),
    "length without a body": ([*GOOD, (b"content-length", b"5")], 400),
    "long path": ([*GOOD[:2], (b":path", b"/" + b"a" * 9_000), GOOD[3]], 414),
    "long value": ([*GOOD, (b"a", b"1" * 17_000)], 431),
    "long name": ([*GOOD, (b"a" * 17_000, b"1")], 431),
    "many": ([*GOOD, *((b"a", b"1") for _ in range(200))], 431),
    "much": ([*GOOD, *((b"a", b"1" * 10_000) for _ in range(5))], 431),
}


@pytest.mark.parametrize(("fields", "status"), BROKEN.values(), ids=BROKEN)
def test_a_broken_head_is_refused(fields: list[tuple[bytes, bytes]], status: int) -> None:
    with pytest.raises(HttpError) as refused:
        request_message(fields, has_body=False)
    assert refused.value.status == status


def test_answers_have_no_fields_of_http_1() -> None:
    made = response_fields(200, {"Connection": "close", "X-One": "1", "Server": "s"}.items())
    assert made == [(b":status", b"200"), (b"x-one", b"1"), (b"server", b"s")]
    assert [it.indexable for it in made] == [True, False, True]
    with pytest.raises(ValueError, match="control"):
        response_fields(200, {"x": "a\r\nb"}.items())


# --- requests and answers -------------------------------------------------------------------


async def test_a_request_and_its_answer() -> None:
    async with peer() as client:
        client.ask(body=b"hello", path="/a%20b?c")
        await client.settle()
        assert (client.status(), client.body(), client.has_ended()) == (200, b"hello", True)
        assert client.fields()["x-path"] == "/a b"
        assert client.fields()["content-length"] == "5"
        assert "connection" not in client.fields()
        assert not client.server.has_requests
        client.ask(3, body=b"again")
        await client.settle()
        assert client.body(3) == b"again"
        assert client.http.open_connections == 1


async def test_the_preface_may_come_byte_by_byte_and_http_1_1_too() -> None:
    made = Peer(echo, begin=False)
    made.state.initiate_connection()
    for byte in made.state.data_to_send():
        made.wire.protocol.data_received(bytes([byte]))
    made.ask(body=b"hello")
    await made.settle()
    assert made.body() == b"hello"
    await made.close()
    for text in (
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi",
        b"PRI / HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        made = Peer(echo, begin=False)
        for byte in text:
            made.wire.protocol.data_received(bytes([byte]))
        for _ in range(10):
            await asyncio.sleep(0)
        status = b" 200 " if text[:4] == b"POST" else b" 400 "
        assert status in b"".join(made.wire.writes)[:20]
        await made.close()


async def test_only_the_first_bytes_of_a_connection_may_be_the_preface() -> None:
    made = Peer(echo, begin=False)
    made.wire.protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
    for _ in range(10):
        await asyncio.sleep(0)
    made.wire.protocol.data_received(PREFACE)
    for _ in range(10):
        await asyncio.sleep(0)
    assert b" 400 Bad Request" in b"".join(made.wire.writes)
    await made.close()


async def test_events_of_many_streams_in_one_turn_are_one_write() -> None:
    live = Live()
    async with peer(live) as client:
        for number in range(1, 101, 2):
            client.ask(number, body=b"{}", path=f"/{number}")
        await client.settle()
        writes = len(client.wire.writes)
        for stream in live.streams.values():
            stream.write(b"to")
            stream.write(b"ken ")
        await client.settle()
        assert len(client.wire.writes) == writes + 1
        live.may_end.set()
        await client.settle()
        assert len(client.wire.writes) == writes + 2
        for number in range(1, 101, 2):
            assert client.body(number) == b"first token last"
            assert client.has_ended(number)
        assert not client.server.open_streams


async def test_a_slow_stream_holds_up_itself_alone() -> None:
    live = Live()
    async with peer(live) as client:
        client.state.increment_flow_control_window(2**30)
        client.ask(1, body=b"{}", path="/slow")
        client.ask(3, body=b"{}", path="/other")
        await client.settle()
        live.streams["/slow"].write(bytes(100_000))
        live.streams["/other"].write(b"token ")
        await client.settle()
        assert len(client.body(1)) == 65_535
        assert live.streams["/slow"].get_write_buffer_size() == 100_006 - 65_535
        assert client.body(3) == b"first token "
        client.state.increment_flow_control_window(10, 1)
        client.send()
        await client.settle()
        assert len(client.body(1)) == 65_545
        client.credit(1, 1 << 20)
        live.may_end.set()
        await client.settle()
        assert len(client.body(1)) == 100_010
        assert client.has_ended(1)
        assert client.has_ended(3)


async def test_the_window_of_all_streams_is_shared_in_turns() -> None:
    live = Live()
    async with peer(live) as client:
        for number in (1, 3):
            client.ask(number, body=b"{}", path=f"/{number}")
        await client.settle()
        for number in (1, 3):
            live.streams[f"/{number}"].write(bytes(60_000))
        await client.settle()
        assert len(client.body(1)) + len(client.body(3)) == 65_535
        for _ in range(8):
            client.state.increment_flow_control_window(8_000)
            client.send()
            await client.settle()
        assert (len(client.body(1)), len(client.body(3))) == (60_006, 60_006)


async def test_a_setting_opens_the_windows_of_streams_that_wait() -> None:
    live = Live()
    async with peer(live) as client:
        client.state.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 10})
        client.send()
        client.ask(1, body=b"{}", path="/1")
        await client.settle()
        live.streams["/1"].write(b"0123456789")
        await client.settle()
        assert client.body(1) == b"first 0123"
        client.state.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})
        client.send()
        await client.settle()
        assert client.body(1) == b"first 0123456789"


async def test_a_full_socket_stops_answers_and_not_reading() -> None:
    live = Live()
    async with peer(live) as client:
        client.state.increment_flow_control_window(2**30)
        client.ask(1, body=b"{}", path="/1")
        await client.settle()
        client.state.increment_flow_control_window(2**30, 1)
        client.send()
        client.wire.is_full = True
        live.streams["/1"].write(bytes(200_000))
        await client.settle()
        live.streams["/1"].write(b"later")
        await client.settle()
        assert live.streams["/1"].get_write_buffer_size() == 5
        client.wire.is_full, client.wire.unread = False, 0
        client.wire.protocol.resume_writing()
        await client.settle()
        assert client.body(1).endswith(b"later")


async def test_a_client_that_asks_and_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outflow, "UNREAD_BYTES_MAX", 70_000)

    async def large_head(_: web.Request) -> web.Response:
        return web.Response(headers={"X-Large": "a" * 15_000})

    async with peer(large_head) as client:
        client.wire.is_full = True
        for number in range(1, 13, 2):
            client.ask(number, body=b"")
        await client.settle()
        assert client.wire.is_aborted


async def test_a_stream_of_which_nothing_is_taken_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "STALLED_S", 0.02)
    live = Live()
    async with peer(live) as client:
        client.ask(1, body=b"{}", path="/1")
        client.ask(3, body=b"{}", path="/3")
        await client.settle()
        live.streams["/1"].write(bytes(100_000))
        await asyncio.sleep(0.05)
        await client.settle()
        assert client.was_reset(1) == ErrorCodes.CANCEL
        assert live.cancelled == ["/1"]
        assert client.was_reset(3) is None


async def test_an_abort_ends_one_stream() -> None:
    live = Live()
    async with peer(live) as client:
        client.ask(1, body=b"{}", path="/1")
        client.ask(3, body=b"{}", path="/3")
        await client.settle()
        live.streams["/1"].abort()
        with pytest.raises(RuntimeError):
            live.streams["/1"].write(b"x")
        live.streams["/3"].write(b"on")
        await client.settle()
        assert client.was_reset(1) == ErrorCodes.INTERNAL_ERROR
        assert client.body(3) == b"first on"


async def test_a_client_that_ends_a_stream_cancels_its_request() -> None:
    live = Live()
    async with peer(live) as client:
        client.ask(1, body=b"{}", path="/1")
        client.ask(3, body=b"{}", path="/3")
        await client.settle()
        client.state.reset_stream(1, ErrorCodes.CANCEL)
        client.send()
        await client.settle()
        assert live.cancelled == ["/1"]
        assert live.streams["/1"].is_closing()
        assert client.server.open_streams == 1


async def test_a_client_that_hangs_up_cancels_all_of_its_requests() -> None:
    live = Live()
    async with peer(live) as client:
        for number in (1, 3):
            client.ask(number, body=b"{}", path=f"/{number}")
        await client.settle()
        client.wire.close()
        await asyncio.sleep(0.01)
        assert sorted(live.cancelled) == ["/1", "/3"]
        assert not client.server.open_connections


async def test_a_request_that_is_ended_with_the_same_bytes_is_never_begun() -> None:
    live = Live()
    async with peer(live) as client:
        for number in (1, 3, 5):
            client.state.send_headers(
                number, [*HEAD, (":method", "GET"), (":path", f"/{number}")], end_stream=True
            )
            if number < 5:
                client.state.reset_stream(number)
        client.send()
        await client.settle()
        assert list(live.streams) == ["/5"]
        client.state.reset_stream(5)
        client.send()
        client.state.send_headers(7, [*HEAD, (":method", "GET"), (":path", "/7")], end_stream=True)
        client.send()
        client.state.reset_stream(7)  # before its task has begun
        client.send()
        await client.settle()
        assert not client.server.open_streams


# --- bodies ---------------------------------------------------------------------------------


async def test_a_large_body_comes_as_it_is_read() -> None:
    async with peer() as client:
        client.state.increment_flow_control_window(2**30)
        client.ask(1)
        client.state.increment_flow_control_window(2**30, 1)
        left = 3 << 20
        while left:
            size = min(left, client.state.local_flow_control_window(1), 16_384)
            assert size
            client.state.send_data(1, b"a" * size, end_stream=size == left)
            left -= size
            client.send()
            await client.settle(3)
        await client.settle()
        assert (client.status(), len(client.body())) == (200, 3 << 20)
        assert not client.http.body_bytes


async def test_a_body_that_is_not_read_stops_at_its_window() -> None:
    may_read = asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        if request.path == "/late":
            await may_read.wait()
        return await echo(request)

    async with peer(late) as client:
        client.ask(1, path="/late")
        await client.settle()
        for _ in range(STREAM_WINDOW_BYTES // 16_384):
            client.state.send_data(1, bytes(16_384))
        client.send()
        await client.settle()
        assert client.state.local_flow_control_window(1) == 0
        client.ask(3, body=b"others pass")
        await client.settle()
        assert client.body(3) == b"others pass"
        may_read.set()
        await client.settle()
        assert client.state.local_flow_control_window(1) > 0
        client.state.send_data(1, b"", end_stream=True)
        client.credit(1, 1 << 20)
        await client.settle()
        assert len(client.body(1)) == STREAM_WINDOW_BYTES


async def test_an_early_answer_drops_the_rest_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "LINGER_S", 0.25)

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=401)

    async with peer(refuse) as client:
        client.ask(1)
        await client.settle()
        assert client.status() == 401
        assert client.has_ended()
        for _ in range(100):  # more than the windows
            client.state.send_data(1, bytes(16_384))
            client.send()
            await client.settle(2)
        await asyncio.sleep(0.3)
        await client.settle()
        assert client.was_reset() == ErrorCodes.NO_ERROR
        assert not client.server.open_streams


async def test_a_client_that_waits_to_be_asked_for_its_body() -> None:
    async with peer() as client:
        client.ask(1, more=[("expect", "100-continue"), ("content-length", "2")])
        await client.settle()
        assert client.was_told_to_go_on()
        assert not client.status()
        client.state.send_data(1, b"hi", end_stream=True)
        client.send()
        await client.settle()
        assert client.body() == b"hi"


async def test_trailers_end_a_body_and_head_has_none() -> None:
    async with peer() as client:
        client.ask(1)
        client.state.send_data(1, b"hi")
        client.state.send_headers(1, [("x-sum", "1")], end_stream=True)
        client.send()
        client.ask(3, body=b"", method="HEAD")
        await client.settle()
        assert client.body(1) == b"hi"
        assert (client.status(3), client.body(3), client.has_ended(3)) == (200, b"", True)


async def test_a_malformed_request_is_answered_and_others_go_on() -> None:
    live = Live()
    async with peer(live) as client:
        client.ask(1, body=b"{}", path="/1")
        client.ask(3, body=b"{}", path="/" + "a" * 9_000)
        client.ask(5, path="relative")
        await client.settle()
        assert (client.status(3), client.status(5)) == (414, 400)
        assert b'"code":"invalid_request"' in client.body(3)
        assert client.fields(3)["x-request-id"]
        assert len(client.malformed) == 2
        live.streams["/1"].write(b"on")
        await client.settle()
        assert client.body(1) == b"first on"


async def test_a_handler_that_fails_ends_its_stream_alone() -> None:
    async def failing(request: web.Request) -> web.StreamResponse:
        if request.path == "/bug":
            raise RuntimeError("a bug")
        return await echo(request)

    async with peer(failing) as client:
        client.ask(1, body=b"{}", path="/bug")
        client.ask(3, body=b"hi")
        await client.settle()
        assert client.was_reset(1) == ErrorCodes.INTERNAL_ERROR
        assert client.body(3) == b"hi"
        assert not client.server.open_streams


# --- bounds ---------------------------------------------------------------------------------


async def test_streams_beyond_the_bound_are_refused_and_others_go_on() -> None:
    live = Live()
    async with peer(live, streams_max=2) as client:
        assert client.state.remote_settings.max_concurrent_streams == 2
        client.state.remote_settings._settings[SettingCodes.MAX_CONCURRENT_STREAMS].append(99)
        client.state.remote_settings.acknowledge()  # a client that does not mind
        for number in (1, 3, 5, 7):
            client.ask(number, body=b"{}", path=f"/{number}")
        await client.settle()
        assert [client.was_reset(it) for it in (1, 3, 5, 7)] == [None, None, 7, 7]
        assert list(live.streams) == ["/1", "/3"]
        live.may_end.set()
        await client.settle()
        client.ask(9, body=b"{}", path="/9")
        await client.settle()
        assert client.has_ended(9)


def frame(kind: int, body: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


FLOODS = {
    "pings": frame(6, bytes(8)) * 5000,
    "settings": frame(4) * 5000,
    "many settings": frame(4, b"\x00\x99\x00\x00\x00\x01" * 2000) * 20,
    "windows": frame(8, b"\x00\x00\x00\x01") * 5000,
    "priorities": frame(2, b"\x00\x00\x00\x01\x01", stream=3) * 5000,
    "unknown": frame(77) * 5000,
    "a head in many frames": frame(1, b"", stream=1) + frame(9, bytes(1000), stream=1) * 70,
    "empty frames of a head": frame(1, b"", stream=1) + frame(9, b"", stream=1) * 70,
    "a large frame": frame(0, bytes(20_000), stream=1),
    "data without a stream": frame(0, bytes(10), stream=1),
    "a head that unpacks to much": frame(
        1, b"\x40\x01a\x7f\x81\x1e" + bytes(4000) + b"\xbe" * 12_000, 4, 1
    ),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_floods_end_their_connection(flood: bytes) -> None:
    async with peer() as client:
        client.send(flood)
        await asyncio.sleep(0)
        assert client.wire.is_closed
        await client.settle()
        assert client.goodbyes()[-1].error_code
        assert len(b"".join(client.wire.writes)) < 100_000
        await asyncio.sleep(0)
        assert not client.server.open_connections


async def test_requests_that_are_begun_and_ended_all_the_time_end_their_connection() -> None:
    live = Live()
    async with peer(live) as client:
        for number in range(1, 3000, 2):
            client.state.send_headers(
                number, [*HEAD, (":method", "GET"), (":path", "/")], end_stream=True
            )
            client.state.reset_stream(number)
            if number % 20 == 1:
                client.send()
                if client.wire.is_closed:
                    break
        assert client.wire.is_closed
        assert client.server.floods == 1
        assert not live.streams


async def test_a_client_cannot_enlarge_our_table_of_fields() -> None:
    async with peer() as client:
        client.state.update_settings({SettingCodes.HEADER_TABLE_SIZE: 2**31})
        client.ask(1, body=b"hi")
        await client.settle()
        assert client.body() == b"hi"
        connection = next(iter(client.server._connections))
        assert connection._state.encoder.header_table_size == 4096


async def test_a_connection_without_settings_or_with_half_a_head_is_ended() -> None:
    limits = ServerLimits(head_timeout_s=0.03, idle_timeout_s=10)
    made = Peer(echo, limits=limits, begin=False)
    made.wire.protocol.data_received(PREFACE)
    await asyncio.sleep(0.08)
    assert made.wire.is_closed
    await made.close()
    async with peer(limits=limits) as client:
        await asyncio.sleep(0.08)
        assert not client.wire.is_closed  # it has said who it is
        client.send(frame(1, b"\x82", stream=1))
        await asyncio.sleep(0.08)
        assert client.wire.is_closed


async def test_a_silent_connection_is_ended_and_one_with_a_stream_is_not() -> None:
    live = Live()
    async with peer(live, limits=ServerLimits(idle_timeout_s=0.03)) as client:
        client.ask(1, body=b"{}", path="/1")
        await client.settle()
        await asyncio.sleep(0.08)
        assert not client.wire.is_closed
        live.may_end.set()
        await client.settle()
        await asyncio.sleep(0.08)
        assert client.wire.is_closed
        await client.settle()
        assert client.goodbyes()[-1].error_code == ErrorCodes.NO_ERROR


async def test_beyond_the_bound_of_connections_the_request_is_the_last() -> None:
    async with peer(limits=ServerLimits(connections_max=0)) as client:
        client.ask(1, body=b"hi")
        await client.settle()
        assert client.body() == b"hi"
        await client.settle()
        assert client.wire.is_closed


# --- the end --------------------------------------------------------------------------------


async def test_at_the_end_streams_are_answered_and_no_more_are_taken() -> None:
    live = Live()
    async with peer(live) as client:
        client.ask(1, body=b"", path="/1")
        await client.settle()
        client.http.is_draining = True
        client.server.say_goodbye()
        client.ask(3, body=b"", path="/3")  # on its way while we say so
        await client.settle()
        assert sorted(live.streams) == ["/1", "/3"]
        assert [it.last_stream_id for it in client.goodbyes()] == [2**31 - 1, 3]
        client.ask(5, body=b"", path="/5")
        await client.settle()
        assert "/5" not in live.streams
        assert client.was_reset(5) == ErrorCodes.REFUSED_STREAM  # safe to try again elsewhere
        assert not client.wire.is_closed
        live.may_end.set()
        await client.settle()
        assert sorted(live.ended) == ["/1", "/3"]
        assert client.body(1) == client.body(3) == b"first last"
        assert client.wire.is_closed


async def test_at_the_end_idle_connections_are_closed_at_once() -> None:
    async with peer() as client:
        client.server.say_goodbye()
        await client.settle()
        assert client.wire.is_closed
        assert [it.last_stream_id for it in client.goodbyes()] == [2**31 - 1, 0]


async def test_a_client_that_says_goodbye_gets_its_answers() -> None:
    live = Live()
    async with peer(live) as client:
        client.ask(1, body=b"{}", path="/1")
        await client.settle()
        client.send(goaway(0, 0))
        live.streams["/1"].write(b"on ")
        await client.settle()
        live.may_end.set()
        await client.settle()
        assert client.body(1) == b"first on last"
        assert client.wire.is_closed


async def test_a_server_that_closes_tells_and_cancels() -> None:
    live = Live()
    async with peer(live) as client:
        client.ask(1, body=b"{}", path="/1")
        await client.settle()
        await client.server.close(0.01)
        await asyncio.sleep(0)
        assert live.cancelled == ["/1"]
        assert client.wire.is_closed
        await client.settle()
        assert client.goodbyes()[-1].last_stream_id == 1


def test_the_frames_that_are_written_here() -> None:
    assert data_head(5, 3) == b"\x00\x00\x05\x00\x00\x00\x00\x00\x03"
    assert goaway(7, 11, b"why") == frame(7, b"\x00\x00\x00\x07\x00\x00\x00\x0bwhy")
