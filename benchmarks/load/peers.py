"""Compares the CPU time of Sluice with that of other proxies (peers).

There are two operations, one streamed token, and one request with two tokens. The engines have
steps of 20 ms. Rounds of all proxies alternate, because ratios within a round are less sensitive to
noise. Sluice's gateway and router run in front of the `sim` driver in a real Triton, with keys,
limits, tokenizing and events on. The peers have no such functions on, and forward the streams of
`benchmarks.load.http_engine`. Not measured: the CPU of engines and client. Each peer needs its own
environment (`pip install smg`, `sglang-router`, `vllm-router`). A peer is measured if its program
is an argument or on PATH. If the router's core is compiled, the result is `peers_compiled`. Run:
`python -m benchmarks.load.peers [PATH/smg] [PATH/sglang-router] ...`.
"""

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.load.gateway import FREE_TOKENS, STEP_S, configure, groups_of
from benchmarks.load.http_engine import engine_running
from benchmarks.load.sse_client import StreamLoad, run_load
from benchmarks.load.stack import started
from benchmarks.results import write_result
from router.core import router
from sluice.process import free_port

# First arguments of each peer's program, by the program's name.
_PEERS: dict[str, tuple[str, ...]] = {
    "smg": ("launch",),
    "sglang-router": ("launch",),
    "vllm-router": (),
}
_ROUNDS = 5
_START_S = 60.0


def _rounds(loads: dict[str, StreamLoad], groups: dict[str, list[int]]) -> dict[str, Any]:
    figures = {name: asyncio.run(run_load(load, groups)) for name, load in loads.items()}
    for one in figures.values():  # requests that failed have used CPU time as well
        if one["problems"] or one["errors"]:
            raise RuntimeError(f"not all was answered: {one}")
    return figures


def _loads(load: StreamLoad) -> dict[str, StreamLoad]:
    """Return the requests to each proxy, with answers of 100 tokens or of two."""
    return {
        "100_streams": replace(load, streams=100, requests=500),
        "500_streams": replace(load, streams=500, requests=2500),
        "100_short_streams": replace(load, streams=100, requests=4000, max_tokens=2),
    }


@contextmanager
def _running(*command: str) -> Generator[int]:
    """Run a process in the background, and yield its pid."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _peer(command: Sequence[str], engine_port: int) -> Generator[tuple[StreamLoad, int]]:
    """Run a peer's proxy in front of the engine, and yield its address and its pid."""
    port, metrics_port = free_port(), free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--worker-urls": f"http://127.0.0.1:{engine_port}",
        "--policy": "round_robin",
        "--prometheus-port": str(metrics_port),
    }
    with _running(*command, *[it for option in options.items() for it in option]) as pid:
        load = StreamLoad("127.0.0.1", port, "none", 1, 1, model="mock", max_tokens=2, limit_s=5.0)
        end_s = time.monotonic() + _START_S
        while not _serves(load):
            if time.monotonic() > end_s:
                raise TimeoutError(f"{command[0]} does not serve within {_START_S:.0f} s")
            time.sleep(0.5)
        yield replace(load, limit_s=120.0, max_tokens=100), pid


def _serves(load: StreamLoad) -> bool:
    try:
        figures = asyncio.run(run_load(load))
    except OSError:
        return False
    return figures["tokens"] == load.max_tokens and not figures["errors"]


def _summed_up(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of a proxy's figures, and the figures of each round."""

    def us(load: str, count: str) -> float:
        each = [sum(one[load]["cpu_s"].values()) / one[load][count] * 1e6 for one in rounds]
        return round(median(each), 1)

    return {
        "us_per_token_100_streams": us("100_streams", "tokens"),
        "us_per_token_500_streams": us("500_streams", "tokens"),
        "us_per_request_of_two_tokens": us("100_short_streams", "requests"),
        "rounds": rounds,
    }


def measure(programs: Sequence[Path]) -> dict[str, Any]:
    """Return the figures by proxy."""
    engine_port = free_port()
    with (
        started("sim", "--no-embeddings") as stack,
        engine_running(engine_port, STEP_S),
        ExitStack() as running,
    ):
        configure(stack, **FREE_TOKENS, cost_step_s=str(STEP_S))
        proxies = {"sluice": (stack.load(1, 1), groups_of(stack))}
        for program in programs:
            command = (str(program), *_PEERS[program.name])
            load, pid = running.enter_context(_peer(command, engine_port))
            proxies[program.name] = load, {program.name: [pid]}
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in proxies}
        for _ in range(_ROUNDS):
            for name, (load, groups) in proxies.items():
                rounds[name].append(_rounds(_loads(load), groups))
                print(name, _summed_up(rounds[name][-1:]) | {"rounds": 1}, flush=True)
    return {"step_ms": STEP_S * 1e3} | {name: _summed_up(of) for name, of in rounds.items()}


def main() -> None:
    """Measure Sluice, and the peers that the command line names or PATH contains."""
    found = [path for name in _PEERS if (path := shutil.which(name)) is not None]
    programs = [Path(it) for it in sys.argv[1:] or found]
    if unknown := [str(it) for it in programs if it.name not in _PEERS or not it.exists()]:
        raise SystemExit(f"no such peer: {', '.join(unknown)}; known: {', '.join(_PEERS)}")
    if not programs:
        print(f"nothing to measure: none of {', '.join(_PEERS)} is on PATH")
        return
    is_compiled = not str(router.__file__).endswith(".py")
    name = "peers_compiled" if is_compiled else "peers"
    print(write_result(name, __doc__ or "", measure(programs)))


if __name__ == "__main__":
    main()
