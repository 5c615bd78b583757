"""Compares characters for the guard. Pure.

Look-alike forms (full width, mathematical alphabets) are compared as their plain character, and
invisible characters are ignored. So neither kind of character can hide a text.
"""

import unicodedata
from collections.abc import Callable
from enum import IntEnum
from functools import lru_cache

# Characters without which a text looks the same. These are the zero-width space, joiners, marks of
# direction, word joiner and its neighbours, soft hyphen, variation selectors, and tags.
UNSEEN = frozenset(
    "\u00ad\u034f\u061c\u180e\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufeff"
) | frozenset(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0000, 0xE0080))))


class Before(IntEnum):
    """The kind of text before a place."""

    NOTHING = 0
    LINE_BREAK = 1
    OTHER = 2
    WORD = 3


def is_word(character: str) -> bool:
    r"""Return whether a character belongs to words, like `\w`."""
    return character.isalnum() or character == "_"


def before(character: str) -> Before:
    """Return the kind of text before the next place, if `character` precedes it."""
    if is_word(character):
        return Before.WORD
    return Before.LINE_BREAK if character == "\n" else Before.OTHER


@lru_cache(maxsize=8192)
def lookalike(character: str) -> str:
    """Return the plain character that a look-alike represents, or else the character itself."""
    form = unicodedata.normalize("NFKC", character)
    return form if len(form) == 1 else character


@lru_cache(maxsize=8192)
def folded(character: str) -> str:
    """Return the form of a character for comparison without case."""
    form = lookalike(character).lower()
    return form if len(form) == 1 else character


def folded_text(text: str, form: Callable[[str], str] = folded) -> str:
    """Return a text with each character in its form, without invisible characters."""
    return "".join([form(it) for it in text if it not in UNSEEN])
