"""The quality of a model's answers in a cluster, as Beta posteriors. Pure.

The prior of a cell is the published result of the model, or an operator's own estimate, weighted
like a number of judgements. Without either, the prior is the mean of the model's judged answers in
all clusters. Judged answers of the platform itself (by users' ratings, golden prompts or a judge
model) are added to the prior.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.auto.features import SCHEME, kind_of
from sluice.auto.published import PUBLISHED

# Weight of a published result, as a number of judgements. The result is exact, but for other
# prompts than the tenants' prompts.
PUBLISHED_WEIGHT = 20.0
# Weight of a model's mean over all clusters, which is the prior of a model without a published
# result or an estimate. Chosen by cross-validation on judgements of two models in public benchmarks
# (`benchmarks/micro/auto_judged.py`).
_MEAN_WEIGHT = 5.0
# Prior mean and weight of a model without a published result, an estimate or a judgement.
_UNKNOWN = (0.5, 2.0)
# Most counted judgements of another release, because a new release mostly resembles the last.
_OTHER_RELEASE_WEIGHT = 10.0


class QualityCell(NamedTuple):
    """Judged answers of one model in one cluster.

    Attributes:
        cluster: Number of the cluster, as in `PromptFeatures.cluster`.
        model: Name of the model.
        release: Release that answered.
        good: Answers that were judged good.
        bad: Answers that were judged bad.
    """

    cluster: int
    model: str
    release: str
    good: float
    bad: float


@dataclass(frozen=True, slots=True)
class QualityPrior:
    """The prior quality of a model, before its answers are judged here.

    Attributes:
        published: Name of the model's row in the published results, or empty without a row.
        quality: Operator's estimate for all prompts, 0 to 1, for models without published results.
            0 means no estimate.
    """

    published: str = ""
    quality: float = 0.0

    def pseudo(self, cluster: int) -> tuple[float, float] | None:
        """Return mean and weight of the prior for a cluster, or None if there is no prior."""
        scores = PUBLISHED.get(self.published)
        if scores is not None:
            return scores[kind_of(cluster).name.lower()], PUBLISHED_WEIGHT
        return (self.quality, PUBLISHED_WEIGHT) if self.quality else None


_NO_PRIOR = QualityPrior()


@dataclass(frozen=True, slots=True)
class QualityTable:
    """The judged answers and the priors of all models.

    Attributes:
        scheme: `features.SCHEME` of the features when the cells were counted.
        cells: Cells by cluster and model, one for each release.
        priors: Priors by model.
        means: Mean and weight of each model's judged answers in all clusters.
    """

    scheme: int = SCHEME
    cells: Mapping[tuple[int, str], tuple[QualityCell, ...]] = field(
        default_factory=dict[tuple[int, str], tuple[QualityCell, ...]]
    )
    priors: Mapping[str, QualityPrior] = field(default_factory=dict[str, QualityPrior])
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    @property
    def is_of_this_scheme(self) -> bool:
        """Whether the cells belong to this scheme. Otherwise only priors count."""
        return self.scheme == SCHEME

    def quality(self, cluster: int, model: str, release: str) -> float:
        """Return the posterior mean of the probability that an answer is good."""
        pseudo = self.priors.get(model, _NO_PRIOR).pseudo(cluster)
        if pseudo is None:
            pseudo = self.means.get(model, _UNKNOWN) if self.is_of_this_scheme else _UNKNOWN
        mean, weight = pseudo
        good, bad = mean * weight, (1.0 - mean) * weight
        for cell in self.cells.get((cluster, model), ()) if self.is_of_this_scheme else ():
            share = 1.0
            if cell.release != release:
                share = min(1.0, _OTHER_RELEASE_WEIGHT / max(cell.good + cell.bad, 1e-9))
            good += cell.good * share
            bad += cell.bad * share
        return good / (good + bad)


def table_of(
    cells: Iterable[QualityCell], priors: Mapping[str, QualityPrior], scheme: int = SCHEME
) -> QualityTable:
    """Return the table of cells, which may be in any order."""
    grouped: dict[tuple[int, str], tuple[QualityCell, ...]] = {}
    sums: dict[str, tuple[float, float]] = {}
    for cell in cells:
        place = cell.cluster, cell.model
        grouped[place] = (*grouped.get(place, ()), cell)
        mean, weight = _UNKNOWN
        good, bad = sums.get(cell.model, (mean * weight, (1.0 - mean) * weight))
        sums[cell.model] = good + cell.good, bad + cell.bad
    means = {model: (good / (good + bad), _MEAN_WEIGHT) for model, (good, bad) in sums.items()}
    return QualityTable(scheme, grouped, priors, means)
