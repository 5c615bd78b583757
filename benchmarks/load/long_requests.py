"""Measures how many requests with long prompts a core of gateway and router serves.

One operation is a chat completion of two tokens whose prompt has 50,000 to 100,000 tokens. It
passes gateway, router and the `sim` driver inside a real Triton. The engine's steps take 4 ms,
whatever they compute. Keys, limits, a budget, the counting of tokens and events are on. `new`
prompts have no text in common. `again` prompts are documents that the tenant has sent before, with
a new question. The figure is one second over the CPU time of gateway and router per request. Four
clients repeat requests without a pause. Not measured: a network, TLS, an engine that computes, and
the CPU time of the engine. Run: `python -m benchmarks.load.long_requests`.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import aiohttp

from benchmarks.load.gateway import FREE_TOKENS, configure, groups_of, lengthen_context
from benchmarks.load.sse_client import cpu_seconds
from benchmarks.load.stack import BenchmarkStack, started
from benchmarks.results import write_result

_ROUNDS, _REQUESTS, _CLIENTS, _DOCUMENTS = 5, 40, 4, 4
_WORDS_MIN, _WORDS_MAX = 33_000, 64_000  # 50,000 to 100,000 tokens of the shipped tokenizer
_ANSWER_TOKENS = 2
_LIMIT_S = 60.0
_OPTIONS = {
    "context_tokens_max": "200000",
    "step_tokens_max": "200000",
    "blocks": "200000",
    "cost_step_s": "0.004",
    **FREE_TOKENS,
}
_TEXT = (
    "the river ran past a mill and its gate was shut at night while rain fell on stone walls of "
    "old houses where people wrote letters about weather trade or distant towns in summer"
)


def _documents(seed: int) -> Iterator[str]:
    """Yield texts of words, with a number in every tenth place."""
    chosen = random.Random(seed)
    known = [str(it) for it in _TEXT.split()]
    while True:
        count = chosen.randint(_WORDS_MIN, _WORDS_MAX)
        words: list[str] = chosen.choices(known, k=count)
        words[::10] = [str(chosen.randint(0, 999)) for _ in words[::10]]
        yield " ".join(words)


async def _round(
    http: aiohttp.ClientSession, url: str, prompts: list[list[str]]
) -> tuple[list[float], int]:
    """Send the prompts, and return the latencies in milliseconds and the number of tokens."""
    latencies_ms: list[float] = []
    tokens = 0
    waiting = iter(prompts)

    async def client() -> None:
        nonlocal tokens
        for prompt in waiting:
            body = {
                "model": "sluice-tiny",
                "messages": [{"role": "user", "content": text} for text in prompt],
                "max_tokens": _ANSWER_TOKENS,
            }
            began_s = time.perf_counter()
            async with asyncio.timeout(_LIMIT_S), http.post(url, json=body) as answer:
                assert answer.status == 200, await answer.text()
                tokens += (await answer.json())["usage"]["prompt_tokens"]
            latencies_ms.append((time.perf_counter() - began_s) * 1e3)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_CLIENTS):
            tasks.create_task(client())
    return latencies_ms, tokens


async def _measured(stack: BenchmarkStack) -> dict[str, Any]:
    url = f"{stack.env['OPENAI_BASE_URL']}/chat/completions"
    headers = {"authorization": f"Bearer {stack.env['OPENAI_API_KEY']}"}
    groups = groups_of(stack)
    known = list(islice(_documents(1), _DOCUMENTS))
    rounds: dict[str, list[dict[str, Any]]] = {"new": [], "again": []}
    async with aiohttp.ClientSession(headers=headers) as http:
        await _round(http, url, [[text] for text in known])  # warm up
        for number in range(_ROUNDS):
            new = _documents(100 + number)
            kinds = {
                "new": [[next(new)] for _ in range(_REQUESTS)],
                "again": [
                    [known[it % _DOCUMENTS], f"{number} {it}: what of it?"]
                    for it in range(_REQUESTS)
                ],
            }
            for name, prompts in kinds.items():
                before, began_s = cpu_seconds(groups), time.perf_counter()
                latencies_ms, tokens = await _round(http, url, prompts)
                took_s = time.perf_counter() - began_s
                after = cpu_seconds(groups)
                cpu_ms = {it: (after[it] - before[it]) / _REQUESTS * 1e3 for it in before}
                rounds[name].append(
                    {
                        "requests_per_core_s": round(1e3 / sum(cpu_ms.values()), 1),
                        "cpu_ms": {it: round(ms, 2) for it, ms in cpu_ms.items()},
                        "requests_per_s": round(_REQUESTS / took_s, 1),
                        "prompt_tokens": tokens // _REQUESTS,
                        "latency_ms_p50": round(statistics.median(latencies_ms), 1),
                    }
                )
    return {
        name: {
            "requests_per_core_s": statistics.median(it["requests_per_core_s"] for it in made),
            "rounds": made,
        }
        for name, made in rounds.items()
    }


def main() -> None:
    """Measure both kinds of prompts, and write `benchmarks/results/long_requests.json`."""
    with started("sim", "--no-embeddings") as stack:
        lengthen_context(stack, 200_000)
        configure(stack, **_OPTIONS)
        stack.budget()
        figures = asyncio.run(_measured(stack))
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    print(write_result("long_requests", operation, figures).read_text())


if __name__ == "__main__":
    main()
