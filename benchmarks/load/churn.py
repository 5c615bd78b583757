"""Runs chains of responses while servers are killed, and counts stored responses that are lost.

One operation is a turn of a chain of responses, over the gateway of a whole stack on the `sim`
driver. Gateway, control plane, Valkey and PostgreSQL are killed by SIGKILL, one after the other.
Each complete answer reports whether it was stored. At the end the benchmark counts the input tokens
of each whole chain, which needs every turn that was reported as stored. If a chain is incomplete,
each of its turns is read. None may be lost. `resident_mb` is the resident memory each 10 s, and
`slope_mb_per_min` the slope of its last half. Not measured: turns without an answer.
Run: `python -m benchmarks.load.churn [--turns 200] [--seconds 600]`.
"""

import argparse
import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import aiohttp

from benchmarks.load.memory import MemorySamples
from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.results import write_result
from cli.stack.home import Home
from cli.stack.state import read_state
from sluice.response_ids import created_unix_ms

_KILLED = ("gateway", "control-plane", "valkey", "postgres")
_SAMPLED = ("gateway", "router", "control-plane")
_CHAIN_TURNS = 20
_PAUSE_S, _TURN_S, _READ_S = 0.2, 30.0, 120.0
_READERS = 32
_BODY: dict[str, Any] = {
    "model": "sluice-tiny",
    "input": "And then?",
    "max_output_tokens": 8,
    "ignore_eos": True,
}


class ChurnLoad:
    """A client that runs chains of responses at a rate of turns, and counts their outcomes.

    Attributes:
        counts: Outcomes of turns, by name.
        chains: For each chain, the ids of its turns that answers reported as stored.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, *, turns_per_s: float) -> None:
        """Prepare the load for `url`, the URL of the responses API."""
        self._http, self._url = http, url
        self._every_s = 1 / turns_per_s
        self.counts: Counter[str] = Counter()
        self.chains: list[list[str]] = []

    async def run(self, seconds: float) -> None:
        """Begin chains at the rate of turns for some seconds, and wait until all have ended."""
        end_s = time.monotonic() + seconds
        next_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while next_s < end_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                tasks.create_task(self._chain(end_s))
                next_s += self._every_s * _CHAIN_TURNS

    async def _chain(self, end_s: float) -> None:
        stored: list[str] = []
        self.chains.append(stored)
        for _ in range(_CHAIN_TURNS):
            if time.monotonic() > end_s:
                return
            response = await self._turn(stored[-1] if stored else None)
            if response is None:
                await asyncio.sleep(_PAUSE_S)
            elif response["store"]:
                stored.append(response["id"])

    async def _turn(self, previous: str | None) -> dict[str, Any] | None:
        """Return the answer of a turn, or None without one. The chain then repeats the turn."""
        body = _BODY if previous is None else _BODY | {"previous_response_id": previous}
        try:
            async with asyncio.timeout(_TURN_S), self._http.post(self._url, json=body) as answer:
                told = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            self.counts["no_answer"] += 1
            return None
        if answer.status != 200:
            self.counts[f"status_{answer.status}"] += 1
            return None
        self.counts["stored" if told["store"] else "told_as_not_stored"] += 1
        return told

    async def lost(self) -> list[str]:
        """Return the ids of stored responses that cannot be read."""
        left, lost = [it for it in self.chains if it], list[str]()

        async def read() -> None:
            while left:
                chain = left.pop()
                if not await self._is_whole(chain):
                    lost.extend([it for it in chain if not await self._is_there(it)])

        async with asyncio.TaskGroup() as tasks:
            for _ in range(_READERS):
                tasks.create_task(read())
        return lost

    async def _is_whole(self, chain: Sequence[str]) -> bool:
        """Return whether all turns of a chain can be read."""
        body = {"model": _BODY["model"], "previous_response_id": chain[-1], "input": "?"}
        return await self._found("POST", f"{self._url}/input_tokens", json=body)

    async def _is_there(self, response_id: str) -> bool:
        return await self._found("GET", f"{self._url}/{response_id}")

    async def _found(self, method: str, url: str, **options: Any) -> bool:
        """Return whether the answer is 200 and not 404, and repeat the request at other answers."""
        async with asyncio.timeout(_READ_S):
            while True:
                try:
                    async with self._http.request(method, url, **options) as answer:
                        if answer.status in {200, 404}:
                            return answer.status == 200
                except (aiohttp.ClientError, ConnectionError):
                    pass  # a server is still restarting
                await asyncio.sleep(_PAUSE_S)


async def _killing(stack: BenchmarkStack, gap_s: float, killed: dict[str, float]) -> None:
    """Kill each server once, `gap_s` seconds apart, and add the Unix times of the kills."""
    for name in _KILLED:
        await asyncio.sleep(gap_s)
        os.kill(_pids(stack)[name], signal.SIGKILL)
        killed[name] = time.time()


def _pids(stack: BenchmarkStack) -> dict[str, int]:
    state = read_state(Home(stack.home))
    assert state is not None, "the stack runs"
    return {it.name: it.pid for it in state.processes}


async def measured(
    stack: BenchmarkStack, *, turns_per_s: float, seconds: float, gap_s: float
) -> dict[str, Any]:
    """Return outcomes of turns, lost responses, and samples of memory."""
    headers = {"authorization": f"Bearer {stack.env['OPENAI_API_KEY']}"}
    url = f"{stack.env['OPENAI_BASE_URL']}/responses"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http:
        load = ChurnLoad(http, url, turns_per_s=turns_per_s)
        memory = MemorySamples(partial(_pids, stack), _SAMPLED)
        killed = dict[str, float]()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_killing(stack, gap_s, killed))
            sampling = tasks.create_task(memory.run())
            await load.run(seconds)
            sampling.cancel()
        print(memory.figures(), "reading", len(load.chains), "chains", flush=True)
        began_s = time.monotonic()
        lost = await load.lost()
        print("read in", round(time.monotonic() - began_s), "s", flush=True)
    for it in lost:
        created_s = created_unix_ms(it) / 1000
        after = {name: round(created_s - at_s, 1) for name, at_s in killed.items()}
        print("lost", it, "seconds after each kill:", after, flush=True)
    return {"turns": dict(sorted(load.counts.items())), "lost": len(lost), **memory.figures()}


def main() -> None:
    """Run the load. With the default duration it writes `benchmarks/results/churn.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=float, default=200.0, help="Turns per second.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--gap", type=float, help="Seconds between kills.")
    given = parser.parse_args()
    gap_s = given.gap or given.seconds / (len(_KILLED) + 1)
    with started("sim", "--no-embeddings") as stack:
        work = measured(stack, turns_per_s=given.turns, seconds=given.seconds, gap_s=gap_s)
        figures = asyncio.run(work)
    record = {"turns_per_s": given.turns, "seconds": given.seconds, **figures}
    if given.seconds < parser.get_default("seconds") or given.turns < parser.get_default("turns"):
        print(record)
        return
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    print(write_result("churn", operation, record).read_text())


if __name__ == "__main__":
    main()
