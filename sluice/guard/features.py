"""The features of a text that the shipped classifier looks at. Pure; the same in training."""

import itertools
import re

from sluice.guard.characters import folded_text

CHARACTERS_MAX = 8_000  # of one text; longer ones are given in pieces
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_GRAM = 4


def features(text: str) -> set[str]:
    """Return words, pairs of words, and four characters in a row of each word with its edges."""
    words = _WORD.findall(folded_text(text[:CHARACTERS_MAX]))
    found = set(words)
    found.update([f"{a} {b}" for a, b in itertools.pairwise(words)])
    for word in set(words):
        edged = f"<{word}>"
        found.update([edged[at : at + _GRAM] + "~" for at in range(len(edged) - _GRAM + 1)])
    return found
