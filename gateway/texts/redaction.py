"""Removes secrets and personal data from texts before they leave the gateway. Pure.

The form of the `patterns` bounds the time of a text to a linear function of its length. Matches are
then checked (Luhn, modulo 97, ranges). A text is searched in overlapping slices, with few matches
at a time, so that the caller can run other tasks in between. Slices do not change the matches.
"""

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.texts.patterns import LOOKS, Class, Look, Span

SLICE_CHARACTERS = 1024
OVERLAP = 768  # Characters by which slices overlap, enough for every pattern.
FINDS_AT_ONCE = 32
_WORDS_AT_ONCE = 16

# Classes that are removed regardless of the tenant's policy.
ALWAYS = frozenset({Class.SECRET, Class.CARD})

_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")
_KEY_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")


@dataclass(frozen=True, slots=True)
class RedactionRules:
    """The redaction rules of one tenant.

    Attributes:
        classes: Classes to remove besides `ALWAYS`.
        words: Words to remove, in lower case, in the form of `lowered`.
    """

    classes: frozenset[Class]
    words: tuple[str, ...] = ()


def rules_of(names: Iterable[str], words: Sequence[str]) -> RedactionRules:
    """Return the rules of a policy, without classes that only a newer control plane has."""
    known = {it.value: it for it in Class}
    classes = frozenset(known[name] for name in names if name in known)
    return RedactionRules(classes, tuple(lowered(word) for word in words if word))


def lowered(text: str) -> str:
    """Return a text in lower case, with the same length and positions."""
    # U+0130 is the only character whose lower-case form has two characters. The lower-case form of
    # the sigma depends on its position, so both forms become one.
    return text.replace("\u0130", "i").lower().replace("\u03c2", "\u03c3")


@dataclass(frozen=True, slots=True)
class Redacted:
    """A text after redaction.

    Attributes:
        text: Text in which each match is replaced by its class in brackets.
        found: Classes of the removed matches, in order.
        is_cut: Whether the text was longer and has been cut.
    """

    text: str
    found: tuple[Class, ...]
    is_cut: bool


def redacted(text: str, rules: RedactionRules, most: int) -> Generator[None, None, Redacted]:
    """Apply the rules, one small step at a time. Text after `most` characters is cut.

    A sensitive number across the cut is removed, too.
    """
    seen = text[: most + OVERLAP]
    scans = [Scan(seen, it) for it in LOOKS if it.kind in rules.classes | ALWAYS]
    keys = yield from _keys(seen)
    written, later = _Written(seen, most), list[_Match]()
    for start in range(0, len(seen), SLICE_CHARACTERS):
        end = start + SLICE_CHARACTERS
        found = later + [_Match(*it, Class.SECRET) for it in keys if start <= it[0] < end]
        for scan in scans:
            yield from _some_at_once(scan.slice(start, end), found)
            yield
        yield from _words(seen, start, rules.words, found)
        found.sort()
        later = [it for it in found if it.start >= end]
        written.add(found[: len(found) - len(later)])
        yield
    written.add(later)
    return written.ended(is_cut=len(text) > most)


def _some_at_once(
    places: Iterable["_Match | None"], found: list["_Match"]
) -> Generator[None, None, None]:
    """Add matches in small steps. A None in `places` is a checked candidate without a match."""
    for number, place in enumerate(places):
        if place is not None:
            found.append(place)
        if number % FINDS_AT_ONCE == FINDS_AT_ONCE - 1:
            yield


class _Match(NamedTuple):
    start: int
    end: int
    kind: Class


class _Written:
    """The output text, in which the class of each match replaces the match."""

    def __init__(self, text: str, most: int) -> None:
        self._text = text
        self._most = most
        self._parts: list[str] = []
        self._kinds: list[Class] = []
        self._at = 0
        self._open: _Match | None = None

    def add(self, places: Iterable[_Match]) -> None:
        """Add matches in order. Overlapping matches are joined under the first match's class."""
        for it in places:
            if self._open is not None and it.start < self._open.end:
                self._open = self._open._replace(end=max(self._open.end, it.end))
            else:
                self._close()
                self._open = it

    def ended(self, *, is_cut: bool) -> Redacted:
        """End the text, and return all of it."""
        self._close()
        self._parts.append(self._text[self._at : self._most])
        return Redacted("".join(self._parts), tuple(self._kinds), is_cut)

    def _close(self) -> None:
        if self._open is not None and self._open.start < self._most:
            self._parts += (self._text[self._at : self._open.start], f"[{self._open.kind}]")
            self._kinds.append(self._open.kind)
            self._at = self._open.end


class Scan:
    """Searches a text for one pattern, slice by slice."""

    def __init__(self, text: str, look: Look) -> None:
        self._text = text
        self._look = look
        self._group = look.group
        self._at = 0  # index up to which the text was searched or matched

    def slice(self, start: int, end: int) -> Iterator[_Match | None]:
        """Yield the matches that begin in a slice, and None for candidates that do not match."""
        text, pattern, group = self._text, self._look.pattern, self._group
        until = min(len(text), end + OVERLAP)
        for match in pattern.finditer(text, max(start, self._at), until):
            begin = match.start()
            if begin >= end:
                break
            if match.end(group) == until < len(text):  # the match may continue after the slice
                match = pattern.match(text, begin) or match  # noqa: PLW2901
            matched = match[group]
            self._at = max(match.end(), begin + 1)
            yield None
            for first, last in self._look.check(matched):
                yield _Match(begin + first, begin + last, self._look.kind)


def _keys(text: str) -> Generator[None, None, list[Span]]:
    """Return private keys in PEM form. A key without an end extends to the end of the text."""
    at, found = 0, list[Span]()
    for start in range(0, len(text), SLICE_CHARACTERS):
        end = start + SLICE_CHARACTERS
        while (begin := _KEY_BEGIN.search(text, max(at, start), end + OVERLAP)) is not None:
            if begin.start() >= end:
                break
            at = yield from _end_of_key(text, begin.end())
            found.append((begin.start(), at))
        yield
    return found


def _end_of_key(text: str, at: int) -> Generator[None, None, int]:
    for start in range(at, len(text), SLICE_CHARACTERS):
        end = _KEY_END.search(text, start, start + SLICE_CHARACTERS + OVERLAP)
        if end is not None:
            return end.end()
        yield
    return len(text)


def _words(
    text: str, start: int, words: Sequence[str], found: list[_Match]
) -> Generator[None, None, None]:
    """Add the matches of the tenant's words that begin in a slice."""
    longest = max(map(len, words), default=0)
    small = lowered(text[start : start + SLICE_CHARACTERS + longest])
    for number, word in enumerate(words):
        yield from _some_at_once(_places(small, word, start), found)
        if number % _WORDS_AT_ONCE == _WORDS_AT_ONCE - 1:
            yield


def _places(small: str, word: str, start: int) -> Iterator[_Match | None]:
    """Yield the matches of a word that begin in a slice. Overlapping matches are joined."""
    until = SLICE_CHARACTERS + len(word) - 1
    at = small.find(word, 0, until)
    first = last = at
    while at >= 0:
        if at >= last:
            if at > first:
                yield _Match(start + first, start + last, Class.WORD)
            first = at
        last = at + len(word)
        yield None
        at = small.find(word, at + 1, until)
    if last > first:
        yield _Match(start + first, start + last, Class.WORD)
