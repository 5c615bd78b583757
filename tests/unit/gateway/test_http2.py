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
)
from gateway.http2.heads import request_message, response_fields
from gateway.server import bounds
from gateway.server.body import read_body
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
    more = [FrameHead(HEADERS, 0, 1), *[FrameHead(CONTINUATION, 0, HEAD_BYTES_MAX // 4)] * 4]
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
