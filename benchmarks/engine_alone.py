"""Measures the speed of the engines' drivers alone, without host, Triton or network.

One operation is one new token of one sequence, from `step()` of a driver in this process. `tok_s`
is new tokens per second of wall-clock time, from the first step to the end of the last sequence.
This includes the prefill of the prompts of 64 tokens, none of which is cached, because they all
differ. `openvino` serves the shipped base with its default options. The result has best and median
of the rounds, because the machine is shared. `ttft_ms` is the TTFT of one prompt of 1,024 tokens on
an idle engine. It is measured with an empty cache, and with all of the prompt except its last
tokens cached. `sim` is the simulated engine in real time. Its figure is the CPU time per token for
scheduling and token generation. Not measured: frames, transport, tokenizing. Run:
`python -m benchmarks.engine_alone`.
"""

import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.results import write_result
from replica.drivers.openvino import load_openvino
from replica.drivers.sim import load_sim
from replica.engine.driver import Driver
from replica.engine.types import Sampling, SequenceRequest

SHIPPED_BASE = Path(__file__).parents[1] / "model_repo" / "default"
_BATCHES = (1, 8, 32, 64)
_PROMPT_TOKENS = 64
_NEW_TOKENS = 100
_ROUNDS = 5
_LONG_TOKENS = 1024
_SIM_SEQUENCES = 1000
_random = random.Random(0)


def prompt(tokens: int) -> list[int]:
    """Return a prompt of random ids, without special tokens."""
    return [_random.randrange(300, 4000) for _ in range(tokens)]


def run(driver: Driver, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """Run sequences to their end. Returns the seconds until the first token and until the end."""
    for key, tokens in enumerate(prompts):
        driver.add(SequenceRequest(key, tokens, new_tokens, ignore_eos=True))
    began_s = time.perf_counter()
    first_s = 0.0
    while driver.has_work:
        if driver.step().keys and not first_s:
            first_s = time.perf_counter() - began_s
    return first_s, time.perf_counter() - began_s


def closed_loop(driver: Driver, sequences: int, requests: int) -> float:
    """Return new tokens per second of 100-token answers at temperature 1, `sequences` at a time.

    The sequences are like those of HTTP requests with OpenAI's defaults. Prompts have 30 tokens,
    and a new sequence starts when another sequence ends.
    """
    waiting = [
        SequenceRequest(
            key,
            prompt(30),
            _NEW_TOKENS,
            ignore_eos=True,
            sampling=Sampling(temperature=1.0, seed=key),
        )
        for key in range(requests)
    ]
    began_s, tokens = time.perf_counter(), 0
    for _ in range(sequences):
        driver.add(waiting.pop())
    while driver.has_work:
        events = driver.step()
        tokens += len(events.keys)
        for _ in events.finished:
            if waiting:
                driver.add(waiting.pop())
    return tokens / (time.perf_counter() - began_s)


def measure_openvino() -> dict[str, Any]:
    """Measure the real engine on the shipped base."""
    began_s = time.perf_counter()
    driver = load_openvino(SHIPPED_BASE, "benchmark", {})
    load_s = time.perf_counter() - began_s
    run(driver, [prompt(_PROMPT_TOKENS) for _ in range(8)], 16)  # compiles the kernels
    throughput: dict[str, Any] = {}
    for batch in _BATCHES:
        walls_s = [
            run(driver, [prompt(_PROMPT_TOKENS) for _ in range(batch)], _NEW_TOKENS)[1]
            for _ in range(_ROUNDS)
        ]
        throughput[str(batch)] = {
            "tok_s": round(batch * _NEW_TOKENS / min(walls_s)),
            "tok_s_median": round(batch * _NEW_TOKENS / statistics.median(walls_s)),
        }
    cold_s: list[float] = []
    warm_s: list[float] = []
    for _ in range(_ROUNDS):
        long = prompt(_LONG_TOKENS)
        cold_s.append(run(driver, [long], 1)[0])
        warm_s.append(run(driver, [long[:-24] + prompt(24)], 1)[0])
    return {
        "load_s": round(load_s, 2),
        "sequences": throughput,
        "ttft_ms": {
            "cold": round(min(cold_s) * 1e3, 1),
            "all_but_24_cached": round(min(warm_s) * 1e3, 1),
        },
    }


def measure_sim() -> dict[str, Any]:
    """Measure the simulated engine."""
    driver = load_sim(SHIPPED_BASE, "benchmark", {})
    prompts = [prompt(_PROMPT_TOKENS) for _ in range(_SIM_SEQUENCES)]
    cpu_s = time.process_time()
    _, wall_s = run(driver, prompts, _NEW_TOKENS)
    cpu_s = time.process_time() - cpu_s
    tokens = _SIM_SEQUENCES * _NEW_TOKENS
    return {
        "sequences": _SIM_SEQUENCES,
        "tok_s": round(tokens / wall_s),
        "cpu_us_per_token": round(cpu_s / tokens * 1e6, 2),
    }


def main() -> None:
    """Measure both drivers and write `benchmarks/results/engine_alone.json`."""
    figures = {
        "parameters": {
            "prompt_tokens": _PROMPT_TOKENS,
            "new_tokens": _NEW_TOKENS,
            "rounds": _ROUNDS,
        },
        "openvino": measure_openvino(),
        "sim": measure_sim(),
    }
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    path = write_result("engine_alone", operation, figures)
    print(path.read_text())


if __name__ == "__main__":
    main()
