"""Measures the gateway's CPU time and latency for embeddings, beside those of the replica alone.

One operation is one request for the embedding of one short text (about 9 tokens) through the whole
local stack. It includes key, limits, tokenizing, event, and the answer as base64. `gateway_cpu_ms`
is the CPU time of the gateway per request. `p50_ms` and `p99_ms` are the latencies of a client that
waits for each answer. `direct_*` are the latencies if the client calls the replica directly. Client
and servers share the machine. Not measured: a network, TLS. The benchmark needs the package of
requirements/embed.lock. Run: `python -m benchmarks.load.gateway_embed`.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import httpx

from benchmarks.load.embed import texts
from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.results import write_result
from replica.embedding.package import INSTALL, MODEL_NAME, find_package
from sluice.embeddings import EmbeddingClient
from sluice.procfs import cpu_s
from sluice.profiles import EMBED

_REQUESTS = 2000
_IN_FLIGHT = 32
_WORDS = ("river", "gate", "stone", "lamp", "winter", "paper", "orange", "seven", "quiet")
_random = random.Random(0)

Ask = Callable[[], Awaitable[object]]


async def _one_at_a_time(ask: Ask, count: int) -> dict[str, float]:
    took_ms: list[float] = []
    for _ in range(count):
        began_s = time.perf_counter()
        await ask()
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    hundredths = statistics.quantiles(took_ms, n=100)
    return {"p50_ms": round(hundredths[49], 2), "p99_ms": round(hundredths[98], 2)}


async def _at_once(ask: Ask, count: int) -> None:
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            await ask()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_IN_FLIGHT):
            tasks.create_task(client())


def _replica_address(stack: BenchmarkStack) -> str:
    headers = {"authorization": f"Bearer {stack.env['SLUICE_ADMIN_KEY']}"}
    with httpx.Client(base_url=stack.env["SLUICE_ADMIN_URL"], headers=headers) as admin:
        replicas = admin.get("/v1/replicas").json()["data"]
    return next(r["grpc_address"] for r in replicas if r["triton_model"] == EMBED.triton_model)


async def measure(stack: BenchmarkStack) -> dict[str, Any]:
    """Return the figures of a running stack."""
    pids = [p["pid"] for p in stack.status()["processes"] if p["name"].startswith("gateway")]
    headers = {"authorization": f"Bearer {stack.env['OPENAI_API_KEY']}"}
    url = f"{stack.env['OPENAI_BASE_URL']}/embeddings"
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        EmbeddingClient(_replica_address(stack)) as client,
    ):

        async def through() -> None:
            text = " ".join(_random.choices(_WORDS, k=7))
            body = {"model": MODEL_NAME, "input": text, "encoding_format": "base64"}
            async with session.post(url, json=body) as response:
                response.raise_for_status()
                await response.read()

        async def direct() -> None:
            await client.embed(texts(1, 9, 9)[0], timeout_s=60)

        await _at_once(through, _REQUESTS // 4)  # warm up
        used_s, began_s = cpu_s(pids), time.perf_counter()
        await _at_once(through, _REQUESTS)
        used_s, took_s = cpu_s(pids) - used_s, time.perf_counter() - began_s
        alone = await _one_at_a_time(direct, _REQUESTS // 4)
        return {
            "gateway_cpu_ms": round(used_s / _REQUESTS * 1e3, 3),
            "requests_s": round(_REQUESTS / took_s),
            **await _one_at_a_time(through, _REQUESTS // 4),
            **{f"direct_{name}": value for name, value in alone.items()},
        }


def main() -> None:
    """Measure and write the result."""
    if find_package() is None:
        print(f"left out: the embedding model is not installed: {INSTALL}")
        return
    with started("sim", "--embeddings") as stack:
        figures = asyncio.run(measure(stack))
    operation = "one short text through the gateway to its vector, packaged MiniLM, one thread"
    figures = {"in_flight": _IN_FLIGHT, **figures}
    print(write_result("gateway_embed", operation, figures), figures)


if __name__ == "__main__":
    main()
