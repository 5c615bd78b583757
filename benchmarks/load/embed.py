"""Measures the speed of the embedding model through a real Triton.

One operation sends one text as token ids over gRPC, and receives its vector of 384 numbers. The
model is the packaged MiniLM with its default options (one thread, float32). `one_at_a_time` is the
latency in ms of a client that waits for each answer. `at_once` is texts per second with 64 texts in
flight, and the mean number of texts per batch of Triton. Short texts have 9 tokens, mixed texts 4
to 64, long texts 256, special tokens included. `engine_cpu_ms` is the CPU time of Triton and its
stub per text, which hardly depends on other work on the machine. Not measured: tokenizing, HTTP.
The benchmark needs the package of requirements/embed.lock. Run: `python -m benchmarks.load.embed`.
"""

import asyncio
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import write_result
from replica.agent.model_kinds import canary
from replica.agent.replica_state import EngineSpec
from replica.embedding.package import INSTALL, find_package
from sluice.artifacts import import_directory
from sluice.embeddings import EmbeddingClient
from sluice.procfs import cpu_s, group_processes, memory_bytes
from tests.support.tritons import running_triton

_IN_FLIGHT = 64
_TIMEOUT_S = 60.0
_TEXTS = {"short": (400, 9, 9), "mixed": (400, 4, 64), "long": (64, 256, 256)}
_random = random.Random(0)

Text = list[int]


def texts(count: int, tokens_min: int, tokens_max: int) -> list[Text]:
    """Return random texts that begin with [CLS] and end with [SEP]."""
    lengths = [_random.randint(tokens_min, tokens_max) for _ in range(count)]
    return [[101, *_random.choices(range(1996, 30_000), k=n - 2), 102] for n in lengths]


@dataclass(frozen=True)
class Server:
    """A running Triton."""

    metrics_url: str
    pid: int

    def batches(self) -> tuple[float, float]:
        """Return the number of computed batches, and the number of texts in these batches."""
        with urllib.request.urlopen(self.metrics_url, timeout=5) as answer:
            text = answer.read().decode()
        return _metric(text, "embed_batch_texts_count"), _metric(text, "embed_batch_texts_sum")

    def cpu_s(self) -> float:
        """Return the processor time of Triton and its stub so far."""
        return cpu_s(group_processes(self.pid))


def _metric(text: str, name: str) -> float:
    found = re.search(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


async def one_at_a_time(client: EmbeddingClient, work: Sequence[Text]) -> dict[str, float]:
    took_ms: list[float] = []
    for text in work:
        began_s = time.perf_counter()
        await client.embed(text, timeout_s=_TIMEOUT_S)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    hundredths = statistics.quantiles(took_ms, n=100)
    return {"p50": round(hundredths[49], 2), "p99": round(hundredths[98], 2)}


async def at_once(client: EmbeddingClient, server: Server, work: Sequence[Text]) -> dict[str, Any]:
    room = asyncio.Semaphore(_IN_FLIGHT)

    async def one(text: Text) -> None:
        async with room:
            await client.embed(text, timeout_s=_TIMEOUT_S)

    batches, sizes = server.batches()
    used_s, began_s = server.cpu_s(), time.perf_counter()
    await asyncio.gather(*map(one, work))
    took_s, used_s = time.perf_counter() - began_s, server.cpu_s() - used_s
    later_batches, later_sizes = server.batches()
    return {
        "texts_s": round(len(work) / took_s),
        "mean_batch": round((later_sizes - sizes) / (later_batches - batches), 1),
        "engine_cpu_ms": round(used_s / len(work) * 1e3, 2),
    }


async def measure(home: Path, package: Path) -> dict[str, Any]:
    """Start Triton, measure, stop it."""
    digest = import_directory(package, home / "artifacts")
    spec = EngineSpec("embed", digest)
    began_s = time.perf_counter()
    async with running_triton(home, spec) as triton:
        await canary(triton.address, spec, 10)
        start_s = round(time.perf_counter() - began_s, 1)
        server = Server(triton.metrics_url, triton.child.pid)
        figures: dict[str, Any] = {"start_to_canary_s": start_s, "memory_mib": {}}
        figures["memory_mib"]["after_start"] = _memory_mib(server.pid)
        async with EmbeddingClient(triton.address) as client:
            for name, (count, tokens_min, tokens_max) in _TEXTS.items():
                work = texts(count, tokens_min, tokens_max)
                await at_once(client, server, work[: count // 4])  # warm up
                figures[name] = {
                    "one_at_a_time_ms": await one_at_a_time(client, work[: count // 2]),
                    "at_once": await at_once(client, server, work),
                }
        figures["memory_mib"]["after_all"] = _memory_mib(server.pid)
        return figures


def _memory_mib(pid: int) -> int:
    return memory_bytes(group_processes(pid)) >> 20


def main() -> None:
    """Measure and write the result."""
    package = find_package()
    if package is None:
        print(f"left out: the embedding model is not installed: {INSTALL}")
        return
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        figures = asyncio.run(measure(Path(folder), package))
    operation = "one text as token ids through Triton to its vector; packaged MiniLM, one thread"
    print(write_result("embed", operation, {"in_flight": _IN_FLIGHT, **figures}), figures)


if __name__ == "__main__":
    main()
