"""Measures the CPU time of one reservation of limits, in this process and in Valkey.

One operation is one `Limiter.reserve` on a real Valkey over loopback. Each checks two scopes,
account and key, for a hundred tenants in turn. An operation lasts from the call to its result in
the caller's task. It includes packing, socket, parsing, future and the switches of the task. In
`closed`, each of a fixed number of tasks calls again at once, so that all their calls are sent
together. In `open`, 5,000 tasks a second start at random times, in steps of a millisecond, and the
cost of 5,000 idle tasks is subtracted. `settled` includes the settlement after the answer, and
`headers` the dictionary of the answer's headers. `open_wait` calls no limiter, and shows the cost
of waiting alone. Its tasks share a timer of 2 ms, which the first task starts, as concurrent checks
share an answer. The garbage collector has the thresholds of a gateway. Figures are CPU time of the
process, kernel included, in microseconds. `server_us` is the CPU time of Valkey. The result is the
least of the rounds, because the machine is shared. Not measured: the creation of the task, which
the request needs anyway, and a distant network. Run: `python -m benchmarks.micro.limiter`.
"""

import asyncio
import gc
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.results import write_result
from cli.stack.valkey import valkey_spec, valkey_url
from gateway.directory import Principal
from gateway.limits.limiter import Limiter
from gateway.limits.valkey import ValkeyClient
from sluice.process import ChildProcess, free_port
from sluice.wire.control.v1 import control_pb2 as control

_ROUNDS = 4
_TOGETHER = (1, 16, 64, 256)
_CHECKS = 10_000
_CHECKS_ALONE = 1_000
_RATE = 5_000
# Number of rounds, and seconds per round of one check. The result is the round with the least CPU
# time. The product with the five checks is most of the benchmark's duration.
_OPEN_ROUNDS, _OPEN_S = 12, 0.5
_WAIT_S = 0.002
_GC_THRESHOLDS = (10_000, 20, 100)  # the thresholds of `gateway.__main__`
_TENANTS = 100
_RPM, _TPM = 1_000_000_000, 2_000_000_000

Check = Callable[[Principal], Coroutine[None, None, None]]


def callers() -> Iterator[Principal]:
    """Yield callers of all tenants in turn, without end."""
    return cycle(
        [
            Principal(
                control.ApiKey(id=f"key{number}", rpm=_RPM, tpm=_TPM),
                control.Tenant(id=f"tenant{number}"),
                control.Tier(rpm=_RPM, tpm=_TPM),
            )
            for number in range(_TENANTS)
        ]
    )


class Cpu:
    """Measures the CPU time of this process and of the server between two calls of `take`."""

    def __init__(self, server: ChildProcess) -> None:
        self._server_clock = (~server.pid << 3) | 2  # Linux: CPU clock of another process
        self._last = (0, 0)
        self.take()

    def take(self) -> tuple[float, float]:
        """Return microseconds of this process and of the server since the last call."""
        now = time.process_time_ns(), time.clock_gettime_ns(self._server_clock)
        before, self._last = self._last, now
        return (now[0] - before[0]) / 1e3, (now[1] - before[1]) / 1e3


