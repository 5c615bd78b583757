"""Measures turn 50 of a chain of 60,000 tokens, compared with turn 2 with as much new input.

One operation is a streamed turn of a stored response, through gateway, router and the `sim` driver
inside a real Triton. The engine's steps take no time. Turns have 1,200 new tokens, and turn 2 and
turn 50 alternate. `ttft_ms` is a client's time to the first text. `engine_ms` is the TTFT of a
client that is attached directly to the same Triton. It sends an equally long chain, whose prefix is
cached, as routers do. `added_ms` is the difference, which gateway and router add. `cpu_us` is the
CPU time of gateway and router. Not measured: a network, TLS, an engine that computes. The medians
are the figures to read. Run: `python -m benchmarks.load.long_chains`.
"""

import asyncio
import random
import statistics
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.load.gateway import FREE_TOKENS, configure, groups_of, lengthen_context
from benchmarks.load.replica import ROOT, Attached
from benchmarks.load.sse_client import cpu_seconds
from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.load.straight import replica_of
from benchmarks.results import write_result
from sluice.hashing import chained_hashes
from sluice.kserve import HostStream

_ROUNDS, _CHAINS, _SHORT, _LONG = 3, 20, 2, 50
_NEW_WORDS, _NEW_TOKENS, _ANSWER_TOKENS = 770, 1200, 4
_TURN_S = 30.0
_OPTIONS = {
    "context_tokens_max": "200000",
    "step_tokens_max": "200000",
    "blocks": "200000",
    "cost_step_s": "0",
    **FREE_TOKENS,
}
_WORDS = ("river", "ran", "past", "mill", "gate", "shut", "night", "while", "rain", "fell", "stone")
_FIRST_TEXT = b"event: response.output_text.delta"
_ID = b'"id":"resp_'


@dataclass(slots=True)
class _Turns:
    """Figures of one kind of turns.

    Attributes:
        ttft_ms: Time to the first text of each turn.
        engine_ms: Time to the first token of each turn that went directly to the engine.
        cpu_s: CPU seconds of all turns, by process.
    """

    ttft_ms: list[float] = field(default_factory=list[float])
    engine_ms: list[float] = field(default_factory=list[float])
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])

    def figures(self) -> dict[str, Any]:
        through, straight = statistics.median(self.ttft_ms), statistics.median(self.engine_ms)
        return {
            "ttft_ms": round(through, 2),
            "engine_ms": round(straight, 2),
            "added_ms": round(through - straight, 2),
            "cpu_us": {
                name: round(it / len(self.ttft_ms) * 1e6) for name, it in self.cpu_s.items()
            },
        }


class _Client:
    """A client of chains of stored responses."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self._random = random.Random(1)

    async def turn(self, previous: str | None) -> tuple[str, float]:
        """Run a turn, and return the id of its response and its TTFT in milliseconds."""
        body: dict[str, Any] = {
            "model": "sluice-tiny",
            "input": " ".join(self._random.choices(_WORDS, k=_NEW_WORDS)),
            "max_output_tokens": _ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        if previous is not None:
            body["previous_response_id"] = previous
        told, first_s = b"", 0.0
        began_s = time.perf_counter()
        async with asyncio.timeout(_TURN_S), self._http.post(self._url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for piece in answer.content.iter_any():
                told += piece
                if not first_s and _FIRST_TEXT in told:
                    first_s = time.perf_counter() - began_s
        assert b'"store":true' in told[told.rindex(b"event: response.") :], told[-2000:]
        at = told.index(_ID) + len(_ID) - len("resp_")
        return told[at : told.index(b'"', at)].decode(), first_s * 1e3

    async def chain(self, turns: int) -> str:
        """Run a chain of turns, and return the id of the last response."""
        previous = None
        for _ in range(turns):
            previous, _ = await self.turn(previous)
        assert previous is not None, "a chain has a turn"
        return previous


async def _prompts(attached: Attached, tokens: int) -> "array[int]":
    """Let the engine cache a prompt, and return it with the new tokens of a turn."""
    before = array("I", [random.randrange(100, 4000) for _ in range(tokens - _NEW_TOKENS)])
    await attached.generate([before], _ANSWER_TOKENS, hashes=[chained_hashes(before, ROOT)])
    return before + array("I", [random.randrange(100, 4000) for _ in range(_NEW_TOKENS)])


async def _engine_alone(stack: BenchmarkStack, kinds: Mapping[int, _Turns]) -> None:
    """Measure turns of each length, sent directly to the engine."""
    replica = await replica_of(stack)
    address, model = replica["grpc_address"], replica["triton_model"]
    async with HostStream(address, model, silence_s=10.0) as stream:
        await stream.open(timeout_s=10.0)
        attached = Attached(stream)
        await attached.attach()
        for _ in range(_CHAINS):
            for length, turns in kinds.items():
                ids = await _prompts(attached, length * _NEW_TOKENS)
                hashes = [chained_hashes(ids, ROOT)]
                first_s, _ = await attached.generate([ids], _ANSWER_TOKENS, hashes=hashes)
                turns.engine_ms.append(first_s * 1e3)


async def _through(
    client: _Client, kinds: Mapping[int, _Turns], groups: dict[str, list[int]]
) -> None:
    """Measure turns of each length through gateway and router."""
    chains = {length: [await client.chain(length - 1) for _ in range(_CHAINS)] for length in kinds}
    for number in range(_CHAINS):
        for length, turns in kinds.items():
            before = cpu_seconds(groups)
            _, ttft_ms = await client.turn(chains[length][number])
            after = cpu_seconds(groups)
            turns.ttft_ms.append(ttft_ms)
            for name in groups:
                turns.cpu_s[name] = turns.cpu_s.get(name, 0.0) + after[name] - before[name]


async def _measured(stack: BenchmarkStack) -> dict[str, Any]:
    kinds = {_SHORT: _Turns(), _LONG: _Turns()}
    headers = {"authorization": f"Bearer {stack.env['OPENAI_API_KEY']}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        client = _Client(http, f"{stack.env['OPENAI_BASE_URL']}/responses")
        await client.chain(_LONG)  # warm up
        for _ in range(_ROUNDS):
            await _through(client, kinds, groups_of(stack))
            await _engine_alone(stack, kinds)
    short, long = kinds[_SHORT].figures(), kinds[_LONG].figures()
    return {
        "turn_2": short,
        "turn_50": long,
        "ttft_of_turn_2": round(long["ttft_ms"] / short["ttft_ms"], 2),
        "added_of_turn_2": round(long["added_ms"] / short["added_ms"], 2),
    }


def main() -> None:
    """Measure both kinds of turns and write `benchmarks/results/long_chains.json`."""
    with started("sim", "--no-embeddings") as stack:
        lengthen_context(stack, 200_000)
        configure(stack, **_OPTIONS)
        figures = asyncio.run(_measured(stack))
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    parameters = {"new_tokens": _NEW_TOKENS, "turns": _ROUNDS * _CHAINS}
    record = {"parameters": parameters, **figures}
    print(write_result("long_chains", operation, record).read_text())


if __name__ == "__main__":
    main()
