"""Trains and grades the classifier that ships: one sparse logistic regression per category.

Needs numpy alone. `python -m training.moderation --out FILE` writes the weights (which
`gateway.guard.classifiers.shipped` reads) and beside them an evaluation: on sentences of templates
that were held out, and on sentences that no template made (`moderation_written.py`).
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sluice.guard.features import features
from training.moderation_texts import CATEGORIES, LabelledText, texts
from training.moderation_written import WRITTEN

SENTENCES, HELD_OUT = 14_000, 4_000
_STEPS, _RATE = 160, 0.5
_SHRINK = 4e-5  # L1: most features have no weight, and need no place
_SEEN_MIN = 3  # sentences that have a feature
_DIGITS = 2
THRESHOLD = 0.5


class SparseRows:
    """The features of sentences, by row and by column."""

    def __init__(self, rows: Sequence[Iterable[int]], columns: int) -> None:
        """Take the numbers of each sentence's features; each has one at least."""
        lists = [sorted(it) for it in rows]
        self.flat = np.concatenate([np.array(it, dtype=np.int64) for it in lists])
        self.lengths = np.array([len(it) for it in lists])
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        of_row = np.repeat(np.arange(len(lists)), self.lengths)
        order = np.argsort(self.flat, kind="stable")
        self._rows_by_column = of_row[order]
        self._column_starts = np.searchsorted(self.flat[order], np.arange(columns))
        self._scale = 1 / np.sqrt(self.lengths)

    def scores(self, weights: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Return sums of weights by sentence and category, over the root of its features."""
        return np.add.reduceat(weights[self.flat], self._starts) * self._scale[:, None]

    def gradient(self, errors: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Return the gradient by feature and category."""
        scaled = errors * self._scale[:, None]
        return np.add.reduceat(scaled[self._rows_by_column], self._column_starts)


def train(sentences: Sequence[LabelledText]) -> dict[str, Any]:
    """Return names of categories, biases, and the weights of each feature."""
    found = [features(it.text) for it in sentences]
    counts = Counter(feature for it in found for feature in it)
    names = ["", *sorted(it for it, count in counts.items() if count >= _SEEN_MIN)]
    number = {name: at for at, name in enumerate(names)}
    numbers = [{0} | {number[it] for it in one if it in number} for one in found]
    rows = SparseRows(numbers, len(names))
    wanted = np.array([[it.category == name for name in CATEGORIES] for it in sentences], float)
    weights = np.zeros((len(names), len(CATEGORIES)))
    bias, squares = np.full(len(CATEGORIES), -2.0), np.full_like(weights, 1e-8)
    bias_squares = np.full(len(CATEGORIES), 1e-8)
    for _ in range(_STEPS):
        errors = 1 / (1 + np.exp(-(rows.scores(weights) + bias))) - wanted
        errors /= len(sentences)
        gradient, bias_gradient = rows.gradient(errors), errors.sum(axis=0)
        squares += gradient**2
        bias_squares += bias_gradient**2
        rate = _RATE / np.sqrt(squares)
        weights -= rate * gradient
        weights = np.sign(weights) * np.maximum(np.abs(weights) - rate * _SHRINK, 0)
        bias -= _RATE / np.sqrt(bias_squares) * bias_gradient
    weights[0] = 0
    kept = {
        name: {at: round(float(it), _DIGITS) for at, it in enumerate(row) if abs(it) >= 0.05}
        for name, row in zip(names, weights, strict=True)
    }
    return {
        "categories": list(CATEGORIES),
        "bias": [round(float(it), _DIGITS) for it in bias],
        "weights": {name: it for name, it in kept.items() if it},
    }


def probabilities(model: dict[str, Any], text: str) -> list[float]:
    """Return the score of each category, as `gateway.guard.classifiers.shipped` computes it."""
    found, sums = features(text), [0.0] * len(model["categories"])
    known = [model["weights"][it] for it in found if it in model["weights"]]
    for row in known:
        for at, weight in row.items():
            sums[int(at)] += weight
    scale = 1 / math.sqrt(max(1, len(known)))
    biased = zip(sums, model["bias"], strict=True)
    return [1 / (1 + math.exp(-(it * scale + bias))) for it, bias in biased]


def grade(model: dict[str, Any], sentences: Sequence[LabelledText]) -> dict[str, Any]:
    """Return precision and recall at the threshold, by category and for any of them."""
    found = [probabilities(model, it.text) for it in sentences]
    result: dict[str, Any] = {"sentences": len(sentences)}
    for at, name in enumerate(CATEGORIES):
        said = [one[at] >= THRESHOLD for one in found]
        result[name] = _rates(said, [it.category == name for it in sentences])
    said = [max(one) >= THRESHOLD for one in found]
    result["any"] = _rates(said, [bool(it.category) for it in sentences])
    return result


def _rates(said: Sequence[bool], wanted: Sequence[bool]) -> dict[str, float]:
    both = sum([a and b for a, b in zip(said, wanted, strict=True)])
    found, right = sum(said), sum(wanted)
    return {
        "precision": round(both / max(1, found), 3),
        "recall": round(both / max(1, right), 3),
        "false_positives": round((found - both) / max(1, len(wanted) - right), 3),
        "positives": right,
    }


def main() -> None:
    """Train, grade and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/moderation/weights.json"))
    out: Path = parser.parse_args().out
    model = train(texts(SENTENCES, held_out=False, seed=1))
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(model, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    out.write_text(text + "\n")
    written = [LabelledText(text, category) for text, category in WRITTEN]
    evaluation = {
        "threshold": THRESHOLD,
        "features": len(model["weights"]),
        "held_out_templates": grade(model, texts(HELD_OUT, held_out=True, seed=2)),
        "written_by_hand": grade(model, written),
    }
    out.with_name("evaluation.json").write_text(json.dumps(evaluation, indent=1) + "\n")
    print(json.dumps(evaluation, indent=1), out.stat().st_size)


if __name__ == "__main__":
    main()
