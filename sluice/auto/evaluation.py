"""Estimates the results of a new quality table from logged choices and judgements. Pure.

Each logged turn lists the models that could be chosen, with their expected costs and probabilities.
A judged answer is evidence only for the model that answered. So a judgement is weighted by the
ratio of that model's probabilities under the new table and in the log (inverse propensity). In a
second estimate, judgements correct the prediction of a reward model (doubly robust). See
docs/auto.md.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sluice.auto.choice import propensities
from sluice.auto.quality import QualityCell, QualityTable

# Weight of the reward model's prior mean, as a number of judgements.
_SMOOTHING = 2.0
_Z95 = 1.96


@dataclass(frozen=True, slots=True)
class LoggedOption:
    """A model that could be chosen for a logged turn, with fields of `choice.AutoOption`."""

    name: str
    release: str
    running: float
    propensity: float


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """A logged choice.

    Attributes:
        cluster: Cluster of the conversation.
        model: The model that answered.
        options: The models that could be chosen, each with a probability above 0.
        good: Judgement of the answer, 0 to 1, or None if the answer was not judged.
    """

    cluster: int
    model: str
    options: Sequence[LoggedOption]
    good: float | None = None

    @property
    def chance(self) -> float:
        """Probability with which the answering model was chosen, or 0 if it was not an option."""
        return sum(it.propensity for it in self.options if it.name == self.model)

    @property
    def is_open(self) -> bool:
        """Whether several models could be chosen. A kept model or a pin leaves no choice."""
        return len(self.options) > 1 and self.chance > 0


@dataclass(frozen=True, slots=True)
class PolicyEstimate:
    """An estimate of the share of good answers, with its standard error.

    Attributes:
        mean: Estimated share of good answers.
        error: Standard error, which is infinite without enough data.
    """

    mean: float
    error: float

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return max(0.0, self.mean - _Z95 * self.error)

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval."""
        return min(1.0, self.mean + _Z95 * self.error)


@dataclass(frozen=True, slots=True)
class PolicyEvaluation:
    """The comparison of a new quality table with the log.

    Attributes:
        turns: Number of logged turns in which several models could be chosen.
        judged: Number of logged turns with a choice and a judgement.
        effective: Effective sample size of the weighted judgements. A small size means little
            evidence.
        logged_good: Share of good answers in the log.
        ips: Share of good answers under the new table, by self-normalised inverse propensity.
        doubly_robust: Share of good answers under the new table, by a reward model corrected with
            inverse propensity.
        logged_cost: Mean cost of a turn in the log, without the cost of bad answers.
        new_cost: Mean cost of a turn under the new table, computed exactly from the log.
        moved: Share of turns for which the new table prefers another model.
    """

    turns: int
    judged: int
    effective: float
    logged_good: PolicyEstimate
    ips: PolicyEstimate
    doubly_robust: PolicyEstimate
    logged_cost: float
    new_cost: float
    moved: float


def evaluate(
    logged: Iterable[LoggedTurn],
    table: QualityTable,
    *,
    quality_min: float,
    miss_price: float,
    explored_share: float,
) -> PolicyEvaluation:
    """Return the estimated results of a new table on logged turns.

    Args:
        logged: Logged turns.
        table: The new table.
        quality_min: The tenant's quality floor.
        miss_price: The tenant's price of a bad answer.
        explored_share: Share of turns that explore at random under the new table.
    """
    turns = [it for it in logged if it.is_open]
    judged = [it for it in turns if it.good is not None]
    rewards = _RewardModel(judged)
    chances = {
        id(it): _new_chances(it, table, quality_min, miss_price, explored_share) for it in turns
    }
    weights = [chances[id(it)].get(it.model, 0.0) / it.chance for it in judged]
    goods = [it.good or 0.0 for it in judged]
    robust = [
        rewards.expected(it.cluster, chances[id(it)])
        + weight * (good - rewards.of(it.cluster, it.model))
        for it, weight, good in zip(judged, weights, goods, strict=True)
    ]
    squares = sum(weight * weight for weight in weights)
    count = max(1, len(turns))
    return PolicyEvaluation(
        turns=len(turns),
        judged=len(judged),
        effective=sum(weights) ** 2 / squares if squares else 0.0,
        logged_good=_plain(goods),
        ips=_normalised(weights, goods),
        doubly_robust=_plain(robust),
        logged_cost=sum(_running(it)[it.model] for it in turns) / count,
        new_cost=sum(_expected_running(it, chances[id(it)]) for it in turns) / count,
        moved=sum(max(chances[id(it)], key=chances[id(it)].__getitem__) != it.model for it in turns)
        / count,
    )


