"""Compares the CPU time of gateways that run on different interpreters.

One operation of `request` is one streamed chat completion of two tokens. One operation of `token`
is one token of a streamed answer of 100 tokens. Each gateway has one worker, real sockets and
Valkey. It serves 100 concurrent streams, and a scripted router sends a token to each of them every
20 ms. The gateways take turns with the same load. The medians of the rounds are the figures to
read. `of_first` divides them by the figures of the first interpreter. Not measured: the router,
engines, and client. The first interpreter is the one that runs the benchmark. The others are
arguments, each with its packages, for example of `requirements/dev.lock`.
Run: `python -m benchmarks.micro.interpreters [PATH/python3.13] [PATH/python3.14] ...`.
"""

import asyncio
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from benchmarks.load.parked import ParkedSite, running_site
from benchmarks.load.sse_client import run_load
from benchmarks.results import write_result
from tests.support.scripted_router import Plan

_ROUNDS = 5
_STREAMS, _STEP_S = 100, 0.02
# Tokens of an answer, and requests of a round, by the name of the operation.
_LOADS = {"request": (2, 2000), "token": (100, 500)}
_VERSION = "import sys; print(sys.version.split()[0])"
_VERSION_S = 10.0


async def _cpu_us(site: ParkedSite, tokens: int, requests: int, operations: int) -> float:
    """Return the gateway's CPU time per operation in µs."""
    load = replace(site.load, streams=_STREAMS, requests=requests, max_tokens=tokens)
    figures = await run_load(load, {"gateway": [site.process.pid]})
    if figures["errors"] or figures["problems"]:
        raise RuntimeError(f"not all was answered: {figures}")
    site.router.submits.clear()
    site.router.cancelled.clear()
    return figures["cpu_s"]["gateway"] / operations * 1e6


async def _rounds_of(interpreters: Sequence[str], name: str) -> dict[str, list[float]]:
    """Return each interpreter's CPU time per operation in µs, one figure for each round."""
    tokens, requests = _LOADS[name]
    operations = requests * (tokens if name == "token" else 1)
    plan = Plan([[1000 + number] for number in range(tokens)])
    found: dict[str, list[float]] = {it: [] for it in interpreters}
    async with AsyncExitStack() as running:
        sites = {
            it: await running.enter_async_context(running_site(_STEP_S, plan, interpreter=it))
            for it in interpreters
        }
        for site in sites.values():
            await _cpu_us(site, tokens, requests // 4, operations)
        for _ in range(_ROUNDS):
            for it, site in sites.items():
                found[it].append(round(await _cpu_us(site, tokens, requests, operations), 1))
    return found


def _version(interpreter: str) -> str:
    return subprocess.run(
        [interpreter, "-c", _VERSION],
        check=True,
        capture_output=True,
        text=True,
        timeout=_VERSION_S,
    ).stdout.strip()


def measure(interpreters: Sequence[str]) -> dict[str, Any]:
    """Return the medians, ratios and rounds of each operation, by version."""
    versions = {it: _version(it) for it in interpreters}
    figures: dict[str, Any] = {}
    for name in _LOADS:
        rounds = asyncio.run(_rounds_of(interpreters, name))
        medians = {it: statistics.median(of) for it, of in rounds.items()}
        figures[name] = {
            versions[it]: {
                "us": medians[it],
                "of_first": round(medians[it] / medians[interpreters[0]], 3),
                "rounds": rounds[it],
            }
            for it in interpreters
        }
    return figures


def main() -> None:
    """Measure, and write `benchmarks/results/interpreters.json`."""
    figures = measure([sys.executable, *sys.argv[1:]])
    assert __doc__ is not None
    print(write_result("interpreters", __doc__, figures).read_text())


if __name__ == "__main__":
    main()
