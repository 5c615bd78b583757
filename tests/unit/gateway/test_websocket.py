"""Frames, lanes and the outbox of WebSockets."""

import asyncio
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bodies.socket_messages import read_message, stream_of
from gateway.responses.events import written_event
from gateway.server.body import BodyBudget
from gateway.text.sse import DONE, KEEP_ALIVE
from gateway.websocket import lanes
from gateway.websocket.frames import error_frame, frames_of, opening_of, text_frame
from gateway.websocket.lanes import Lanes
from gateway.websocket.outbox import SocketOutbox, SocketSink
from sluice.errors import BadRequestError, ErrorCode, PlatformError, RejectedError


def unframed(data: bytes) -> list[bytes]:
    """Return the messages of whole frames of text, read as RFC 6455 says."""
    found = list[bytes]()
    while data:
        assert data[0] == 0x81, "a final frame of text"
        size, at = data[1], 2
        if size == 126:
            size, at = struct.unpack("!H", data[2:4])[0], 4
            assert size > 125
        elif size == 127:
            size, at = struct.unpack("!Q", data[2:10])[0], 10
            assert size > 0xFFFF
        found.append(data[at : at + size])
        assert len(found[-1]) == size
        data = data[at + size :]
    return found


@given(st.sampled_from([0, 1, 125, 126, 127, 65535, 65536, 70000]))
def test_a_frame_is_read_as_written(size: int) -> None:
    assert unframed(text_frame(b"x" * size)) == [b"x" * size]


_EVENTS = st.lists(st.text(max_size=200), max_size=6)


@given(_EVENTS, st.none() | st.text(min_size=1, max_size=20))
def test_frames_equal_their_events(texts: list[str], stream_id: str | None) -> None:
    fields = [b'"delta":%b' % json.dumps(text).encode() for text in texts]
    events = [written_event("a.delta", n, it) for n, it in enumerate(fields)]
    stream = b"".join(events) + KEEP_ALIVE + DONE
    for cut in ([stream], [*events, KEEP_ALIVE, DONE]):
        told = [
            json.loads(it)
            for piece in cut
            for it in unframed(frames_of(piece, opening_of(stream_id)))
        ]
        assert [it["delta"] for it in told] == texts
        assert [it["sequence_number"] for it in told] == list(range(len(texts)))
        assert {it.get("stream_id") for it in told} <= {stream_id}


def test_an_error_says_all_that_clients_look_at() -> None:
    error = RejectedError(ErrorCode.OVERLOADED, "no", retry_after_s=2.4)
    (frame,) = unframed(error_frame(error, opening_of("s"), request_id="req_1"))
    assert json.loads(frame) == {
        "stream_id": "s",
        "type": "error",
        "status": 503,
        "error": {
            "type": "server_error",
            "code": "overloaded",
            "message": "no",
            "param": None,
            "headers": {"x-request-id": "req_1", "retry-after": "2"},
        },
    }


def test_requests_of_a_stream_wait_for_each_other_within_bounds() -> None:
    budget = BodyBudget(1 << 30)
    all_: Lanes[int] = Lanes(budget)
    assert all_.add("a", 1, 10)
    assert all_.add(None, 2, 10)
    assert not all_.add("a", 3, 10)
    assert budget.held_bytes == 10
    assert all_.next("a") == 3
    assert all_.next(None) is None
    assert (all_.open, budget.held_bytes) == (1, 0)
    for number in range(lanes.STREAMS_MAX - 1):
        assert all_.add(str(number), number, 1)
    with pytest.raises(RejectedError, match="64 streams"):
        all_.add("more", 0, 1)
    for number in range(lanes.WAITING_MAX):
        assert not all_.add("a", number, 1)
    with pytest.raises(RejectedError, match="may wait"):
        all_.add("a", 0, 1)
    assert all_.next("a") == 0
    with pytest.raises(RejectedError):
        all_.add("a", 0, lanes.WAITING_BYTES_MAX)
    all_.close()
    assert budget.held_bytes == 0


class _Wire(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_cut = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 7

    def is_closing(self) -> bool:
        return self.is_cut

    def abort(self) -> None:
        self.is_cut = True


async def test_all_events_of_a_step_leave_in_one_write() -> None:
    wire = _Wire()
    outbox = SocketOutbox(wire)
    sinks = [SocketSink(outbox, opening_of(str(n))) for n in range(50)]
    for sink in sinks:
        sink.write(b"HTTP/1.0 200 OK\r\n\r\n")
    for step in range(2):
        for sink in sinks:
            sink.write(written_event("a.delta", step, b'"delta":"x"'))
        await asyncio.sleep(0)
    assert len(wire.writes) == 2
    told = [json.loads(it) for it in unframed(wire.writes[1])]
    assert [it["stream_id"] for it in told] == [str(n) for n in range(50)]
    assert sinks[0].get_write_buffer_size() == 7
    head = b'event: a.delta\ndata: {"type":"a.delta","sequence_number":'
    for number in range(2):
        sinks[3].take_delta(head, b'%d,"delta":"y' % number)
    await asyncio.sleep(0)
    told = [json.loads(it) for it in unframed(wire.writes.pop())]
    assert [(it["stream_id"], it["sequence_number"], it["delta"]) for it in told] == [
        ("3", 0, "y"),
        ("3", 1, "y"),
    ]
    sinks[0].abort()
    sinks[1].write(b"event: x\ndata: {}\n\n")
    await asyncio.sleep(0)
    assert len(wire.writes) == 2, "nothing is written to a socket that was cut"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (b'{"type":"response.create","stream_id":"s","model":"m"}', "input"),
        (b'{"type":"response.cancel","stream_id":"s"}', "type"),
        (b'{"stream_id":"s","model":"m","input":"x"}', "type"),
        (b'{"type":"response.create","stream_id":"s","input":"x"}', "model"),
        (
            b'{"type":"response.create","stream_id":"s","model":"m","input":"x","generate":false}',
            "generate",
        ),
        (
            b'{"type":"response.create","stream_id":"s","model":"m","input":"x","background":true}',
            "background",
        ),
    ],
)
def test_a_forbidden_field_of_a_message_is_refused_by_name(message: bytes, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_message(message)
    assert caught.value.param == param
    assert stream_of(message) == "s"


@pytest.mark.parametrize("message", [b"", b"\xff\xfe", b"[1]", b'{"stream_id":{}}', b'"x"'])
def test_garbage_names_no_stream(message: bytes) -> None:
    with pytest.raises(PlatformError):
        read_message(message)
    assert stream_of(message) is None
