"""Heads and frames of streamed answers, and what becomes of clients that do not read them."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import HttpVersion10, HttpVersion11, web

from gateway.server import live_response
from gateway.server.live_response import LiveResponse


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_lost = self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.is_lost

    def abort(self) -> None:
        self.is_aborted = True


class Writer:
    """A writer whose client takes nothing: it is never drained."""

    output_size = 0

    async def drain(self) -> None:
        await asyncio.get_running_loop().create_future()


def request(*, is_1_0: bool = False, keep_alive: bool = True, paused: bool = False) -> web.Request:
    made = SimpleNamespace(
        version=HttpVersion10 if is_1_0 else HttpVersion11,
        keep_alive=keep_alive,
        transport=Transport(),
        writer=Writer(),
        protocol=SimpleNamespace(writing_paused=paused),
    )
    return cast("web.Request", made)


def written(of: web.Request) -> list[bytes]:
    return cast("Any", of.transport).written


async def test_head_and_first_chunk_leave_together() -> None:
    asked = request()
    response = LiveResponse(asked, {"Content-Type": "text/plain", "x-one": "1"})
    assert not response.prepared
    response.begin(b"some text")
    assert response.prepared
    assert response.keep_alive
    assert asked.writer.output_size
    await response.end(b"the rest of it")
    head, _, body = written(asked)[0].partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert fields[:3] == ["Content-Type: text/plain", "x-one: 1", "Transfer-Encoding: chunked"]
    assert fields[3].startswith("Date: ")
    assert fields[3].endswith(" GMT")
    assert len(fields) == 4
    assert body == b"9\r\nsome text\r\n"
    assert written(asked)[1:] == [b"e\r\nthe rest of it\r\n0\r\n\r\n"]


def test_a_head_without_a_body_yet_does_not_end_it() -> None:
    asked = request()
    LiveResponse(asked, {}).begin(b"")
    assert written(asked)[0].endswith(b" GMT\r\n\r\n")


def test_the_last_answer_of_a_connection_says_so() -> None:
    asked = request(keep_alive=False)
    response = LiveResponse(asked, {})
    response.begin(b"x")
    assert b"\r\nConnection: close\r\n" in written(asked)[0]
    assert not response.keep_alive


async def test_http_1_0_has_no_chunks_and_ends_the_connection() -> None:
    asked = request(is_1_0=True)
    response = LiveResponse(asked, {})
    response.begin(b"one")
    await response.end(b"two")
    assert written(asked)[0].startswith(b"HTTP/1.0 200 OK\r\nDate: ")
    assert b"chunked" not in written(asked)[0]
    assert written(asked)[0].endswith(b"\r\n\r\none")
    assert written(asked)[1] == b"two"
    assert not response.keep_alive


@pytest.mark.parametrize("value", ["a\r\nx-two: 2", "a\nb", "a\x00b"])
def test_a_header_cannot_bring_another_one(value: str) -> None:
    asked = request()
    response = LiveResponse(asked, {"x-one": value})
    with pytest.raises(ValueError, match="control character"):
        response.begin(b"")
    assert not written(asked)
    assert not response.prepared


async def test_a_departed_client_gets_nothing() -> None:
    asked = request()
    response = LiveResponse(asked, {})
    response.begin(b"x")
    cast("Any", asked.transport).is_lost = True
    with pytest.raises(ConnectionResetError):
        await response.end(b"y")


async def test_a_client_that_does_not_read_the_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_response, "_WRITE_TIMEOUT_S", 0.01)
    asked = request(paused=True)
    response = LiveResponse(asked, {})
    response.begin(b"x")
    await response.end(b"y")
    assert cast("Any", asked.transport).is_aborted
