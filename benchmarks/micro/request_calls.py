"""Counts the function calls and created objects of a request in the gateway, by layer.

One operation is one streamed chat completion of two tokens, for a caller without limits. The
gateway has one worker, real sockets and Valkey. A scripted router sends the tokens. `python` counts
calls of Python functions, and `c` their calls of C functions. `objects` counts created containers
(tuples, lists, instances). `objects` is a lower bound, because a container that is created and
deleted between two calls is not counted. Calls in libraries count for the layer that called the
library. `libraries` has calls without such a layer, for example of the event loop itself. `cpu_us`
is CPU time of the process per request, with 100 concurrent streams and steps of 20 ms. It is
measured in separate runs without counting. `aiohttp_us` is the same for a program that streams such
answers with aiohttp and does nothing else. The medians are the figures to read. Not measured: the
router.
Run: `python -m benchmarks.micro.request_calls`.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.load.parked import ParkedSite, running_site
from benchmarks.load.sse_client import StreamLoad, run_load
from benchmarks.micro.counted_gateway import KINDS
from benchmarks.results import write_result
from sluice.process import ChildProcess, ProcessSpec, free_port, port_answers
from tests.support.scripted_router import Plan

_COUNTED = 200
_ROUNDS = 7
_STREAMS, _REQUESTS = 100, 2000
_STEP_S = 0.02
_PROGRAM = "from benchmarks.micro.counted_gateway import main; main()"
_BARE_PROGRAM = "from benchmarks.micro.bare_aiohttp import main; main()"
_PLAN = Plan([[1000], [1001]])
_WRITTEN_S = 10.0
_READY_S = 30.0


async def _counted() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "counts.json"
        program = ("-c", _PROGRAM, str(target))
        async with running_site(_STEP_S / 4, _PLAN, program) as site:
            load = replace(site.load, streams=1, max_tokens=2)
            await _count_calls(site, replace(load, requests=50))
            site.process.send_signal(signal.SIGUSR2)
            await _count_calls(site, replace(load, requests=_COUNTED))
            site.process.send_signal(signal.SIGUSR2)
            async with asyncio.timeout(_WRITTEN_S):
                while not target.exists():  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.05)
            return _per_request(json.loads(target.read_text()))


def _per_request(counted: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    """Return the counts per request, by layer and in total."""
    counted["all"] = {kind: sum(it[kind] for it in counted.values()) for kind in KINDS}
    return {
        layer: {kind: round(count / _COUNTED, 1) for kind, count in found.items()}
        for layer, found in counted.items()
    }


async def _count_calls(site: ParkedSite, load: StreamLoad) -> float:
    figures = await run_load(load, {"gateway": [site.process.pid]})
    if figures["errors"] or figures["problems"]:
        raise RuntimeError(f"not all was answered: {figures}")
    site.router.submits.clear()
    site.router.cancelled.clear()
    return round(figures["cpu_s"]["gateway"] / load.requests * 1e6, 1)


async def cpu_us(rounds: int = _ROUNDS) -> list[float]:
    """Return the CPU time of a request in µs, one figure for each of `rounds` rounds."""
    async with running_site(_STEP_S, _PLAN) as site:
        load = replace(site.load, streams=_STREAMS, requests=_REQUESTS, max_tokens=2)
        await _count_calls(site, replace(load, requests=_REQUESTS // 4))
        return [await _count_calls(site, load) for _ in range(rounds)]


async def _aiohttp_us() -> list[float]:
    """Return the CPU time of a request to aiohttp alone in µs, one figure for each round."""
    port = free_port()
    spec = ProcessSpec(
        name="aiohttp",
        command=[sys.executable, "-c", _BARE_PROGRAM, str(port), str(_STEP_S)],
        env=dict(os.environ),
        log_file=Path(os.devnull),
        ready=lambda: port_answers("127.0.0.1", port),
    )
    server = await ChildProcess.start(spec)
    try:
        await server.wait_ready(_READY_S)
        load = StreamLoad("127.0.0.1", port, "none", _STREAMS, _REQUESTS, max_tokens=2)
        groups, found = {"aiohttp": [server.pid]}, list[float]()
        for _ in range(_ROUNDS + 1):
            figures = await run_load(load, groups)
            if figures["errors"] or figures["problems"]:
                raise RuntimeError(f"not all was answered: {figures}")
            found.append(round(figures["cpu_s"]["aiohttp"] / _REQUESTS * 1e6, 1))
        return found[1:]
    finally:
        await server.stop()


def main() -> None:
    """Count, measure, and write `benchmarks/results/request_calls.json`."""
    counts, rounds = asyncio.run(_counted()), asyncio.run(cpu_us())
    alone = asyncio.run(_aiohttp_us())
    figures = {
        "per_request": counts,
        "cpu_us": statistics.median(rounds),
        "aiohttp_us": statistics.median(alone),
        "rounds": rounds,
        "aiohttp_rounds": alone,
    }
    assert __doc__ is not None
    print(write_result("request_calls", __doc__, figures).read_text())


if __name__ == "__main__":
    main()
