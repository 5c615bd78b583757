"""The patterns of sensitive text, and checks of their matches. Pure.

A pattern is bounded, or begins only at one position of a run and never backtracks. Patterns of
numbers consume nothing (`(?P<it>...)` in a lookahead), so that each possible beginning is checked
and a false match cannot hide a true match.

Groups are not possessive (`(?:...)*+`, while `x*+` is fine). Python before 3.11.5, which Debian 12
and Ubuntu 22.04 have, has a bug in possessive groups. Here no part that may fail follows a group,
so the groups never backtrack.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from ipaddress import ip_address
from typing import NamedTuple

_CARD_DIGITS = range(13, 20)
_IBAN_CHARACTERS = range(15, 35)
_PHONE_DIGITS = range(7, 16)
# Digits of numbers with a trunk prefix (0). Numbers with fewer digits are often dates.
_TRUNK_DIGITS = range(9, 16)
_DOUBLED = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)  # digit sum of twice each digit, for Luhn's checksum
_NAME_CHARACTERS = 256  # characters of a field's name that are examined


class Class(StrEnum):
    """A class of personal or secret text, whose name in brackets replaces a match."""

    EMAIL = "email"
    PHONE = "phone"
    CARD = "card"
    IBAN = "iban"
    IP = "ip"
    SECRET = "secret"  # noqa: S105 - the name of a class
    WORD = "word"


Span = tuple[int, int]


class Look(NamedTuple):
    """A pattern, the positions where it may match, and the sensitive parts of its matches."""

    kind: Class
    pattern: re.Pattern[str]
    check: Callable[[str], Iterable[Span]]

    @property
    def group(self) -> str | int:
        """The group of a match that is checked."""
        return "it" if "it" in self.pattern.groupindex else 0


def _whole(found: str) -> Iterator[Span]:
    yield 0, len(found)


def is_luhn(digits: str) -> bool:
    """Return whether the last digit is the valid check digit (Luhn) of the earlier digits."""
    values = [int(digit) for digit in reversed(digits)]
    doubled = (value * 2 - 9 * (value > 4) for value in values[1::2])
    return (sum(values[::2]) + sum(doubled)) % 10 == 0


def is_iban(text: str) -> bool:
    """Return whether letters and digits are an account number with valid check digits."""
    moved = text[4:] + text[:4]
    return int("".join(str(int(character, 36)) for character in moved)) % 97 == 1


def _cards(found: str) -> Iterator[Span]:
    """Yield the longest prefix of whole digit groups that is a card's number."""
    # Two sums of the digits so far, each with every second digit doubled. One sum doubles the last
    # digit.
    single = double = count = best = 0
    if int(found[0]) not in range(2, 7):
        return
    for index, character in enumerate(found):
        if not character.isdecimal():
            continue
        value = int(character)
        single, double = double + value, single + _DOUBLED[value]
        count += 1
        is_end = index + 1 == len(found) or not found[index + 1].isdecimal()
        if is_end and count in _CARD_DIGITS and single % 10 == 0:
            best = index + 1
    if best:
        yield 0, best


def _ibans(found: str) -> Iterator[Span]:
    """Yield the longest prefix with valid check digits, since words may follow the number."""
    head = body = count = best = 0
    for index, character in enumerate(found):
        if not character.isalnum():
            continue
        value = int(character, 36)
        shift = 10 if value < 10 else 100
        if count < 4:
            head = head * shift + value
        else:
            body = (body * shift + value) % 97
        count += 1
        is_end = index + 1 == len(found) or not found[index + 1].isalnum()
        # For the check, the two letters and two digits at the start are moved to the end, as six
        # digits.
        if is_end and count in _IBAN_CHARACTERS and (body * 10**6 + head) % 97 == 1:
            best = index + 1
    if best:
        yield 0, best


def _longest(found: str, digits: range) -> Iterator[Span]:
    """Yield the longest prefix of whole groups whose number of digits is in `digits`."""
    count = end = 0
    for group in re.finditer(r"\d+", found):
        count += len(group[0])
        if count in digits:
            end = group.end()
    if end:
        yield 0, end


def _phones(found: str) -> Iterator[Span]:
    zeros = 2 if found.startswith("00") else 0  # begins international numbers, like a plus
    return _longest(found, range(_PHONE_DIGITS.start + zeros, _PHONE_DIGITS.stop + zeros))


