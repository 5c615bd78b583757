"""What is taken out of texts before they leave the gateway: secrets, and what names persons. Pure.

Each pattern is bounded, or begins at one place of a run only and never gives back what it took, so
that no text takes more than linear time; what a pattern finds is then checked (Luhn, modulo 97,
ranges). A text is looked at in slices with some overlap, so that whoever asks can let others run in
between; slices change nothing of what is found.
"""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from typing import NamedTuple

SLICE_CHARACTERS = 1024
_OVERLAP = 768  # no pattern needs more to see that it matches
_WORDS_AT_ONCE = 16
_CARD_DIGITS = range(13, 20)
_IBAN_CHARACTERS = range(15, 35)
_PHONE_DIGITS = range(7, 16)
_TRUNK_DIGITS = range(9, 16)  # fewer are often dates


class Class(StrEnum):
    """What is looked for; also what stands in its place, in brackets."""

    EMAIL = "email"
    PHONE = "phone"
    CARD = "card"
    IBAN = "iban"
    IP = "ip"
    SECRET = "secret"  # noqa: S105 - the name of a class
    WORD = "word"


# Taken out whatever the tenant says.
ALWAYS = frozenset({Class.SECRET, Class.CARD})

Span = tuple[int, int]
_Check = Callable[[str], Iterable[Span]]


def _whole(found: str) -> Iterator[Span]:
    yield 0, len(found)


def _digits(text: str) -> str:
    return "".join(character for character in text if character.isdecimal())


def is_luhn(digits: str) -> bool:
    """Return whether the last of some decimal digits is the right check digit of a card."""
    values = [int(digit) for digit in reversed(digits)]
    doubled = (value * 2 - 9 * (value > 4) for value in values[1::2])
    return (sum(values[::2]) + sum(doubled)) % 10 == 0


def is_iban(text: str) -> bool:
    """Return whether letters and digits are an account number with the right check digits."""
    moved = text[4:] + text[:4]
    return int("".join(str(int(character, 36)) for character in moved)) % 97 == 1


def _cards(found: str) -> Iterator[Span]:
    """Yield groups of digits that are a card's number, alone or with their neighbours."""
    groups = [(it.start(), it.end()) for it in re.finditer(r"\d+", found)]
    taken = 0
    for first, (start, _) in enumerate(groups):
        if start < taken or int(found[start]) not in range(2, 7):
            continue
        digits, longest = "", 0
        for begin, end in groups[first:]:
            digits += found[begin:end]
            if len(digits) >= _CARD_DIGITS.stop:
                break
            if len(digits) in _CARD_DIGITS and is_luhn(digits):
                longest = end
        if longest:
            taken = longest
            yield start, longest


def _ibans(found: str) -> Iterator[Span]:
    """Yield the longest beginning that has the right check digits: words may stand behind it."""
    places = [index for index, character in enumerate(found) if character.isalnum()]
    for count in range(min(len(places), _IBAN_CHARACTERS.stop - 1), _IBAN_CHARACTERS.start - 1, -1):
        end = places[count - 1] + 1
        if end == len(found) or not found[end].isalnum():
            text = "".join(found[place] for place in places[:count])
            if text.isascii() and is_iban(text):
                yield 0, end
                return


def _phones(found: str) -> Iterator[Span]:
    if len(_digits(found)) in _PHONE_DIGITS:
        yield 0, len(found)


def _trunk_phones(found: str) -> Iterator[Span]:
    if len(_digits(found)) in _TRUNK_DIGITS:
        yield 0, len(found)


def _ips(found: str) -> Iterator[Span]:
    text = found.rstrip(":") if found.endswith(":") and not found.endswith("::") else found
    try:
        ip_address(text)
    except ValueError:
        return
    if text != "::":
        yield 0, len(text)


