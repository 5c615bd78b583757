"""Published results of models by kind of work, as `auto`'s prior before any judgement. Data.

The results are shares of right answers. Each kind is represented by one public benchmark. All
results of a row are from one source, for the instruction-tuned model. A benchmark is not a tenant's
traffic, so `quality.PUBLISHED_WEIGHT` limits the weight of the results against the platform's
judgements. A kind without a result in the source has the row's least result.

kind      benchmark
text      MMLU, 5-shot, macro average
code      HumanEval, 0-shot, pass@1
maths     GSM8K, 8-shot with reasoning
foreign   MGSM, 0-shot with reasoning
tools     BFCL, 0-shot (of the 3.1 models its first version, of the 3.2 models V2)
"""

from collections.abc import Mapping
from typing import NamedTuple


class PublishedRow(NamedTuple):
    """Results of one model, as its authors publish them.

    Attributes:
        source: Document with the figures.
        scores: Scores from 0 to 1, by kind in lower case.
    """

    source: str
    scores: Mapping[str, float]


_KINDS = ("text", "code", "maths", "foreign", "tools")
_CARD = "github.com/meta-llama/llama-models models/llama3_{}/MODEL_CARD.md"


def _row(version: int, *scores: float | None) -> PublishedRow:
    least = min(it for it in scores if it is not None)
    known = [(least if it is None else it) / 100 for it in scores]
    return PublishedRow(_CARD.format(version), dict(zip(_KINDS, known, strict=True)))


ROWS: Mapping[str, PublishedRow] = {
    "llama-3.2-1b-instruct": _row(2, 49.3, None, 44.4, 24.5, 25.7),
    "llama-3.2-3b-instruct": _row(2, 63.4, None, 77.7, 58.2, 67.0),
    "llama-3.1-8b-instruct": _row(1, 69.4, 72.6, 84.5, 68.9, 76.1),
    "llama-3.1-70b-instruct": _row(1, 83.6, 80.5, 95.1, 86.9, 84.8),
    "llama-3.1-405b-instruct": _row(1, 87.3, 89.0, 96.8, 91.6, 88.5),
}
PUBLISHED: Mapping[str, Mapping[str, float]] = {name: row.scores for name, row in ROWS.items()}
