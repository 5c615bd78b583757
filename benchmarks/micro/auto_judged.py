"""Measures `auto` on RouteLLM's public judgements (MMLU, GSM8K): cost at an accuracy, calibration.

One operation is a question for GPT-4 or Mixtral-8x7B. RouteLLM's repository has the judgements of
both answers. `--data` is a checkout of this repository (Apache-2.0), or a part of one. A random
half of the questions (per seed) trains the product's table and kNN, which then predict the other
half. Not measured: the generation of answers, waits, and conversations of several turns. A figure
is the mean over the seeds, with the 95 % interval of a bootstrap over questions and seeds.
`auto - knn` is the difference of a figure on the same questions, so a cost above 0 means that
`auto` costs more. The calibration error of a small sample is above 0 even for a perfect router.
`by_chance` is this error if each prediction were the true probability.
Run: `python -m benchmarks.micro.auto_judged --data DIR`. Without DIR, the result file stays.
"""

import argparse
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from benchmarks.judged_curves import (
    Floats,
    Judged,
    calibration_error,
    curve_of,
    error_by_chance,
)
from benchmarks.judged_routers import (
    PRICES,
    STRONG,
    WEAK,
    JudgedQuestion,
    Predicted,
    by_auto,
    by_neighbours,
    feature_vectors,
    judged_of,
    nearness,
    table_from,
    word_vectors,
)
from benchmarks.results import write_result
from sluice.auto.quality import QualityPrior, table_of

SEEDS = 10
REPLICATES = 1000
# Cost at which RouteLLM's best router has 95 % of GPT-4's accuracy, as a share of GPT-4's cost
# (announcement of 2024-07-01: 45 % and 35 % saved).
PUBLISHED_COST = {"mmlu": 0.55, "gsm8k": 0.65}
# MMLU results published by both models' authors, as operators may configure them before any answer
# is judged.
COLD = {WEAK: QualityPrior(quality=0.706), STRONG: QualityPrior(quality=0.864)}
_EVALS = Path("routellm/evals")


class Trial(NamedTuple):
    """The unseen questions of one seed, and each router's predictions for them."""

    judged: Judged
    routers: Mapping[str, Predicted]


def questions_of(data: Path) -> dict[str, list[JudgedQuestion]]:
    """Return the questions by benchmark, without those that RouteLLM leaves out."""
    evals = data / _EVALS
    files = {
        "mmlu": sorted((evals / "mmlu/responses").glob("mmlu_*.csv")),
        "gsm8k": [evals / "gsm8k/gsm8k_responses.csv"],
    }
    found = {
        name: [it for path in paths for it in _rows(path, _left_out(evals / name))]
        for name, paths in files.items()
    }
    return {**found, "both": [it for part in found.values() for it in part]}


def trial(questions: Sequence[JudgedQuestion], seed: int) -> Trial:
    """Learn from one half of the questions, and predict the other half."""
    mixed = list(questions)
    Random(seed).shuffle(mixed)
    count = len(mixed) // 2
    known, unseen = mixed[:count], mixed[count:]
    texts, learnt, asked = [it.text for it in mixed], judged_of(known), judged_of(unseen)
    routers = {
        "auto": by_auto(unseen, table_from(known, {})),
        "auto_cold": by_auto(unseen, table_of((), COLD)),
    }
    for name, vectors in (
        ("knn_features", feature_vectors(texts, count)),
        ("knn_words", word_vectors(texts, count)),
    ):
        near, near_known = (
            nearness(it, vectors[:count]) for it in (vectors[count:], vectors[:count])
        )
        routers[name] = by_neighbours(learnt, near, near_known, asked)
    weak, strong = (np.full(len(unseen), it.mean()) for it in (learnt.weak, learnt.strong))
    routers["random"] = Predicted(np.zeros(len(unseen)), weak, strong)
    routers["oracle"] = Predicted(asked.strong - asked.weak, asked.weak, asked.strong)
    return Trial(asked, routers)


