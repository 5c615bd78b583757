"""The shipped classifier, a sparse logistic regression over words and parts of words.

`training/moderation.py` trains it, `shipped.json` has its weights, and the page on guarding reports
its accuracy. A sentence needs about 0.1 ms in the gateway's own process.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources

import orjson

from sluice.guard.features import features

# Number of scored characters after which the event loop may run other tasks before the next text.
_PAUSE_CHARACTERS = 1_000


class ShippedWeights:
    """The weights of the classifier by feature.

    Attributes:
        categories: Names of the categories, in the order of the weights.
    """

    def __init__(self, content: bytes) -> None:
        """Parse the file that the training has written."""
        document = orjson.loads(content)
        self.categories: tuple[str, ...] = tuple(document["categories"])
        self._bias: list[float] = document["bias"]
        self._weights: dict[str, tuple[tuple[int, float], ...]] = {
            name: tuple([(int(at), weight) for at, weight in row.items()])
            for name, row in document["weights"].items()
        }

    def scores(self, text: str) -> dict[str, float]:
        """Return the score of each category, for the first 8,000 characters of a text."""
        weights, sums, known = self._weights, [0.0] * len(self.categories), 0
        for it in features(text):
            row = weights.get(it)
            if row is not None:
                known += 1
                for at, weight in row:
                    sums[at] += weight
        scale = 1 / math.sqrt(max(1, known))
        logits = [it * scale + bias for it, bias in zip(sums, self._bias, strict=True)]
        found = [1 / (1 + math.exp(-it)) for it in logits]
        return dict(zip(self.categories, found, strict=True))


@cache
def shipped_weights() -> ShippedWeights:
    """Return the weights that this release includes."""
    return ShippedWeights(
        resources.files("gateway.guard.classifiers").joinpath("shipped.json").read_bytes()
    )


class ShippedClassifier:
    """Scores texts in this process, and yields to the event loop between texts."""

    async def scores(
        self, texts: Sequence[str], *, timeout_s: float
    ) -> Sequence[Mapping[str, float]]:
        """Return scores as `Classifier` describes, without any network request."""
        del timeout_s
        weights, found, characters = shipped_weights(), list[Mapping[str, float]](), 0
        for text in texts:
            if characters > _PAUSE_CHARACTERS:
                await asyncio.sleep(0)
                characters = 0
            found.append(weights.scores(text))
            characters += len(text)
        return found

    async def close(self) -> None:
        """Do nothing, because no connection is open."""
