"""The quality of a model's answers in a cluster, as Beta posteriors. Pure.

The prior of a cell is the published result of the model, or an operator's own estimate, weighted
like a number of judgements. Judged answers of the platform itself (by users' ratings, golden
prompts or a judge model) are added to the prior.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice.auto.features import SCHEME, kind_of
from sluice.auto.published import PUBLISHED

# Weight of a published result, as a number of judgements. The result is exact, but for other
# prompts than the tenants' prompts.
PUBLISHED_WEIGHT = 20.0
# Prior mean and weight of a model without a published result or an estimate.
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

    def pseudo(self, cluster: int) -> tuple[float, float]:
        """Return the mean and the weight of the prior for a cluster."""
        scores = PUBLISHED.get(self.published)
        if scores is not None:
            return scores[kind_of(cluster).name.lower()], PUBLISHED_WEIGHT
        return (self.quality, PUBLISHED_WEIGHT) if self.quality else _UNKNOWN


@dataclass(frozen=True, slots=True)
class QualityTable:
    """The judged answers and the priors of all models.

    Attributes:
        scheme: `features.SCHEME` of the features when the cells were counted.
        cells: Cells by cluster and model, one for each release.
        priors: Priors by model.
    """

    scheme: int = SCHEME
    cells: Mapping[tuple[int, str], tuple[QualityCell, ...]] = field(
        default_factory=dict[tuple[int, str], tuple[QualityCell, ...]]
    )
    priors: Mapping[str, QualityPrior] = field(default_factory=dict[str, QualityPrior])

    @property
    def is_of_this_scheme(self) -> bool:
        """Whether the cells belong to this scheme. Otherwise only priors count."""
        return self.scheme == SCHEME

    def quality(self, cluster: int, model: str, release: str) -> float:
        """Return the posterior mean of the probability that an answer is good."""
        mean, weight = self.priors.get(model, QualityPrior()).pseudo(cluster)
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
    for cell in cells:
        place = cell.cluster, cell.model
        grouped[place] = (*grouped.get(place, ()), cell)
    return QualityTable(scheme, grouped, priors)
