"""Measures the CPU time of a stored response, compared with a chat completion of the same tokens.

One operation is one streamed answer of 100 tokens through router and gateway, with keys, limits and
tokenizing on. The tokens are from the `sim` driver inside a real Triton. In `chat`, the answer is a
chat completion. In `unstored` and `stored`, it is a response without and with `store`. All three
run in turns, with the same prompts. Requests arrive at the same random times, 50 per second. If
clients waited for answers instead, slower answers would share fewer steps of the engine. Each step
costs the router CPU time. Not measured: the engine, the client, the control plane, which writes
responses to PostgreSQL, and Valkey. The medians of the rounds are the figures to read.
Run: `python -m benchmarks.load.stored`.
"""

import asyncio
import random
from functools import partial
from typing import Any

import aiohttp

from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.load.turns import in_turns, median_us
from benchmarks.results import write_result

_PER_S, _REQUESTS, _TOKENS, _ROUNDS = 50, 500, 100, 5
_LIMIT_S = 120.0
_PROMPT = "Tell me a story about a river and a gate."
_COMMON = {"model": "sluice-tiny", "stream": True, "ignore_eos": True}
_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": _PROMPT}],
    "max_tokens": _TOKENS,
}
_RESPONSE: dict[str, Any] = {"input": _PROMPT, "max_output_tokens": _TOKENS}
_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", _COMMON | _CHAT),
    "unstored": ("responses", _COMMON | _RESPONSE | {"store": False}),
    "stored": ("responses", _COMMON | _RESPONSE | {"store": True}),
}


async def _answers(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    arrivals = random.Random(1)

    async def stream(begins_s: float) -> None:
        await asyncio.sleep(begins_s)
        async with http.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            rest = b""
            async for piece in answer.content.iter_any():
                rest = (rest + piece)[-64:]
            assert rest.endswith(b"data: [DONE]\n\n")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_REQUESTS):
            tasks.create_task(stream(arrivals.uniform(0, _REQUESTS / _PER_S)))
    await asyncio.sleep(2.0)  # writes after the last event count as well


async def _measured(stack: BenchmarkStack) -> dict[str, dict[str, float]]:
    pids = {it["name"]: [it["pid"]] for it in stack.status()["processes"]}
    groups = {name: pids[name] for name in ("gateway", "router")}
    headers = {"authorization": f"Bearer {stack.env['OPENAI_API_KEY']}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
        base = stack.env["OPENAI_BASE_URL"]
        turns = {
            name: partial(_answers, http, f"{base}/{path}", body)
            for name, (path, body) in _WAYS.items()
        }
        rounds = await in_turns(turns, groups, rounds=_ROUNDS, limit_s=_LIMIT_S)
    return {
        way: {f"{name}_us": us for name, us in median_us(it, _REQUESTS).items()}
        for way, it in rounds.items()
    }


def main() -> None:
    """Run all three in turns and write `benchmarks/results/stored.json`."""
    with started("sim", "--no-embeddings") as stack:
        figures = asyncio.run(_measured(stack))
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    parameters = {"per_s": _PER_S, "requests": _REQUESTS, "tokens": _TOKENS, "rounds": _ROUNDS}
    ratio = figures["stored"]["total_us"] / figures["chat"]["total_us"]
    record = {"parameters": parameters, **figures, "stored_of_chat": round(ratio, 3)}
    print(write_result("stored", operation, record).read_text())


if __name__ == "__main__":
    main()
