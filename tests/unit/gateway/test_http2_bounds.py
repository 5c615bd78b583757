"""Bodies, bounds and the end of connections over HTTP/2, by h2's client in one process."""

import asyncio

import pytest
from aiohttp import web
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from gateway.http2.frames import (
    FRAME_BYTES_MAX,
    PREFACE,
    data_head,
    goaway,
)
from gateway.http2.state import STREAM_WINDOW_BYTES
from gateway.server import bounds
from gateway.server.bounds import ServerLimits
from tests.support.http2_peer import HEAD, Peer
from tests.unit.gateway.test_http2 import Live, echo, peer

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


@pytest.mark.parametrize("kind", [0, 1, 4, 77])
async def test_a_frame_that_is_too_large_ends_its_connection_before_it_is_read(kind: int) -> None:
    async with peer() as client:
        client.send(frame(kind, bytes(FRAME_BYTES_MAX + 1), stream=1)[:100])
        await asyncio.sleep(0)
        assert client.wire.is_closed
        await client.settle()
        assert client.goodbyes()[-1].error_code == ErrorCodes.FRAME_SIZE_ERROR
        assert not client.server.floods


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
