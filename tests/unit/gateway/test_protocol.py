"""The protocol of a connection, on a transport that only notes what is written."""

import asyncio

import pytest
from aiohttp import web

from gateway.server.body import read_body
from gateway.server.protocol import HttpServer, ServerLimits


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
