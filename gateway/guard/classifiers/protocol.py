"""The protocol of classifiers: texts in, scores out; and checks of their answers. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, cast

CATEGORIES_MAX = 100
NAME_CHARACTERS_MAX = 100


class ClassifierError(Exception):
    """A classifier gave no usable answer; the message gives the reason, and quotes no text."""


class Classifier(Protocol):
    """A judge of texts."""

    async def scores(
        self, texts: Sequence[str], *, timeout_s: float
    ) -> Sequence[Mapping[str, float]]:
        """Return the scores of each text, by category and between 0 and 1.

        Raises:
            ClassifierError: No usable answer has come within `timeout_s`.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


def checked_scores(pairs: Iterable[tuple[object, object]]) -> dict[str, float]:
    """Return the scores of one text; ClassifierError: a value is no score."""
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
    """Return the scores in an answer of OpenAI's moderation form.

    Raises:
        ClassifierError: The answer has another form, or is for another number of texts.
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
        # Categories that a moderation does not judge are null there.
        found.append(checked_scores([it for it in pairs if it[1] is not None]))
    return found


def _field(document: object, name: str) -> object:
    if not isinstance(document, dict):
        raise ClassifierError("the answer is no object")
    return cast("dict[object, object]", document).get(name)
