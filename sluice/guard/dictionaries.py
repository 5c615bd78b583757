"""Words of a dictionary as states of an automaton: ranges of a sorted list, without a tree. Pure.

A tree of 20,000 words takes 30 MB in Python; a sorted list takes their characters.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import NamedTuple

from sluice.guard.characters import folded, folded_text, seen_as

_BLANKS = re.compile(r"\s+")
_LAST = chr(0x10FFFF)


class Spelt(NamedTuple):
    """A place within words: those of a range of the list begin with what was read.

    Attributes:
        spells: The place where the words began.
        first: Index of the first word.
        last: Index behind the last word.
        characters: Number of characters read.
    """

    spells: int
    first: int
    last: int
    characters: int


def _one_blank(word: str) -> str:
    return _BLANKS.sub(" ", word)


class Dictionary:
    """Words to be found."""

    __slots__ = ("_form", "words")

    def __init__(self, words: Collection[str], *, ignores_case: bool) -> None:
        """Sort; words that are the same in the form that is compared are one."""
        self._form: Callable[[str], str] = folded if ignores_case else seen_as
        forms = {_one_blank(folded_text(word, self._form)) for word in words}
        self.words = sorted(forms - {""})

    def next(self, at: Spelt, character: str) -> Spelt | None:
        """Return the place behind a character; None: no word goes on with it.

        White space of any kind and length within a word is one blank, as where a line is broken.
        """
        words, place = self.words, at.characters
        form = " " if character.isspace() else self._form(character)
        read = words[at.first][:place]
        if form == " " and read.endswith(" "):
            first = at.first + self.is_whole(at)  # a word that ends with the blank has ended
            return at._replace(first=first) if first < at.last else None
        first = bisect_left(words, read + form, at.first, at.last)
        if first >= at.last or words[first][place : place + 1] != form:
            return None
        # No text that goes on with the character stands behind this one, whatever follows it.
        last = bisect_left(words, read + form + _LAST, first, at.last)
        return Spelt(at.spells, first, last, place + 1)

    def is_whole(self, at: Spelt) -> bool:
        """Return whether what was read is a word by itself."""
        return len(self.words[at.first]) == at.characters

    def is_open(self, at: Spelt) -> bool:
        """Return whether a longer word begins with what was read."""
        return len(self.words[at.last - 1]) > at.characters
