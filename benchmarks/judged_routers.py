"""Routers between two models: `auto` with the product's code, kNN, random choice and oracle.

`auto` and kNN learn from the same judged questions. For `auto`, the function `learned` builds the
table, and `choose` selects the model. The router kNN predicts the mean judgement of the nearest
judged questions, by the product's features or by words. The number of neighbours is the one with
the least log loss in leave-one-out predictions of the judged questions.
"""

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.judged_curves import Floats, Judged
from sluice.auto.choice import (
    AutoCandidate,
    AutoRules,
    AutoTurn,
    PoolOutlook,
    choose,
    expected_running,
)
from sluice.auto.evaluation import LoggedOption, LoggedTurn, learned
from sluice.auto.features import PromptFeatures, features_of
from sluice.auto.quality import QualityPrior, QualityTable, table_of

WEAK, STRONG = "mixtral-8x7b-instruct-v0.1", "gpt-4-1106-preview"
# Prices of a million tokens of prompt and output, as RouteLLM states them, in dollars.
PRICES = {WEAK: 0.24, STRONG: 24.7}
CANDIDATES = tuple(AutoCandidate(name, "1", price, price, price) for name, price in PRICES.items())
POOLS = {name: PoolOutlook(is_served=True, replicas=1) for name in PRICES}
NEIGHBOURS = (5, 10, 20, 40, 80)
_HASHED = 1024  # dimensions of hashed words
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class JudgedQuestion:
    """A question with the judgements of both models' answers.

    Attributes:
        text: The prompt.
        weak: Whether the weak model's answer is right.
        strong: Whether the strong model's answer is right.
    """

    text: str
    weak: bool
    strong: bool


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predictions of a router for unseen questions.

    Attributes:
        scores: Higher scores go to the strong model first.
        weak: Predicted quality of the weak model.
        strong: Predicted quality of the strong model.
    """

    scores: Floats
    weak: Floats
    strong: Floats


def judged_of(questions: Sequence[JudgedQuestion]) -> Judged:
    """Return judgements and token prices of both models."""
    turns = [AutoTurn(features_of([it.text])) for it in questions]
    weak, strong = (
        np.array([expected_running(candidate, it, POOLS[candidate.name], 0.0)[0] for it in turns])
        for candidate in CANDIDATES
    )
    return Judged(
        np.array([float(it.weak) for it in questions]),
        np.array([float(it.strong) for it in questions]),
        weak,
        strong,
    )


def table_from(
    questions: Sequence[JudgedQuestion], priors: Mapping[str, QualityPrior]
) -> QualityTable:
    """Return the table that the product learns from questions whose two answers are both judged."""
    turns = [
        LoggedTurn(features_of([it.text]).cluster, name, (LoggedOption(name, "1", 0.0, 1.0),), good)
        for it in questions
        for name, good in ((WEAK, float(it.weak)), (STRONG, float(it.strong)))
    ]
    return table_of(learned(turns, {}), priors)


def by_auto(questions: Sequence[JudgedQuestion], table: QualityTable) -> Predicted:
    """Return predictions of `auto`. Score: 1 / the least price of a miss that selects strong."""
    weak, strong, scores = list[float](), list[float](), list[float]()
    for it in questions:
        turn = AutoTurn(features_of([it.text]))
        found = choose(CANDIDATES, turn, table, POOLS, _rules(0.0))
        options = {one.name: one for one in (found.chosen, *found.alternatives)}
        gain = options[STRONG].quality - options[WEAK].quality
        score = gain / (options[STRONG].running - options[WEAK].running)
        if gain > 0:
            _check_choice(turn, table, 1 / score)
        weak.append(options[WEAK].quality)
        strong.append(options[STRONG].quality)
        scores.append(score)
    return Predicted(np.array(scores), np.array(weak), np.array(strong))


def by_neighbours(known: Judged, near: Floats, near_known: Floats, prices: Judged) -> Predicted:
    """Return the predictions of kNN.

    Args:
        known: The judged questions.
        near: Similarity of the unseen questions (rows) to the judged ones (columns).
        near_known: Similarity of the judged questions to each other.
        prices: The unseen questions, of which only the prices are used.
    """
    np.fill_diagonal(near_known, -np.inf)
    count = min(NEIGHBOURS, key=lambda it: _log_loss(_means(near_known, known, it), known))
    weak, strong = _means(near, known, count)
    return Predicted((strong - weak) / (prices.strong_price - prices.weak_price), weak, strong)


def word_vectors(texts: Sequence[str], known: int) -> Floats:
    """Return hashed words and word pairs, weighted by their rarity in the first `known` texts."""
    counts = np.zeros((len(texts), _HASHED))
    for row, text in enumerate(texts):
        words = _WORD.findall(text.lower())
        for word in (*words, *map(" ".join, pairwise(words))):
            counts[row, zlib.crc32(word.encode()) % _HASHED] += 1
    rarity = np.log((1 + known) / (1 + (counts[:known] > 0).sum(axis=0)))
    return _unit(np.log1p(counts) * rarity)


def feature_vectors(texts: Sequence[str], known: int) -> Floats:
    """Return the product's features of texts, in standard deviations of the first `known` texts."""
    rows = np.array([_numbers(features_of([text])) for text in texts])
    spread = rows[:known].std(axis=0)
    return (rows - rows[:known].mean(axis=0)) / np.where(spread > 0, spread, 1.0)


def nearness(rows: Floats, columns: Floats) -> Floats:
    """Return the negative squared distance of each row to each column."""
    squares = (rows**2).sum(axis=1)[:, None] + (columns**2).sum(axis=1)[None, :]
    return 2 * rows @ columns.T - squares


def _numbers(features: PromptFeatures) -> tuple[float, ...]:
    return (
        math.log1p(features.tokens),
        features.code,
        features.maths,
        float(features.is_foreign),
    )


def _unit(rows: Floats) -> Floats:
    lengths = np.sqrt((rows**2).sum(axis=1, keepdims=True))
    return rows / np.where(lengths > 0, lengths, 1.0)


def _means(near: Floats, known: Judged, count: int) -> tuple[Floats, Floats]:
    """Return the mean judgements of the `count` nearest judged questions."""
    count = min(count, near.shape[1] - 1)
    nearest = np.argpartition(-near, count, axis=1)[:, :count]
    return known.weak[nearest].mean(axis=1), known.strong[nearest].mean(axis=1)


def _log_loss(predicted: tuple[Floats, Floats], known: Judged) -> float:
    losses = 0.0
    for quality, right in zip(predicted, (known.weak, known.strong), strict=True):
        held = np.clip(quality, 0.01, 0.99)
        losses -= float(np.mean(right * np.log(held) + (1 - right) * np.log(1 - held)))
    return losses


def _rules(miss_price: float) -> AutoRules:
    return AutoRules(miss_price=miss_price, explored_share=0.0)


def _check_choice(turn: AutoTurn, table: QualityTable, miss_price: float) -> None:
    """Assert that the product selects the strong model from this price of a miss on."""
    for factor, name in ((0.999, WEAK), (1.001, STRONG)):
        found = choose(CANDIDATES, turn, table, POOLS, _rules(miss_price * factor))
        assert found.model == name, (found, miss_price)
