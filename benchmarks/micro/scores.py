"""Measures an engine's CPU time for an answer, and for the two scores that a rollout adds.

One operation is the generation of one answer by an adapter, or both scores of this answer. A score
is the log probability of the answer under the adapter or under the base. For the adapter's score
the prompt is cached, for the base's score nothing is cached. The engine is `openvino` with the
shipped base and its default options, alone in this process, with one sequence at a time. Figures
are CPU time of the whole process, medians of the rounds, each with another prompt. An engine that
decodes many sequences in one batch needs less time per answer, but as much per score. Not measured:
gateway, router, frames. Run: `python -m benchmarks.micro.scores`.
"""

import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.results import write_result
from replica.drivers.openvino import load_openvino
from replica.engine.core import ScheduledEngine
from replica.engine.types import Sampling, SequenceRequest
from sluice.hashing import cache_root

_REPOSITORY = Path(__file__).parents[2] / "model_repo"
_ADAPTER = "butler"
_SHAPES = ((64, 48), (512, 256), (3072, 256))  # pairs of prompt tokens and answer tokens
_ROUNDS = 9


def _cpu_ms(engine: ScheduledEngine, adapter: str, request: SequenceRequest) -> float:
    """Return CPU milliseconds of one request from its first step to its end."""
    root = cache_root("base", adapter, b"")
    engine.add(replace(request, cache_root=root, adapter_digest=adapter))
    began_s = time.process_time()
    while engine.has_work:
        engine.step()
    return (time.process_time() - began_s) * 1e3


def measure(prompt_tokens: int, answer_tokens: int) -> dict[str, float]:
    """Return medians for one shape, in milliseconds of CPU."""
    # A new engine for each shape, because earlier shapes would warm its kernels and cache.
    engine = load_openvino(_REPOSITORY / "default", "base", {})
    engine.put_adapter(_ADAPTER, engine.read_adapter(_ADAPTER, _REPOSITORY / "adapters" / _ADAPTER))
    draw = random.Random(0)
    answers: list[float] = []
    by_adapter: list[float] = []
    by_base: list[float] = []
    for number in range(_ROUNDS + 1):
        tokens = [draw.randrange(300, 4000) for _ in range(prompt_tokens + answer_tokens)]
        sampling = Sampling(temperature=0.7, seed=number)
        prompt = tokens[:prompt_tokens]
        asked = SequenceRequest(1, prompt, answer_tokens, sampling=sampling, ignore_eos=True)
        score = SequenceRequest(1, tokens, 1, prompt_logprobs=0, scored_tokens=answer_tokens)
        answer_ms = _cpu_ms(engine, _ADAPTER, asked)
        own_ms, base_ms = _cpu_ms(engine, _ADAPTER, score), _cpu_ms(engine, "", score)
        if number:  # the first round is a warm-up
            answers.append(answer_ms)
            by_adapter.append(own_ms)
            by_base.append(base_ms)
    medians = [statistics.median(it) for it in (answers, by_adapter, by_base)]
    answer_ms, own_ms, base_ms = (round(it, 1) for it in medians)
    return {
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "answer_cpu_ms": answer_ms,
        "score_by_adapter_cpu_ms": own_ms,
        "score_by_base_cpu_ms": base_ms,
        "both_of_answer": round((own_ms + base_ms) / answer_ms, 2),
    }


def main() -> None:
    """Measure all shapes and write the result."""
    shapes = [measure(*shape) for shape in _SHAPES]
    for shape in shapes:
        print(shape)
    operation = "CPU time of one answer, and of its two scores, on the openvino engine"
    print(write_result("scores", operation, {"rounds": _ROUNDS, "shapes": shapes}))


if __name__ == "__main__":
    main()