def figures(judged: Judged, routers: Mapping[str, Predicted]) -> dict[str, dict[str, float]]:
    """Return the figures of one sample of questions, by figure and router."""
    strong, gap = judged.strong.mean(), judged.strong.mean() - judged.weak.mean()
    found: dict[str, dict[str, float]] = {}
    for name, predicted in routers.items():
        curve = curve_of(predicted.scores, judged)
        one = {
            "calls_at_95_percent": curve.share_at(0.95 * strong),
            "cost_at_95_percent": curve.cost_at(0.95 * strong),
            "calls_at_half_gap": curve.share_at(judged.weak.mean() + 0.5 * gap),
            "calls_at_80_percent_of_gap": curve.share_at(judged.weak.mean() + 0.8 * gap),
            "calls_at_95_percent_of_gap": curve.share_at(judged.weak.mean() + 0.95 * gap),
            "gap_recovered": curve.recovered,
            "calibration_error": calibration_error(*_both(judged, predicted)),
        }
        for figure, value in one.items():
            found.setdefault(figure, {})[name] = value
    for values in found.values():
        for name in ("knn_features", "knn_words", "random"):
            values[f"auto - {name}"] = values["auto"] - values[name]
    return found


def summary(trials: Sequence[Trial], replicates: int) -> dict[str, object]:
    """Return the mean figures over trials, each with its bootstrap interval."""
    random = np.random.default_rng(1)
    means = [figures(*it) for it in trials]
    draws = list[dict[str, dict[str, float]]]()
    for number in range(replicates):
        judged, routers = trials[number % len(trials)]
        rows = random.integers(0, len(judged.weak), len(judged.weak))
        drawn = {
            name: Predicted(it.scores[rows], it.weak[rows], it.strong[rows])
            for name, it in routers.items()
        }
        draws.append(figures(judged.at(rows), drawn))
    found: dict[str, object] = {
        figure: {
            name: _with_interval(
                [it[figure][name] for it in means], [it[figure][name] for it in draws]
            )
            for name in routers
        }
        for figure, routers in means[0].items()
    }
    chance = [error_by_chance(_both(*_auto(it))[0], random, 50) for it in trials]
    found["calibration_error_by_chance"] = round(float(np.mean(chance)), 4)
    return found


def _auto(one: Trial) -> tuple[Judged, Predicted]:
    return one.judged, one.routers["auto"]


def _both(judged: Judged, predicted: Predicted) -> tuple[Floats, Floats]:
    """Return the predictions of both models, and the judgements."""
    return (
        np.concatenate([predicted.weak, predicted.strong]),
        np.concatenate([judged.weak, judged.strong]),
    )


def _with_interval(values: Sequence[float], draws: Sequence[float]) -> list[float]:
    low, high = np.percentile(draws, [2.5, 97.5])
    return [round(float(it), 4) for it in (np.mean(values), low, high)]


def _rows(path: Path, left_out: frozenset[str]) -> Iterator[JudgedQuestion]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["prompt"] not in left_out:
                yield JudgedQuestion(row["prompt"], row[WEAK] == "True", row[STRONG] == "True")


def _left_out(folder: Path) -> frozenset[str]:
    """Return the prompts that RouteLLM found in its own training data."""
    path = folder / "contaminated_prompts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return frozenset(json.loads(line)["eval_prompt"] for line in lines if line)


def main() -> None:
    """Measure all and write benchmarks/results/auto_judged.json."""
    parser = argparse.ArgumentParser(description="`auto` on RouteLLM's public judgements")
    parser.add_argument("--data", type=Path, help="a checkout of RouteLLM's repository")
    parser.add_argument("--note", default="", help="a remark on the data, for the result file")
    asked = parser.parse_args()
    if asked.data is None:
        print("no --data DIR: the result file stays")
        return
    found: dict[str, object] = {"note": asked.note, "seeds": SEEDS, "prices": PRICES}
    for name, questions in questions_of(asked.data).items():
        trials = [trial(questions, seed) for seed in range(SEEDS)]
        judged = judged_of(questions)
        found[name] = {
            "questions": len(questions),
            "weak_accuracy": round(float(judged.weak.mean()), 4),
            "strong_accuracy": round(float(judged.strong.mean()), 4),
            "published_cost_at_95_percent": PUBLISHED_COST.get(name),
            **summary(trials, REPLICATES),
        }
        print(name, json.dumps(found[name], indent=1))
    write_result("auto_judged", "one question that goes to one of two models", found)


if __name__ == "__main__":
    main()
