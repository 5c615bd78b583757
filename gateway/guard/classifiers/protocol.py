"""Defines the interface of classifiers, and checks the scores that they return. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, cast

CATEGORIES_MAX = 100
NAME_CHARACTERS_MAX = 100


class ClassifierError(Exception):
    """A classifier returned no usable answer. The message has the reason but not the text."""


class Classifier(Protocol):
    """A classifier that scores texts by category."""

    async def scores(
        self, texts: Sequence[str], *, timeout_s: float
    ) -> Sequence[Mapping[str, float]]:
        """Return the scores of each text, by category and between 0 and 1.

        Raises:
            ClassifierError: No usable answer arrived within `timeout_s` seconds.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


def checked_scores(pairs: Iterable[tuple[object, object]]) -> dict[str, float]:
    """Return the checked scores of one text, or raise ClassifierError for an invalid score."""
    found = dict[str, float]()
    for name, value in pairs:
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS_MAX:
            raise ClassifierError("a category has no name, or a very long one")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ClassifierError(f"the score of '{name}' is no number")
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise ClassifierError(f"the score of '{name}' is not between 0 and 1")
        found[name] = float(value)
        if len(found) > CATEGORIES_MAX:
            raise ClassifierError(f"there are more than {CATEGORIES_MAX} categories")
    return found


def moderation_scores(document: object, count: int) -> list[dict[str, float]]:
    """Return the scores of texts from an answer in the form of OpenAI's moderation API.

    Raises:
        ClassifierError: The answer has another form or another number of texts.
    """
    results = _field(document, "results")
    if not isinstance(results, list):
        raise ClassifierError("the answer has no list 'results'")
    rows = cast("list[object]", results)
    if len(rows) != count:
        raise ClassifierError(f"the answer is for {len(rows)} texts, not for {count}")
    found = list[dict[str, float]]()
    for row in rows:
        scores = _field(row, "category_scores")
        if not isinstance(scores, dict):
            raise ClassifierError("a result has no object 'category_scores'")
        pairs = cast("dict[object, object]", scores).items()
        # A category without a judgement has the score null.
        found.append(checked_scores([it for it in pairs if it[1] is not None]))
    return found


def _field(document: object, name: str) -> object:
    if not isinstance(document, dict):
        raise ClassifierError("the answer is no object")
    return cast("dict[object, object]", document).get(name)
