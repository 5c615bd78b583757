"""Parses one JSON value in a text that arrives in pieces. Pure.

The parser reports the end of the value, and whether the text is valid JSON so far. It needs linear
time, and bounds the depth of nesting and the length of numbers.
"""

import json
import re
from enum import Enum, auto

from gateway.dialects.marks import behind_space, matched

DEPTH_MAX = 64
_SCALAR_CHARACTERS_MAX = 512

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_RUN = re.compile(r"[-+.0-9a-zA-Z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SCALAR_STARTS = frozenset("-0123456789tfn")
_ESCAPABLE = frozenset('"\\/bfnrtu')
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_CLOSING = {"{": "}", "[": "]"}


class _Inside(Enum):
    STRUCTURE = auto()
    STRING = auto()
    ESCAPE = auto()  # after a backslash in a string
    HEXADECIMAL = auto()  # in the four digits after \u
    SCALAR = auto()  # a number, or one of the words true, false and null


class _Expectation(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    NEXT = auto()  # a comma, or the end of the container


class JsonText:
    """The parser's state for one value.

    Attributes:
        is_complete: Whether the value has ended. A number or word ends at the character after it.
        is_broken: Whether the text cannot be JSON, or exceeds the limits.
    """

    __slots__ = (
        "_digits",
        "_expected",
        "_inside",
        "_is_key",
        "_open",
        "_scalar",
        "is_broken",
        "is_complete",
    )

    def __init__(self) -> None:
        """Expect the first character of the value."""
        self._open: list[str] = []  # open brackets and braces, the innermost last
        self._inside = _Inside.STRUCTURE
        self._expected = _Expectation.VALUE
        self._is_key = False
        self._digits = 0  # number of hexadecimal digits still expected
        self._scalar = ""
        self.is_complete = self.is_broken = False

    def take(self, text: str, start: int) -> tuple[int, str]:
        """Consume the value's characters from `start` on, to the end of the value or of `text`.

        Returns:
            The index after the consumed part, and this part as valid JSON. In the result, control
                characters inside strings are escaped, because models forget to escape them.
        """
        parts: list[str] = []
        at = start
        while at < len(text) and not (self.is_complete or self.is_broken):
            if self._inside is _Inside.STRING:
                at = at + len(matched(_PLAIN, text, at))
                if at == len(text):
                    break
                if text[at] < " ":
                    parts += text[start:at], json.dumps(text[at])[1:-1]
                    start = at + 1
                else:
                    self._end_plain(text[at])
                at += 1
            elif self._inside is _Inside.STRUCTURE:
                at = self._take_structure(text, at)
            elif self._inside is _Inside.SCALAR:
                at = self._take_scalar(text, at)
            else:
                at = self._take_escaped(text, at)
        parts.append(text[start:at])
        return at, "".join(parts)

    def _end_plain(self, character: str) -> None:
        if character == "\\":
            self._inside = _Inside.ESCAPE
            return
        self._inside = _Inside.STRUCTURE
        if self._is_key:
            self._expected = _Expectation.COLON
        else:
            self._end_value()

    def _take_escaped(self, text: str, at: int) -> int:
        character = text[at]
        if self._inside is _Inside.ESCAPE:
            self.is_broken = character not in _ESCAPABLE
            self._inside = _Inside.HEXADECIMAL if character == "u" else _Inside.STRING
            self._digits = 4
        else:
            self.is_broken = character not in _HEXADECIMAL
            self._digits -= 1
            if not self._digits:
                self._inside = _Inside.STRING
        return at if self.is_broken else at + 1

    def _take_scalar(self, text: str, at: int) -> int:
        end = at + len(matched(_SCALAR_RUN, text, at))
        allowed = at + _SCALAR_CHARACTERS_MAX - len(self._scalar)
        if end > allowed:
            self.is_broken = True
            return allowed
        self._scalar += text[at:end]
        if end < len(text):
            self.is_broken = _SCALAR.fullmatch(self._scalar) is None
            self._inside, self._scalar = _Inside.STRUCTURE, ""
            self._end_value()
        return end

    def _take_structure(self, text: str, at: int) -> int:
        at = behind_space(text, at)
        if at == len(text):
            return at
        if not self._is_fitting(text[at]):
            self.is_broken = True
            return at
        return at if self._inside is _Inside.SCALAR else at + 1

    def _is_fitting(self, character: str) -> bool:
        """Process the next character outside strings, and return whether it is valid JSON there."""
        expected = self._expected
        if expected is _Expectation.COLON:
            self._expected = _Expectation.VALUE
            return character == ":"
        if expected is _Expectation.VALUE or (
            expected is _Expectation.VALUE_OR_END and character != "]"
        ):
            return self._is_value(character)
        if expected is _Expectation.NEXT and character == ",":
            self._expected = _Expectation.KEY if self._open[-1] == "{" else _Expectation.VALUE
            return True
        if expected in (_Expectation.KEY, _Expectation.KEY_OR_END) and character == '"':
            self._inside, self._is_key = _Inside.STRING, True
            return True
        return expected is not _Expectation.KEY and self._is_end(character)

    def _is_value(self, character: str) -> bool:
        if character == '"':
            self._inside, self._is_key = _Inside.STRING, False
        elif character in _SCALAR_STARTS:
            self._inside = _Inside.SCALAR
        elif character in _CLOSING and len(self._open) < DEPTH_MAX:
            self._open.append(character)
            self._expected = (
                _Expectation.KEY_OR_END if character == "{" else _Expectation.VALUE_OR_END
            )
        else:
            return False
        return True

    def _is_end(self, character: str) -> bool:
        if character != _CLOSING[self._open[-1]]:
            return False
        self._open.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._expected = _Expectation.NEXT
        self.is_complete = not self._open and not self.is_broken
