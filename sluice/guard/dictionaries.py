"""Words of a dictionary as states of an automaton, by ranges of a sorted list. Pure.

A tree of 20,000 words would need 30 MB in Python, while a sorted list needs little more than the
words' characters.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import NamedTuple

from sluice.guard.characters import folded, folded_text, lookalike

_BLANKS = re.compile(r"\s+")
_LAST = chr(0x10FFFF)


class Spelt(NamedTuple):
    """A place within words, as the range of sorted words that begin with the characters so far.

    Attributes:
        spells: Place of the automaton at which the words begin.
        first: Index of the first word of the range.
        last: Index behind the last word of the range.
        characters: Number of characters read.
    """

    spells: int
    first: int
    last: int
    characters: int


def _one_blank(word: str) -> str:
    return _BLANKS.sub(" ", word)


class Dictionary:
    """The words of one rule."""

    __slots__ = ("_form", "words")

    def __init__(self, words: Collection[str], *, ignores_case: bool) -> None:
        """Merge words that are compared as equal, and sort the words."""
        self._form: Callable[[str], str] = folded if ignores_case else lookalike
        forms = {_one_blank(folded_text(word, self._form)) for word in words}
        self.words = sorted(forms - {""})

    def next(self, at: Spelt, character: str) -> Spelt | None:
        """Return the place behind a character, or None if no word of the range continues with it.

        White space of any kind and length within a word counts as one blank, so that a line break
        cannot hide a word.
        """
        words, place = self.words, at.characters
        form = " " if character.isspace() else self._form(character)
        read = words[at.first][:place]
        if form == " " and read.endswith(" "):
            first = at.first + self.is_whole(at)  # skips a word that ends before this blank
            return at._replace(first=first) if first < at.last else None
        first = bisect_left(words, read + form, at.first, at.last)
        if first >= at.last or words[first][place : place + 1] != form:
            return None
        # This text sorts behind all words of the new range.
        last = bisect_left(words, read + form + _LAST, first, at.last)
        return Spelt(at.spells, first, last, place + 1)

    def is_whole(self, at: Spelt) -> bool:
        """Return whether the characters read so far are a complete word."""
        return len(self.words[at.first]) == at.characters

    def is_open(self, at: Spelt) -> bool:
        """Return whether a longer word begins with the characters read so far."""
        return len(self.words[at.last - 1]) > at.characters
