"""Measures the first request to a pool whose replicas all sleep, on a local stack.

One operation is a streamed chat request of 20 tokens to a pool whose only replica sleeps. Two times
are measured from the start of the request, to its first token and to the end of the answer. The
request begins at a random time, up to two seconds after the engine has released its KV memory. The
time is random, because routers report demand, and the control plane checks it, at fixed intervals.
Then the same request is timed while the replica is awake. Not measured: a network, large KV memory
(the shipped model's takes tens of MB).
Run: `python -m benchmarks.load.wake [openvino] [sim]`.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from benchmarks.load.sse_client import run_load
from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.results import write_result

WAKES = 12
ENGINES = ("openvino", "sim")
_TOKENS = 20
_BOUNDS = {
    "replicas_min": 0,
    "replicas_max": 1,
    "sleepers_min": 1,
    "minute_worth": 0.0,
    "hold_s": 1.0,
    "idle_s": 1.0,
}
_PHASE_S = 2.0  # longest pause between the release of memory and the request
_PATIENCE_S = 60.0
_LOOK_S = 0.1


class SleepingPool:
    """The only pool of a stack, with bounds for scaling that permit all its replicas to sleep."""

    def __init__(self, stack: BenchmarkStack, admin: httpx.Client) -> None:
        """Set the pool's bounds with `admin`, a client of the admin REST."""
        self._stack = stack
        self._admin = admin
        self._id = self._rows("pools")[0]["id"]
        admin.put(f"/v1/pools/{self._id}/scaling", json=_BOUNDS).raise_for_status()

    def measure_speed(self) -> None:
        """Send requests until the pool's speed is measured, because only then it may sleep."""
        deadline_at = time.monotonic() + _PATIENCE_S
        while not self._rows("scaling")[0].get("speed"):
            _check(deadline_at, "the speed of the replica is measured")
            asyncio.run(run_load(self._stack.load(64, 256)))

    def wait_asleep(self) -> None:
        """Wait until the only replica's engine has released its KV memory."""
        _until(self._is_asleep, "the pool sleeps")

    def _is_asleep(self) -> bool:
        states = [row["state"] for row in self._rows("replicas")]
        files = list(self._stack.home.glob("state/agent/replicas/*/run.json"))
        records = [json.loads(file.read_text()) for file in files]
        return states == ["sleeping"] and [it["is_asleep"] for it in records] == [True]

    def _rows(self, kind: str) -> list[dict[str, Any]]:
        return self._admin.get(f"/v1/{kind}").raise_for_status().json()["data"]


def _until(holds: Callable[[], bool], what: str) -> None:
    deadline_at = time.monotonic() + _PATIENCE_S
    while not holds():
        _check(deadline_at, what)
        time.sleep(_LOOK_S)


def _check(deadline_at: float, what: str) -> None:
    if time.monotonic() > deadline_at:
        raise TimeoutError(f"not within {_PATIENCE_S:.0f} s: {what}")


def _time_request(client: httpx.Client) -> tuple[float, float]:
    """Send one request. Returns the seconds to its first token and to the end of its answer."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Tell me a story about a river."}],
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    began_at, first_at = time.perf_counter(), 0.0
    with client.stream("POST", "/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not first_at and '"content":"' in line.replace('"content":""', ""):
                first_at = time.perf_counter()
    if not first_at:
        raise AssertionError("the answer has no token")
    return first_at - began_at, time.perf_counter() - began_at


def _measure(engine: str) -> dict[str, Any]:
    with started(engine, "--no-embeddings") as stack:
        token, admin_token = stack.env["OPENAI_API_KEY"], stack.env["SLUICE_ADMIN_KEY"]
        with (
            httpx.Client(
                base_url=stack.env["SLUICE_ADMIN_URL"],
                headers={"authorization": f"Bearer {admin_token}"},
                timeout=_PATIENCE_S,
            ) as admin,
            httpx.Client(
                base_url=stack.env["OPENAI_BASE_URL"],
                headers={"authorization": f"Bearer {token}"},
                timeout=_PATIENCE_S,
            ) as client,
        ):
            pool = SleepingPool(stack, admin)
            pool.measure_speed()
            asleep, awake = list[tuple[float, float]](), list[tuple[float, float]]()
            for _ in range(WAKES):
                pool.wait_asleep()
                time.sleep(random.uniform(0.0, _PHASE_S))
                asleep.append(_time_request(client))
                awake.append(_time_request(client))
                print(f"{engine}: {asleep[-1][0]:.2f} s, awake {awake[-1][0]:.3f} s", flush=True)
    return {"asleep": _figures(asleep), "awake": _figures(awake)}


def _figures(times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    columns = zip(("first_token_s", "answer_s"), zip(*times, strict=True), strict=True)
    return {
        name: {
            "each": [round(one, 3) for one in values],
            "median": round(statistics.median(values), 3),
            "max": round(max(values), 3),
        }
        for name, values in columns
    }


def main() -> None:
    """Measure the engines named on the command line, both by default, and write the figures."""
    engines = sys.argv[1:] or ENGINES
    figures: dict[str, Any] = {"wakes": WAKES, "output_tokens": _TOKENS}
    for engine in engines:
        figures[engine] = _measure(engine)
    print(write_result("wake", __doc__ or "", figures), figures)


if __name__ == "__main__":
    main()