_SEPARATOR = "[ \\u00a0\\u202f.-]"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_PREFIXED = (
    r"(?:(?:sk|pk|rk)[-_][\w-]{16,}+|gh[pousr]_\w{20,}+|github_pat_\w{20,}+|glpat-[\w-]{16,}+"
    r"|xox[abeoprs]-[\w-]{10,}+|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}+|hf_\w{20,}+"
    r"|npm_\w{30,}+|ya29\.[\w-]{16,}+|SG\.[\w-]{16,}+(?:\.[\w-]++)?|eyJ[\w-]{14,}+(?:\.[\w-]*+){0,4})"
)
_NAMED = (
    r"(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|auth[_-]?token|token|passw(?:or)?d|pwd)"
    r"[\"']?\s{0,4}+(?::=?|=>?)\s{0,4}+[\"']?[^\s\"',;]{8,}+"
)
_PATTERNS: tuple[tuple[Class, str, _Check], ...] = (
    (Class.SECRET, rf"(?<![A-Za-z0-9]){_PREFIXED}", _whole),
    (Class.SECRET, r"(?i:(?<!\w)(?:bearer|basic)\s{1,4}+[\w.~+/=-]{12,}+)", _whole),
    (Class.SECRET, rf"(?i:(?<![A-Za-z0-9]){_NAMED})", _whole),
    (Class.SECRET, r"(?<=://)[^\s/:@]{0,128}+:[^\s/@]{1,256}+(?=@)", _whole),
    (
        Class.EMAIL,
        r"(?<![\w.%+-])[\w.%+-]{1,200}+@(?:[\w-]{1,63}+\.){1,8}[^\W\d_]{2,24}+",
        _whole,
    ),
    (Class.IBAN, r"(?<![A-Za-z0-9])[A-Za-z]{2}\d\d(?:[ -]?[A-Za-z0-9]){11,60}+", _ibans),
    (Class.CARD, rf"(?<!\d)\d(?:{_SEPARATOR}?\d){{12,255}}+", _cards),
    (Class.IP, rf"(?<![\w.])(?:{_BYTE}\.){{3}}{_BYTE}(?![\w]|\.\d)", _whole),
    (
        Class.IP,
        r"(?<![\w:])(?=[0-9A-Fa-f]{0,4}:)[0-9A-Fa-f:]{2,39}+(?:(?<=:)(?:\d{1,3}\.){3}\d{1,3})?"
        r"(?!\w)",
        _ips,
    ),
    (Class.PHONE, r"(?<![\w+])(?:\+|00)\d(?:[ ().\u00a0/-]{0,3}+\d){6,14}+(?!\d)", _phones),
    (Class.PHONE, r"(?<![\w+])\(?\d{3}\)?[ .-]{1,2}\d{3}[ .-]\d{4}(?!\w)", _phones),
    (Class.PHONE, r"(?<![\w+])\(?0\d{1,5}\)?[ /-]{1,2}\d(?:[ /-]?\d){4,11}+(?!\d)", _trunk_phones),
)
_COMPILED = tuple((kind, re.compile(pattern), check) for kind, pattern, check in _PATTERNS)
_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")
_KEY_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----")


@dataclass(frozen=True, slots=True)
class Rules:
    """What to take out of the texts of one tenant.

    Attributes:
        classes: Without `ALWAYS`, which are taken out anyway.
        words: In lower case, as `lowered` makes it.
    """

    classes: frozenset[Class]
    words: tuple[str, ...] = ()


def rules_of(names: Iterable[str], words: Sequence[str]) -> Rules:
    """Return the rules of a policy; classes that a newer control plane knows are left out."""
    known = {it.value: it for it in Class}
    classes = frozenset(known[name] for name in names if name in known)
    return Rules(classes, tuple(lowered(word) for word in words if word))


def lowered(text: str) -> str:
    """Return a text in lower case, each character in its place."""
    lower = text.lower()
    if len(lower) == len(text):
        return lower
    pairs = ((character, character.lower()) for character in text)
    return "".join(small if len(small) == 1 else character for character, small in pairs)


