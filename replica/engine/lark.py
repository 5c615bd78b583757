"""Splits a grammar in Lark's syntax: text, literals, and the JSON schemas inside. Pure."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from replica.engine.grammar_numbers import read_float

# It also matches what is not closed on its line: if it did not, it would look for the end of the
# line from each quote again, for a second, and hold up every other thread.
_PARTS = re.compile(r'"(?:[^"\\\n]|\\.)*("?)|/(?:[^/\\\n]|\\.)+(/?)|//.*|#.*|%\s*json\s*(?=\{)')
_DECODER = json.JSONDecoder(parse_float=read_float)


@dataclass(slots=True)
class LarkText:
    """A split grammar.

    Attributes:
        bare: Text that is neither string, expression, comment nor schema.
        texts: Texts before, between and behind the schemas.
        schemas: The schema behind each `%json`.
        is_open: Whether a string or an expression is not closed on its line.
    """

    bare: str = ""
    texts: list[str] = field(default_factory=list[str])
    schemas: list[Any] = field(default_factory=list[Any])
    is_open: bool = False

    def joined(self) -> str:
        """Return the grammar again, with its schemas as parsed."""
        written = [*map(json.dumps, self.schemas), ""]
        pairs = zip(self.texts, written, strict=True)
        return "".join(text + schema for text, schema in pairs)


def read_lark(text: str) -> LarkText:
    """Split a grammar; ValueError or RecursionError when a schema in it is not JSON."""
    lark, bare = LarkText(), list[str]()
    begin = at = 0
    while (found := _PARTS.search(text, at)) is not None:
        bare.append(text[at : found.start()])
        at = found.end()
        lark.is_open |= "" in found.groups()
        if found.group().startswith("%"):
            schema, behind = _DECODER.raw_decode(text, at)
            lark.schemas.append(schema)
            lark.texts.append(text[begin:at])
            begin = at = behind
    lark.texts.append(text[begin:])
    lark.bare = "".join((*bare, text[at:]))
    return lark
