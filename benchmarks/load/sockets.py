"""Measures the CPU time of streams over one WebSocket, compared with server-sent events.

One operation is one streamed token of a response through router and gateway, with keys, limits and
tokenizing on. The `sim` driver inside a real Triton generates the tokens. In `sse`, each stream has
its own connection. In `socket`, all streams share one WebSocket. Rounds of both cases alternate,
with the same requests. Not measured: the engine, and the client. The medians of the rounds are the
figures to read. Run: `python -m benchmarks.load.sockets`.
"""

import asyncio
import json
from functools import partial
from typing import Any

import aiohttp

from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.load.turns import in_turns, median_us
from benchmarks.results import write_result

_STREAMS, _TOKENS, _ROUNDS = 50, 1000, 5
_LIMIT_S = 300.0
_BODY: dict[str, Any] = {
    "model": "sluice-tiny",
    "input": "Tell me a story about a river and a gate.",
    "max_output_tokens": _TOKENS,
    "ignore_eos": True,
    "store": False,
}
_ENDS = (b'"type":"response.completed"', b'"type":"response.incomplete"')


async def _sse(http: aiohttp.ClientSession, url: str) -> None:
    async def one() -> None:
        async with http.post(url, json=_BODY | {"stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            rest = b""
            async for piece in answer.content.iter_any():
                rest = (rest + piece)[-64:]
            assert rest.endswith(b"data: [DONE]\n\n")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_STREAMS):
            tasks.create_task(one())


async def _socket(http: aiohttp.ClientSession, url: str) -> None:
    async with http.ws_connect(url, max_msg_size=0, compress=0, decode_text=False) as socket:
        for number in range(_STREAMS):
            message = _BODY | {"type": "response.create", "stream_id": str(number)}
            await socket.send_str(json.dumps(message))
        left = _STREAMS
        while left:
            told: bytes = (await socket.receive()).data
            assert b'"type":"error"' not in told, told
            left -= any(end in told[:120] for end in _ENDS)


async def _measured(stack: BenchmarkStack) -> dict[str, dict[str, float]]:
    pids = {it["name"]: [it["pid"]] for it in stack.status()["processes"]}
    groups = {name: pids[name] for name in ("gateway", "router")}
    headers = {"authorization": f"Bearer {stack.env['OPENAI_API_KEY']}"}
    url = f"{stack.env['OPENAI_BASE_URL']}/responses"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
        turns = {"sse": partial(_sse, http, url), "socket": partial(_socket, http, url)}
        rounds = await in_turns(turns, groups, rounds=_ROUNDS, limit_s=_LIMIT_S)
    return {
        way: {f"{name}_us_per_token": us for name, us in median_us(it, _STREAMS * _TOKENS).items()}
        for way, it in rounds.items()
    }


def main() -> None:
    """Run both transports in turns and write `benchmarks/results/sockets.json`."""
    with started("sim", "--no-embeddings") as stack:
        figures = asyncio.run(_measured(stack))
    ratio = figures["socket"]["total_us_per_token"] / figures["sse"]["total_us_per_token"]
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    parameters = {"streams": _STREAMS, "tokens": _TOKENS, "rounds": _ROUNDS}
    record = {"parameters": parameters, **figures, "socket_of_sse": round(ratio, 3)}
    print(write_result("sockets", operation, record).read_text())


if __name__ == "__main__":
    main()