@dataclass(frozen=True, slots=True)
class Redacted:
    """A text without what was to be taken out.

    Attributes:
        text: With the class in brackets in each place.
        found: What was taken out, in order.
        is_cut: The text was longer, and ends where it was cut.
    """

    text: str
    found: tuple[Class, ...]
    is_cut: bool


def redacted(text: str, rules: Rules, most: int) -> Generator[None, None, Redacted]:
    """Take out what the rules say, a small step at a time; what is behind `most` characters is cut.

    A number that lies across the cut is taken out, too.
    """
    seen = text[: most + _OVERLAP]
    small = lowered(seen) if rules.words else ""
    classes = rules.classes | ALWAYS
    patterns = [it for it in _COMPILED if it[0] in classes]
    keys = list(_keys(seen))
    yield
    written, later = _Written(seen, most), list[_Found]()
    for start in range(0, len(seen), SLICE_CHARACTERS):
        end = start + SLICE_CHARACTERS
        found = later + [_Found(*it, Class.SECRET) for it in keys if start <= it[0] < end]
        for pattern in patterns:
            found += _of_slice(seen, start, *pattern)
            yield
        for number, word in enumerate(rules.words):
            found += _places(small, word, start)
            if number % _WORDS_AT_ONCE == _WORDS_AT_ONCE - 1:
                yield
        found.sort()
        later = [it for it in found if it.start >= end]
        written.add(found[: len(found) - len(later)])
        yield
    written.add(later)
    return written.ended(is_cut=len(text) > most)


class _Found(NamedTuple):
    start: int
    end: int
    kind: Class


class _Written:
    """A text that is written without what was found, in order."""

    def __init__(self, text: str, most: int) -> None:
        self._text = text
        self._most = most
        self._parts: list[str] = []
        self._kinds: list[Class] = []
        self._at = 0
        self._open: _Found | None = None

    def add(self, places: Iterable[_Found]) -> None:
        """Take places that begin behind those before; what overlaps is one, of the first class."""
        for it in places:
            if self._open is not None and it.start < self._open.end:
                self._open = self._open._replace(end=max(self._open.end, it.end))
            else:
                self._close()
                self._open = it

    def ended(self, *, is_cut: bool) -> Redacted:
        """Return all of it."""
        self._close()
        self._parts.append(self._text[self._at : self._most])
        return Redacted("".join(self._parts), tuple(self._kinds), is_cut)

    def _close(self) -> None:
        if self._open is not None and self._open.start < self._most:
            self._parts += (self._text[self._at : self._open.start], f"[{self._open.kind}]")
            self._kinds.append(self._open.kind)
            self._at = self._open.end


def _of_slice(
    text: str, start: int, kind: Class, pattern: re.Pattern[str], check: _Check
) -> Iterator[_Found]:
    end = start + SLICE_CHARACTERS
    until = min(len(text), end + _OVERLAP)
    for match in pattern.finditer(text, start, until):
        begin, matched = match.start(), match[0]
        if begin >= end:
            break
        if match.end() == until < len(text):  # it may go on beyond what was looked at
            whole = pattern.match(text, begin)
            matched = matched if whole is None else whole[0]
        for first, last in check(matched):
            yield _Found(begin + first, begin + last, kind)


def _keys(text: str) -> Iterator[Span]:
    """Yield private keys as they stand in files; one without an end goes to the end."""
    at = 0
    while (begin := _KEY_BEGIN.search(text, at)) is not None:
        end = _KEY_END.search(text, begin.end())
        at = len(text) if end is None else end.end()
        yield begin.start(), at


def _places(text: str, word: str, start: int) -> Iterator[_Found]:
    """Yield where a word begins in a slice."""
    until = start + SLICE_CHARACTERS + len(word) - 1
    at = text.find(word, start, until)
    while at >= 0:
        yield _Found(at, at + len(word), Class.WORD)
        at = text.find(word, at + len(word), until)
