"""Measures the CPU time of streams over a few HTTP/2 connections, compared with HTTP/1.1.

One operation is one streamed token of a chat through router and gateway, with keys, limits and
tokenizing on. The `sim` driver inside a real Triton generates the tokens, in steps of 20 ms. In
`http1`, each stream has its own connection. In `http2`, 500 streams share eight connections. Rounds
of both cases alternate, with the same requests. Not measured: the engine, and the client, which
only counts streams. The medians of the rounds are the figures to read. Run:
`python -m benchmarks.load.http2`.
"""

import asyncio
import json
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from hpack import Encoder

from benchmarks.load.gateway import FREE_TOKENS, STEP_S, configure, groups_of
from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.load.turns import in_turns, median_us
from benchmarks.results import write_result

_STREAMS, _CONNECTIONS, _TOKENS, _ROUNDS = 500, 8, 200, 5
_LIMIT_S = 300.0
_BODY: dict[str, Any] = {
    "model": "sluice-tiny",
    "messages": [{"role": "user", "content": "Tell me a story about a river and a gate."}],
    "max_tokens": _TOKENS,
    "ignore_eos": True,
    "stream": True,
}
_PATH = "/v1/chat/completions"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_LARGE = 2**31 - 1  # flow-control window in bytes, large enough that no stream ever waits
_WINDOW = b"\x00\x04" + _LARGE.to_bytes(4, "big")
_DATA, _HEADERS, _SETTINGS, _WINDOW_UPDATE = 0, 1, 4, 8
_END_STREAM, _END_HEADERS = 1, 4


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


class _Counter(asyncio.Protocol):
    """An HTTP/2 client that parses only frame headers, and counts the streams that have ended."""

    def __init__(self, streams: int, key: str) -> None:
        self._left, self._key, self._rest = streams, key, b""
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport, encoder = transport, Encoder()
        sent = [_PREFACE, _frame(_SETTINGS, 0, 0, _WINDOW)]
        sent.append(_frame(_WINDOW_UPDATE, 0, 0, (_LARGE - 65_535).to_bytes(4, "big")))
        body = json.dumps(_BODY).encode()
        for number in range(self._left):
            head = encoder.encode(
                [
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":authority", "gateway"),
                    (":path", _PATH),
                    ("authorization", f"Bearer {self._key}"),
                    ("content-type", "application/json"),
                ]
            )
            sent.append(_frame(_HEADERS, _END_HEADERS, 2 * number + 1, head))
            sent.append(_frame(_DATA, _END_STREAM, 2 * number + 1, body))
        transport.write(b"".join(sent))

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while at + 9 <= len(data):
            end = at + 9 + int.from_bytes(data[at : at + 3], "big")
            if end > len(data):
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == _SETTINGS and not flags & 1:
                self._transport.write(_frame(_SETTINGS, 1, 0))
            elif kind == _DATA and flags & _END_STREAM:
                self._left -= 1
            else:
                assert kind != 3, "a stream was reset"
            at = end
        self._rest = data[at:]
        if not self._left and not self.ended.done():
            self.ended.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the gateway hung up"))


async def _http1(http: aiohttp.ClientSession, url: str, key: str) -> None:
    del key

    async def one() -> None:
        async with http.post(url + _PATH, json=_BODY) as answer:
            assert answer.status == 200, await answer.text()
            rest = b""
            async for piece in answer.content.iter_any():
                rest = (rest + piece)[-64:]
            assert rest.endswith(b"data: [DONE]\n\n")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_STREAMS):
            tasks.create_task(one())


async def _http2(http: aiohttp.ClientSession, url: str, key: str) -> None:
    del http
    loop, address = asyncio.get_running_loop(), urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    counts = [len(range(it, _STREAMS, _CONNECTIONS)) for it in range(_CONNECTIONS)]
    made = [
        (await loop.create_connection(lambda n=n: _Counter(n, key), host, port))[1] for n in counts
    ]
    await asyncio.gather(*(it.ended for it in made))


async def _measured(stack: BenchmarkStack) -> dict[str, dict[str, float]]:
    groups, key = groups_of(stack), stack.env["OPENAI_API_KEY"]
    url = stack.env["OPENAI_BASE_URL"].removesuffix("/v1")
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
        turns = {"http1": partial(_http1, http, url, key), "http2": partial(_http2, http, url, key)}
        rounds = await in_turns(turns, groups, rounds=_ROUNDS, limit_s=_LIMIT_S)
    return {
        way: {f"{name}_us_per_token": us for name, us in median_us(it, _STREAMS * _TOKENS).items()}
        for way, it in rounds.items()
    }


def main() -> None:
    """Run both protocols in turns and write `benchmarks/results/http2.json`."""
    with started("sim", "--no-embeddings") as stack:
        configure(stack, cost_step_s=str(STEP_S), **FREE_TOKENS)
        figures = asyncio.run(_measured(stack))
    ratio = figures["http2"]["total_us_per_token"] / figures["http1"]["total_us_per_token"]
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    parameters = {
        "streams": _STREAMS,
        "connections": _CONNECTIONS,
        "tokens": _TOKENS,
        "rounds": _ROUNDS,
    }
    record = {"parameters": parameters, **figures, "http2_of_http1": round(ratio, 3)}
    print(write_result("http2", operation, record).read_text())


if __name__ == "__main__":
    main()