def learned(logged: Iterable[LoggedTurn], releases: Mapping[str, str]) -> list[QualityCell]:
    """Return the cells of a quality table with the sums of all judged answers, in order.

    Args:
        logged: Logged turns, including turns without a choice.
        releases: Release by model, for options without a release.
    """
    sums: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for turn in logged:
        if turn.good is None:
            continue
        own = next((it.release for it in turn.options if it.name == turn.model), "")
        cell = sums[turn.cluster, turn.model, own or releases.get(turn.model, "")]
        cell[0] += turn.good
        cell[1] += 1.0 - turn.good
    return [QualityCell(*place, good, bad) for place, (good, bad) in sorted(sums.items())]


class _RewardModel:
    """Mean judgement by cluster and model, shrunk towards the model's and the overall mean."""

    def __init__(self, judged: Sequence[LoggedTurn]) -> None:
        self._sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._by_model: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        overall = [0.0, 0.0]
        for turn in judged:
            for sums in (self._sums[turn.cluster, turn.model], self._by_model[turn.model], overall):
                sums[0] += turn.good or 0.0
                sums[1] += 1.0
        self._mean = overall[0] / overall[1] if overall[1] else 0.5

    def of(self, cluster: int, model: str) -> float:
        good, count = self._by_model.get(model, (0.0, 0.0))
        mean = (good + _SMOOTHING * self._mean) / (count + _SMOOTHING)
        good, count = self._sums.get((cluster, model), (0.0, 0.0))
        return (good + _SMOOTHING * mean) / (count + _SMOOTHING)

    def expected(self, cluster: int, chances: Mapping[str, float]) -> float:
        return sum(chance * self.of(cluster, name) for name, chance in chances.items())


def _new_chances(
    turn: LoggedTurn,
    table: QualityTable,
    quality_min: float,
    miss_price: float,
    explored_share: float,
) -> dict[str, float]:
    """Return the probability of each model under the new table."""
    qualities = [table.quality(turn.cluster, it.name, it.release) for it in turn.options]
    floor = min(quality_min, max(qualities))
    good = [
        (option, quality)
        for option, quality in zip(turn.options, qualities, strict=True)
        if quality >= floor
    ]
    costs = [option.running + miss_price * (1.0 - quality) for option, quality in good]
    chances = propensities(costs, explored_share)
    return {option.name: chance for (option, _), chance in zip(good, chances, strict=True)}


def _running(turn: LoggedTurn) -> dict[str, float]:
    return {it.name: it.running for it in turn.options}


def _expected_running(turn: LoggedTurn, chances: Mapping[str, float]) -> float:
    running = _running(turn)
    return sum(chance * running[name] for name, chance in chances.items())


def _plain(values: Sequence[float]) -> PolicyEstimate:
    count = len(values)
    if not count:
        return PolicyEstimate(0.0, math.inf)
    mean = sum(values) / count
    if count == 1:
        return PolicyEstimate(mean, math.inf)
    variance = sum((it - mean) ** 2 for it in values) / (count - 1)
    return PolicyEstimate(mean, math.sqrt(variance / count))


def _normalised(weights: Sequence[float], goods: Sequence[float]) -> PolicyEstimate:
    """Return the self-normalised estimate, with its error by the delta method."""
    total = sum(weights)
    if total <= 0:
        return PolicyEstimate(0.0, math.inf)
    mean = sum(w * good for w, good in zip(weights, goods, strict=True)) / total
    squares = sum((w * (good - mean)) ** 2 for w, good in zip(weights, goods, strict=True))
    return PolicyEstimate(mean, math.sqrt(squares) / total if len(weights) > 1 else math.inf)