async def closed(check: Check, together: int, checks: int) -> None:
    """Run `together` concurrent tasks, each of which repeats checks without a pause."""
    who = callers()

    async def task() -> None:
        for _ in range(checks // together):
            await check(next(who))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(together):
            tasks.create_task(task())


async def open_loop(check: Check, who: Iterator[Principal], rng: random.Random) -> int:
    """Start `_RATE` tasks a second for `_OPEN_S` seconds, and return their number."""
    loop = asyncio.get_running_loop()
    started, next_s = 0, loop.time()
    end_s = next_s + _OPEN_S
    async with asyncio.TaskGroup() as tasks:
        while next_s < end_s:
            while next_s <= loop.time():
                tasks.create_task(check(next(who)))
                next_s += rng.expovariate(_RATE)
                started += 1
            await asyncio.sleep(0.001)  # the shortest sleep of uvloop
    return started


@asynccontextmanager
async def running_limiter(home: Path) -> AsyncGenerator[tuple[Limiter, ChildProcess]]:
    """Yield a limiter with its own Valkey server."""
    port = free_port()
    server = await ChildProcess.start(valkey_spec(port, home / "valkey", home / "log", {}))
    client = ValkeyClient(valkey_url(port), deadline_s=5.0)
    limiter = Limiter(client, local_share=1.0, clock=time.monotonic)
    try:
        await server.wait_ready(10)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(client.run())
            while not limiter.is_shared:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
            yield limiter, server
            running.cancel()
        assert limiter.local_decisions == 0, "the server was too slow for the deadline"
    finally:
        await server.stop()


def checks_of(limiter: Limiter) -> dict[str, Check]:
    """Return the measured checks, by name."""

    async def check(who: Principal) -> None:
        await limiter.reserve(who, "m", prompt_tokens=50, output_tokens_max=50, is_bounded=True)

    async def with_headers(who: Principal) -> None:
        found = await limiter.reserve(
            who, "m", prompt_tokens=50, output_tokens_max=50, is_bounded=True
        )
        assert found.headers

    async def settled(who: Principal) -> None:
        found = await limiter.reserve(
            who, "m", prompt_tokens=50, output_tokens_max=50, is_bounded=True
        )
        limiter.settle(found, prompt_tokens=50, output_tokens=40, was_served=True)

    return {"check": check, "headers": with_headers, "settled": settled}


async def nothing(_who: Principal) -> None:
    """Do nothing. The cost of such a task is subtracted from the cost of a check."""


def shared_wait() -> Check:
    """Return a check that only waits for as long as the server needs for an answer."""
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[None]] = []

    def answer() -> None:
        for future in waiting:
            future.set_result(None)
        waiting.clear()

    async def wait(_who: Principal) -> None:
        if not waiting:
            loop.call_later(_WAIT_S, answer)
        waiting.append(future := loop.create_future())
        await future

    return wait


def least(found: list[tuple[float, float]]) -> dict[str, float]:
    """Return the least client time and the least server time of the rounds."""
    here, there = zip(*found, strict=True)
    return {"client_us": round(min(here), 2), "server_us": round(min(there), 2)}


async def measure(limiter: Limiter, server: ChildProcess) -> dict[str, Any]:
    """Return all figures, by check and load."""
    cpu, figures, checks_by_name = Cpu(server), dict[str, Any](), checks_of(limiter)
    for name, check in checks_by_name.items():
        for together in _TOGETHER:
            checks = (_CHECKS if together > 1 else _CHECKS_ALONE) // together * together
            found: list[tuple[float, float]] = []
            for _ in range(_ROUNDS):
                cpu.take()
                await closed(check, together, checks)
                here, there = cpu.take()
                found.append((here / checks, there / checks))
            figures[f"closed_{name}_{together}"] = least(found)
    return figures | await measure_open({**checks_by_name, "wait": shared_wait()}, cpu)


async def measure_open(checks: dict[str, Check], cpu: Cpu) -> dict[str, Any]:
    """Return the figures of `open`, where each round measures all checks."""
    who, rng, turns = callers(), random.Random(5), {**checks, "nothing": nothing}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for _ in range(_OPEN_ROUNDS):
        for name, check in turns.items():
            cpu.take()
            started = await open_loop(check, who, rng)
            here, there = cpu.take()
            found[name].append((here / started, there / started))
    without = least(found.pop("nothing"))["client_us"]
    return {
        f"open_{name}": {
            **(costs := least(rounds)),
            "client_us": round(costs["client_us"] - without, 2),
            "client_us_with_task": costs["client_us"],
        }
        for name, rounds in found.items()
    }


async def _run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with running_limiter(Path(folder)) as (limiter, server):
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            return await measure(limiter, server)


def main() -> None:
    """Run all cases and write `benchmarks/results/limiter.json`."""
    figures = uvloop.run(_run())
    parameters = {
        "rounds": _ROUNDS,
        "checks": _CHECKS,
        "checks_alone": _CHECKS_ALONE,
        "open_checks_per_s": _RATE,
        "open_rounds": _OPEN_ROUNDS,
        "open_s": _OPEN_S,
        "tenants": _TENANTS,
        "scopes": 2,
    }
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    path = write_result("limiter", operation, {"parameters": parameters, **figures})
    print(path.read_text())


if __name__ == "__main__":
    main()
