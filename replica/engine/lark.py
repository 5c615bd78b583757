"""Splits a grammar in Lark's syntax into text, literals and the JSON schemas in it. Pure."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from replica.engine.grammar_numbers import read_float

# The pattern also matches literals without an end on their line. Otherwise, each quote would start
# another search to the end of the line. The searches could block all threads for a second.
_PARTS = re.compile(r'"(?:[^"\\\n]|\\.)*("?)|/(?:[^/\\\n]|\\.)+(/?)|//.*|#.*|%\s*json\s*(?=\{)')
_DECODER = json.JSONDecoder(parse_float=read_float)


@dataclass(slots=True)
class LarkText:
    """A grammar in Lark's syntax, split into its parts.

    Attributes:
        bare: Text outside strings, expressions, comments and schemas.
        texts: Text before the first schema, texts between schemas, and text after the last schema.
        schemas: Parsed schema of each `%json`.
        is_open: Whether a string or an expression is not closed on its line.
    """

    bare: str = ""
    texts: list[str] = field(default_factory=list[str])
    schemas: list[Any] = field(default_factory=list[Any])
    is_open: bool = False

    def joined(self) -> str:
        """Return the grammar as one text again, with the parsed schemas in their places."""
        written = [*map(json.dumps, self.schemas), ""]
        pairs = zip(self.texts, written, strict=True)
        return "".join(text + schema for text, schema in pairs)


def read_lark(text: str) -> LarkText:
    """Split a grammar.

    Raises ValueError or RecursionError if a schema in the grammar is not JSON.
    """
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
