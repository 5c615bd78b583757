"""Predicted answers on the OpenVINO engine alone: steps, processor time and latency.

One operation: the answers of the shipped base to 1 or 8 prompts at once, each of 64 random tokens,
256 greedy tokens each. `none`: no prediction; `good`: the answer itself; `edited`: the answer with
every 40th token replaced; `wrong`: random tokens. `tokens_per_step` is what one engine step brings
one sequence, prefill steps left out. `cpu_us_per_token` and `wall_ms` (from the first step to the
end of the last answer) are medians of the rounds, in which the cases take turns; `ratio` is to
`none`. `equal`: answers that are the same as without a prediction, with `f32` weights and pool.
Not measured: frames, transport, tokenizing. Run: `python -m benchmarks.micro.predictions`.
"""

import random
import statistics
import time
from typing import Any, NamedTuple

from benchmarks.engine_alone import SHIPPED_BASE
from benchmarks.results import write_result
from replica.drivers.openvino import load_openvino
from replica.engine.driver import Driver
from replica.engine.types import SequenceRequest

_PROMPT_TOKENS = 64
_NEW_TOKENS = 256
_EDITED_EVERY = 40
_ROUNDS = 7
_random = random.Random(0)


class PredictionRun(NamedTuple):
    """One round of one case."""

    answers: list[list[int]]
    tokens_per_step: float
    cpu_s: float
    wall_s: float
    tried: int
    accepted: int


def ids(count: int) -> list[int]:
    """Return random ordinary ids."""
    return [_random.randrange(300, 4000) for _ in range(count)]


def run(driver: Driver, prompts: list[list[int]], predictions: list[list[int]]) -> PredictionRun:
    """Answer all prompts at once."""
    before = driver.load()
    answers: list[list[int]] = [[] for _ in prompts]
    for key, (prompt, prediction) in enumerate(zip(prompts, predictions, strict=True)):
        driver.add(
            SequenceRequest(key, prompt, _NEW_TOKENS, ignore_eos=True, prediction=prediction)
        )
    turns, cpu_s, wall_s = 0, time.process_time(), time.perf_counter()
    while driver.has_work:
        events = driver.step()
        turns += len(set(events.keys))
        for key, token in zip(events.keys, events.tokens, strict=True):
            answers[key].append(token)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    load = driver.load()
    return PredictionRun(
        answers,
        # The first token of each comes with its prompt.
        (sum(map(len, answers)) - len(answers)) / (turns - len(answers)),
        cpu_s,
        wall_s,
        load.draft_tokens - before.draft_tokens,
        load.accepted_tokens - before.accepted_tokens,
    )


def edited(answer: list[int]) -> list[int]:
    """Return an answer of which every 40th token is another one."""
    return [
        token + 1 if index % _EDITED_EVERY == _EDITED_EVERY - 1 else token
        for index, token in enumerate(answer)
    ]


def measure(driver: Driver, sequences: int) -> dict[str, Any]:
    """Measure all cases of this many sequences, in turns."""
    prompts = [ids(_PROMPT_TOKENS) for _ in range(sequences)]
    plain = run(driver, prompts, [[] for _ in prompts]).answers
    cases = {
        "none": [[] for _ in prompts],
        "good": plain,
        "edited": [edited(answer) for answer in plain],
        "wrong": [ids(_NEW_TOKENS) for _ in prompts],
    }
    rounds = {name: list[PredictionRun]() for name in cases}
    for _ in range(_ROUNDS):
        for name, predictions in cases.items():
            rounds[name].append(run(driver, prompts, predictions))
    figures: dict[str, Any] = {}
    for name, runs in rounds.items():
        tokens = sequences * _NEW_TOKENS
        cpu_s = statistics.median([it.cpu_s for it in runs])
        wall_s = statistics.median([it.wall_s for it in runs])
        figures[name] = {
            "tokens_per_step": round(runs[-1].tokens_per_step, 2),
            "cpu_us_per_token": round(cpu_s / tokens * 1e6, 1),
            "wall_ms": round(wall_s * 1000, 1),
            "tried": runs[-1].tried,
            "accepted": runs[-1].accepted,
            "equal": sum(a == b for it in runs for a, b in zip(it.answers, plain, strict=True)),
            "answers": _ROUNDS * sequences,
        }
        none = figures["none"]
        for figure in ("cpu_us_per_token", "wall_ms"):
            figures[name][f"{figure}_ratio"] = round(figures[name][figure] / none[figure], 2)
    return figures


def main() -> None:
    """Measure and write `benchmarks/results/predictions.json`."""
    options = {"precision": "f32", "kv_precision": "f32"}
    driver = load_openvino(SHIPPED_BASE, "benchmark", options)
    figures = {str(sequences): measure(driver, sequences) for sequences in (1, 8)}
    assert __doc__ is not None
    operation = __doc__.split("\n\n")[1].strip().replace("\n", " ")
    parameters = {"new_tokens": _NEW_TOKENS, "rounds": _ROUNDS, **options}
    result = {"parameters": parameters, "sequences": figures}
    print(write_result("predictions", operation, result))


if __name__ == "__main__":
    main()
