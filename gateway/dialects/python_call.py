"""Converts a call in Python's syntax, `f(a=1, b="x")`, to JSON. Pure.

No code is evaluated. The end of the call is found by its quotes and brackets. Then `ast` parses the
text, and only literals in the syntax tree are accepted.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Collection, Mapping

from gateway.dialects.json_text import DEPTH_MAX
from gateway.dialects.marks import behind_space, matched

CHARACTERS_MAX = 64 << 10
# Maximum number of brackets, commas and colons. It bounds the work of `ast`, which parses the whole
# call at once, at about 1 us for each of them.
_PARTS_MAX = 4096
_NAME_CHARACTERS_MAX = 128

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_RUN = re.compile(r"""[^"'()\[\]{},:\\#]*""")
_STRING_RUN = {'"': re.compile(r'[^"\\\n]*'), "'": re.compile(r"[^'\\\n]*")}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_WORDS = ("true", "false", "null")
# JSON text for an infinite float. JSON has no infinity, but parsers read this number as infinite.
_BEYOND = "1e999"


class NotACallError(ValueError):
    """The text is not a call whose arguments are keywords with literals."""


class PythonCall:
    """The parser's state for one call, whose end is its closing parenthesis.

    Attributes:
        name: Name of the function, as far as it has arrived.
        arguments: Arguments as JSON, once the call is complete.
        is_complete: Whether the text has ended and is a call.
        is_broken: Whether the text is not a call, or exceeds the limits.
    """

    __slots__ = (
        "_is_escaped",
        "_names",
        "_open",
        "_parts",
        "_quote",
        "_size",
        "_text",
        "arguments",
        "is_broken",
        "is_complete",
        "name",
    )

    def __init__(self, names: Collection[str] | None) -> None:
        """Expect the name, which must be one of `names` unless they are None."""
        self._names = names
        self._text: list[str] = []  # pieces of the text after the name
        self._size = self._parts = 0
        self._open: list[str] = []
        self._quote = ""
        self._is_escaped = False
        self.name = self.arguments = ""
        self.is_complete = self.is_broken = False

    def take(self, text: str, start: int) -> int:
        """Consume the call's characters from `start` on, and return the index after them."""
        at = start
        while at < len(text) and not (self.is_complete or self.is_broken):
            begin = at
            if not self._open:
                at = self._take_name(text, at)
            elif self._quote:
                at = self._take_string(text, at)
            else:
                at = self._take_structure(text, at)
            if at == begin:
                break  # more text decides whether one or three quotes open the string
            self._size += at - begin
            self.is_broken |= self._size > CHARACTERS_MAX or self._parts > _PARTS_MAX
        return at

    def _take_name(self, text: str, at: int) -> int:
        """Consume the name up to its parenthesis."""
        if not self.name:
            at = behind_space(text, at)
            if at == len(text):
                return at
        name = matched(_NAME, text, at)
        self.name += name
        at += len(name)
        if len(self.name) > _NAME_CHARACTERS_MAX:
            self.is_broken = True
        elif at < len(text):
            is_known = self._names is None or self.name in self._names
            self.is_broken = text[at] != "(" or not self.name or not is_known
            self._open.append("(")
        return at + bool(self._open)

    def _take_structure(self, text: str, at: int) -> int:
        if run := matched(_RUN, text, at):
            self._text.append(run)
            return at + len(run)
        character = text[at]
        if character in "\"'":
            return self._open_string(text, at)
        self._text.append(character)
        self._parts += 1
        if character in _CLOSING:
            self._open.append(character)
            self.is_broken = len(self._open) > DEPTH_MAX
        elif character in ")]}":
            self.is_broken = _CLOSING[self._open.pop()] != character
            if not self._open and not self.is_broken:
                self._convert()
        else:
            self.is_broken = character not in ",:"
        return at + 1

    def _open_string(self, text: str, at: int) -> int:
        quote = text[at]
        if (three := text[at : at + 3]) == 3 * quote:
            self._quote = three
        elif three in (quote, 2 * quote):
            return at
        else:
            self._quote = quote
        self._text.append(self._quote)
        return at + len(self._quote)

    def _take_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            # Models also write JSON's escape \\/, which is not an escape of Python.
            self._text.append("/" if text[at] == "/" else "\\" + text[at])
            return at + 1
        if run := matched(_STRING_RUN[self._quote[0]], text, at):
            self._text.append(run)
            return at + len(run)
        character = text[at]
        if character == "\n":  # models forget to escape line breaks
            self._text.append("\\n")
        elif character == "\\":
            self._is_escaped = True
        else:
            return self._close_string(text, at)
        return at + 1

    def _close_string(self, text: str, at: int) -> int:
        seen = text[at : at + len(self._quote)]
        if seen == self._quote:
            self._text.append(seen)
            self._quote = ""
            return at + len(seen)
        if seen == self._quote[: len(seen)]:
            return at
        self._text.append(text[at])
        return at + 1

    def _convert(self) -> None:
        try:
            self.arguments = _as_json("".join(self._text))
            self.is_complete = True
        # These are the errors that `ast` documents.
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            self.is_broken = True


def _as_json(arguments: str) -> str:
    """Return a call's keyword arguments as JSON, from their text with the closing parenthesis."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about escapes that Python does not define
        call = ast.parse("_(" + arguments, mode="eval").body
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise NotACallError
    text = _object({_keyword(keyword): keyword.value for keyword in call.keywords})
    # JSON escapes may form pairs of surrogates, which become characters. Half a pair is an error.
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise NotACallError
    return keyword.arg


def _literal(node: ast.expr) -> str:
    """Return a literal as JSON."""
    match node:
        case ast.Constant(value=float() as value) if math.isinf(value):
            return _BEYOND
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return json.dumps(value, ensure_ascii=False)
        case ast.Name(id=word) if word in _WORDS:
            return word
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return f"[{','.join(map(_literal, items))}]"
        case ast.Dict(keys=keys, values=values):
            return _object({_key(key): value for key, value in zip(keys, values, strict=True)})
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value) as number) if type(
            value
        ) in (int, float):
            return "-" + _literal(number)
        case _:
            raise NotACallError


def _object(values: Mapping[str, ast.expr]) -> str:
    pairs = (f"{json.dumps(k, ensure_ascii=False)}:{_literal(v)}" for k, v in values.items())
    return f"{{{','.join(pairs)}}}"


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise NotACallError
    return node.value
