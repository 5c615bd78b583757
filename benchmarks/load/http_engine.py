"""Simulates an OpenAI-compatible engine with streams, for the proxies of `benchmarks.load.peers`.

At each step all open streams receive a token, as from a batch, but no token is computed. The bytes
of an event are built once and written to all sockets. So the engine needs less CPU time than any
proxy.
"""

import asyncio
import json
import multiprocessing
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import uvloop

_ABOUT = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_READY = {"object": "list", "data": [{"id": "mock", "object": "model"}], "model_path": "mock"}


def _framed(*choices: dict[str, object]) -> bytes:
    chunk = json.dumps({**_ABOUT, "choices": choices}, separators=(",", ":"))
    event = f"data: {chunk}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


_TOKEN = _framed({"index": 0, "delta": {"content": " hello"}, "finish_reason": None})
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_LAST = _framed({"index": 0, "delta": {}, "finish_reason": "length"}) + _DONE

_left: dict["_Connection", int] = {}  # number of tokens still to be sent on each open stream


class _Connection(asyncio.Protocol):
    """A proxy's connection to the engine."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self._received = cast("asyncio.Transport", transport), b""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        _left.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        _, _, length = head.lower().partition(b"content-length:")
        size = int(length.split(b"\r\n", 1)[0]) if length else 0
        if not end or len(rest) < size:
            return
        self._received = rest[size:]
        if b"/completions" in head.split(b"\r\n", 1)[0]:
            asked = json.loads(rest[:size])
            _left[self] = asked.get("max_completion_tokens") or asked["max_tokens"]
            self.transport.write(_HEAD)
        else:
            ready = json.dumps(_READY).encode()
            about = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
            self.transport.write(b"%b%d\r\n\r\n%b" % (about, len(ready), ready))


def _step() -> None:
    for connection in list(_left):
        _left[connection] -= 1
        if _left[connection]:
            connection.transport.write(_TOKEN)
        else:
            del _left[connection]
            connection.transport.write(_TOKEN + _LAST)


async def _serve(port: int, step_s: float) -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(_Connection, "127.0.0.1", port, backlog=4096)
    due_s = loop.time()
    while True:
        due_s = max(due_s + step_s, loop.time())
        await asyncio.sleep(due_s - loop.time())
        _step()


def _run(port: int, step_s: float) -> None:
    uvloop.run(_serve(port, step_s))


@contextmanager
def engine_running(port: int, step_s: float) -> Generator[None]:
    """Serve on a port of this machine, in another process."""
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(port, step_s))
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join(10)
        process.kill()
