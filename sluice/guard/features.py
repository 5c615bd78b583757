"""Extracts the features of a text for the shipped classifier, in training and serving. Pure."""

import itertools
import re

from sluice.guard.characters import folded_text

CHARACTERS_MAX = 8_000  # most characters per text, so callers split longer texts
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_GRAM = 4


def features(text: str) -> set[str]:
    """Return the words, the pairs of neighbours, and each word's runs of four characters.

    The runs include the edges of a word, as `<` and `>`.
    """
    words = _WORD.findall(folded_text(text[:CHARACTERS_MAX]))
    found = set(words)
    found.update([f"{a} {b}" for a, b in itertools.pairwise(words)])
    for word in set(words):
        edged = f"<{word}>"
        found.update([edged[at : at + _GRAM] + "~" for at in range(len(edged) - _GRAM + 1)])
    return found