def _trunk_phones(found: str) -> Iterator[Span]:
    return _longest(found, _TRUNK_DIGITS)


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
# Names of secrets. A prefix, as in `userPassword` or `x-api-key`, is irrelevant.
_PASSWORD = r"(?:passw(?:or)?d|passphrase|pwd)"  # noqa: S105 - a pattern
_KEY = (
    r"(?:(?:api|access|secret|private|signing|encryption)[ _-]?keys?|secrets?|credentials?|token)"
    r"\d{0,3}+"
)
# A quoted value, also as JSON within JSON, ends at the same quote after the same number of
# backslashes. A value without this end, or with a distant end, extends to the next space or quote.
_QUOTED = (
    r"(?P<escape>\\{0,8}+)(?P<quote>[\"'])"
    r"(?:(?!(?<!\\)(?P=escape)(?P=quote))[\s\S]){1,512}[^\s\"']*+"
)
_GIVEN = r"\\{0,8}+[\"']?\s{0,4}+(?::=?|=>?)\s{0,4}+"
_NAMED = (
    rf"(?:{_PASSWORD}\w{{0,24}}+{_GIVEN}(?:{_QUOTED}|[^\s\"']++)"
    rf"|{_KEY}{_GIVEN}(?:{_QUOTED.replace('escape', 'escape2').replace('quote', 'quote2')}"
    r"|[^\s\"']{6,}+))"
)
_INTERNATIONAL = r"(?:\+|00)\d(?:[ ().\u00a0\u202f/-]{0,3}+\d){6,20}"
_AREA = r"(?:\(\d{3}\)[ .-]{0,2}|\(?\d{3}\)?[ .-]{1,2})"
# Ten digits without separators must begin like a number of North America, unlike Unix times.
_TEN_DIGITS = (
    rf"(?:(?:1[ .-]?)?{_AREA}\d{{3}}[ .-]?\d{{4}}"
    r"|1?[2-9]\d\d[2-9]\d{6})(?!\w)"
)
_DATE = r"0\d[./-]\d\d[./-](?:19|20)\d\d(?!\d)"
_TRUNK = rf"(?!{_DATE})\(?0[1-9](?:[ ()./-]{{0,3}}+\d){{7,20}}"

_PATTERNS: tuple[tuple[Class, str, Callable[[str], Iterable[Span]]], ...] = (
    (Class.SECRET, rf"(?<![A-Za-z0-9]){_PREFIXED}", _whole),
    (Class.SECRET, r"(?i:(?<!\w)(?:bearer|basic)\s{1,4}+[\w.~+/=-]{12,}+)", _whole),
    (Class.SECRET, rf"(?i:{_NAMED})", _whole),
    # A password in a URL, but not a port and a path with an @ in it.
    (
        Class.SECRET,
        r"(?<=://)[^\s/:@]{0,128}+:(?!\d{1,5}[/?#])[^\s@]{1,256}+"
        r"(?:@[^\s@]{0,100}+(?=@)){0,3}(?=@)",
        _whole,
    ),
    (
        Class.EMAIL,
        r"(?<![\w.%+-])[\w.%+-]{1,200}+@(?:[\w-]{1,63}+\.){1,8}[^\W\d_]{2,24}+",
        _whole,
    ),
    # The pattern includes one character or digit more than allowed, to detect where a group ends.
    (
        Class.IBAN,
        r"(?<![A-Za-z0-9])(?=(?P<it>[A-Za-z]{2}[0-9]{2}(?:[ \u00a0\u202f-]?[A-Za-z0-9]){11,31}))",
        _ibans,
    ),
    (Class.CARD, rf"(?<!\d)(?=(?P<it>\d(?:{_SEPARATOR}?\d){{12,19}}))", _cards),
    (Class.IP, rf"(?<![\w.])(?:{_BYTE}\.){{3}}{_BYTE}(?![\w]|\.\d)", _whole),
    (
        Class.IP,
        r"(?<![\w:])(?=[0-9A-Fa-f]{0,4}:)[0-9A-Fa-f:]{2,39}+(?:(?<=:)(?:\d{1,3}\.){3}\d{1,3})?"
        r"(?!\w)",
        _ips,
    ),
    (Class.PHONE, rf"(?<![\w+])(?=(?P<it>{_INTERNATIONAL}))", _phones),
    (Class.PHONE, rf"(?<![\w+])(?<!\d\.)(?=(?P<it>{_TEN_DIGITS}))", _whole),
    (Class.PHONE, rf"(?<![\w+])(?<!\d[.,])(?=(?P<it>{_TRUNK}))", _trunk_phones),
)
LOOKS: Sequence[Look] = tuple(
    Look(kind, re.compile(pattern), check) for kind, pattern, check in _PATTERNS
)
_SECRET_NAME = re.compile(rf"(?i:{_PASSWORD}|{_KEY}\W*+\Z)")


def is_secret_name(name: str) -> bool:
    """Return whether a field of this name has a secret, like `userPassword` or `x-api-key`."""
    return _SECRET_NAME.search(name[-_NAME_CHARACTERS:]) is not None
