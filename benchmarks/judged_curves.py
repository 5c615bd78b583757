"""Computes curves of cost and accuracy of a router between a strong and a weak model.

A router gives each question a score, and sends the questions with the highest scores to the strong
model. A point of the curve is one share of questions that the strong model answers (strong calls).
Questions of equal score are ordered at random. So a router without information has the curve of a
random choice. The module does no I/O.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Shares of strong calls at the points of a curve, as in RouteLLM's evaluation.
SHARES = np.linspace(0.0, 1.0, 11)
_BINS = 10


@dataclass(frozen=True, slots=True)
class Judged:
    """Judgements and token prices of both models, in the order of the questions.

    Attributes:
        weak: 1.0 where the weak model's answer is right.
        strong: 1.0 where the strong model's answer is right.
        weak_price: Price of the weak model's tokens.
        strong_price: Price of the strong model's tokens.
    """

    weak: Floats
    strong: Floats
    weak_price: Floats
    strong_price: Floats

    def at(self, rows: npt.NDArray[np.int64]) -> "Judged":
        """Return the questions with these indices."""
        return Judged(
            self.weak[rows], self.strong[rows], self.weak_price[rows], self.strong_price[rows]
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy and cost by share of strong calls, at `SHARES`.

    Attributes:
        accuracy: Share of right answers.
        cost: Cost as a share of the cost of strong calls only.
    """

    accuracy: Floats
    cost: Floats

    def share_at(self, accuracy: float) -> float:
        """Return the least share of strong calls with this accuracy, or 1 if none has it."""
        reached = np.flatnonzero(self.accuracy >= accuracy)
        if not len(reached):
            return 1.0
        last = int(reached[0])
        if last == 0:
            return 0.0
        low, high = self.accuracy[last - 1], self.accuracy[last]
        part = (accuracy - low) / (high - low)
        return float(SHARES[last - 1] + part * (SHARES[last] - SHARES[last - 1]))

    def cost_at(self, accuracy: float) -> float:
        """Return the cost at the least share of strong calls with this accuracy."""
        return float(np.interp(self.share_at(accuracy), SHARES, self.cost))

    @property
    def recovered(self) -> float:
        """Mean share of the models' accuracy gap that the router closes (RouteLLM's APGR)."""
        gap = self.accuracy[-1] - self.accuracy[0]
        middle = (self.accuracy[1:] + self.accuracy[:-1]) / 2
        return float((middle.mean() - self.accuracy[0]) / gap) if gap else 0.5


def curve_of(scores: Floats, judged: Judged) -> Curve:
    """Return the curve of a router that sends the highest scores to the strong model."""
    count = len(scores)
    order = np.argsort(-scores, kind="stable")
    _, blocks = np.unique(-scores[order], return_inverse=True)
    sizes = np.bincount(blocks)

    def summed(gains: Floats) -> Floats:
        means = np.bincount(blocks, weights=gains[order]) / sizes
        return np.concatenate([[0.0], np.cumsum(means[blocks])])

    calls = np.arange(count + 1) / count
    right = judged.weak.sum() + summed(judged.strong - judged.weak)
    cost = judged.weak_price.sum() + summed(judged.strong_price - judged.weak_price)
    return Curve(
        accuracy=np.interp(SHARES, calls, right / count),
        cost=np.interp(SHARES, calls, cost / judged.strong_price.sum()),
    )


def calibration_error(predicted: Floats, right: Floats) -> float:
    """Return the expected calibration error: mean of |prediction - share of right| over bins."""
    bins = np.minimum((predicted * _BINS).astype(np.int64), _BINS - 1)
    gaps = np.bincount(bins, weights=predicted - right, minlength=_BINS)
    return float(np.abs(gaps).sum() / len(predicted))


def error_by_chance(predicted: Floats, random: np.random.Generator, draws: int = 200) -> float:
    """Return the mean calibration error of answers drawn with the predicted probabilities."""
    errors = [
        calibration_error(predicted, (random.random(len(predicted)) < predicted).astype(np.float64))
        for _ in range(draws)
    ]
    return float(np.mean(errors))
