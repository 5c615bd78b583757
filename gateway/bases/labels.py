"""The labels of a base that classifies, and the special tokens around a pair of texts. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tokenizers import Tokenizer

from sluice.base_labels import label_count
from sluice.embeddings import PairedTokens

_MULTI_LABEL = "multi_label_classification"


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a base that classifies.

    Attributes:
        names: Name of each label, in the order of the model's scores.
        are_independent: Whether several labels may fit a text at once.
    """

    names: tuple[str, ...]
    are_independent: bool = False

    def probabilities(self, scores: Sequence[float]) -> list[float]:
        """Return each label's probability. Without independence, the probabilities add up to 1."""
        if self.are_independent or len(self.names) == 1:
            return [sigmoid(it) for it in scores]
        return softmax(scores)


@dataclass(frozen=True, slots=True)
class PairForm:
    """The special tokens around two texts in one row of tokens.

    Attributes:
        before: Tokens before the first text.
        between: Tokens between the two texts.
        behind: Tokens after the second text.
        has_types: Whether the base receives a token's type, which marks tokens of the second text.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]
    has_types: bool

    def joined(self, first: Sequence[int], second: Sequence[int]) -> PairedTokens:
        """Return the ids of both texts and the special tokens around them as one row."""
        head = [*self.before, *first, *self.between]
        return PairedTokens([*head, *second, *self.behind], len(head) if self.has_types else 0)


def read_labels(config: Mapping[str, Any]) -> Labels | None:
    """Return the labels in a base's `config.json`, or None if the base makes embeddings."""
    count = label_count(config)
    if not count:
        return None
    named = cast("dict[str, object]", config.get("id2label") or {})
    names = tuple(str(named.get(str(it), f"LABEL_{it}")) for it in range(count))
    return Labels(names, config.get("problem_type") == _MULTI_LABEL)


def pair_form(tokenizer: Tokenizer) -> PairForm:
    """Return the form of pairs, which is read from the encoding of an example."""
    both = tokenizer.encode("a", "b")
    sides, ids = both.sequence_ids, both.ids
    first = [at for at, side in enumerate(sides) if side == 0]
    second = [at for at, side in enumerate(sides) if side == 1]
    return PairForm(
        tuple(ids[: first[0]]),
        tuple(ids[first[-1] + 1 : second[0]]),
        tuple(ids[second[-1] + 1 :]),
        has_types=both.type_ids[second[0]] == 1,
    )


def sigmoid(score: float) -> float:
    """Map an unbounded score to a probability between 0 and 1."""
    power = math.exp(-abs(score))  # at most 1, so that it cannot overflow
    return 1 / (1 + power) if score >= 0 else power / (1 + power)


def softmax(scores: Sequence[float]) -> list[float]:
    """Map scores to probabilities that add up to 1."""
    most = max(scores)
    powers = [math.exp(it - most) for it in scores]
    total = sum(powers)
    return [it / total for it in powers]
