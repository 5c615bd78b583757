"""Tokenizes ClickHouse SQL as far as the HTTP interface of the trace store needs it.

The functions work on bytes and have no I/O. Only the engine parses statements in full.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    rb"""
      (?P<space> \s+ | --[^\n]* | \#[\ !][^\n]* | /\*.*?\*/ )
    | (?P<string> '(?:[^'\\]|\\.|'')*' | \$(?P<tag>\w*)\$.*?\$(?P=tag)\$ )
    | (?P<name> `(?:[^`\\]|\\.|``)*` | "(?:[^"\\]|\\.|"")*" )
    | (?P<word> [A-Za-z_]\w* )
    | (?P<number> \d[\w.]* )
    | (?P<mark> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_DATA_START = re.compile(rb"[ \t]*;?[ \t]*\r?\n?")
# Words after an INSERT's table that begin its rows or query, so that no inline data follows.
_OWN_DATA = {b"VALUES", b"SELECT", b"WITH", b"FROM", b"WATCH"}
_RETURNS_ROWS = {
    *(b"SELECT", b"WITH", b"SHOW", b"DESCRIBE", b"DESC", b"EXPLAIN", b"EXISTS", b"CHECK"),
    *(b"VALUES", b"FROM", b"("),
}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: bytes  # words are in upper case
    end: int


@dataclass(frozen=True, slots=True)
class InlineInsert:
    """An `INSERT ... FORMAT name` whose data follows the statement.

    Attributes:
        query: The statement without the FORMAT clause.
        format: The input format's name.
        data: Bytes after the statement.
    """

    query: bytes
    format: str
    data: bytes


def _top_level(sql: bytes) -> Iterator[_Token]:
    """Yield the tokens outside parentheses, without space, comments and string literals."""
    depth = 0
    for found in _TOKEN.finditer(sql):
        kind = found.lastgroup or "mark"
        text = found.group()
        if text in (b"(", b"["):
            depth += 1
            if depth == 1:
                yield _Token("mark", text, found.end())
        elif text in (b")", b"]"):
            depth = max(0, depth - 1)
        elif depth == 0 and kind in ("word", "name", "mark"):
            yield _Token(kind, text.upper() if kind == "word" else text, found.end())


def returns_rows(sql: bytes) -> bool:
    """Return whether the (first) statement returns a table, even if it is empty."""
    first = next(_top_level(sql), None)
    return first is not None and first.text in _RETURNS_ROWS


def output_format(sql: bytes) -> str | None:
    """Return the format of the FORMAT clause at the end of a statement, or None without one."""
    found: bytes | None = None
    previous: list[_Token] = []
    for token in _top_level(sql):
        if (
            token.kind == "word"
            and previous
            and previous[-1].text == b"FORMAT"
            and previous[-1].kind == "word"
            and (len(previous) < 2 or previous[-2].text != b"AS")
        ):
            found = sql[token.end - len(token.text) : token.end]
        previous = [*previous[-1:], token]
    return None if found is None else found.decode()


def split_inline_insert(sql: bytes) -> InlineInsert | None:
    """Split an `INSERT INTO table ... FORMAT name data`. Other statements return None.

    The scan stops at the format's name, so that the data may contain anything.
    """
    tokens = _top_level(sql)
    token = next(tokens, None)
    if token is None or token.text != b"INSERT":
        return None
    token = next(tokens, None)
    while token is not None and token.text in (b"INTO", b"TABLE"):
        token = next(tokens, None)
    if token is not None and token.text == b"FUNCTION":
        next(tokens, None)
    after_dot = False
    for token in tokens:
        # In `a.format` the word after the dot is part of the table's name.
        if token.kind == "word" and not after_dot:
            if token.text == b"FORMAT":
                return _split_at(sql, token, next(tokens, None))
            if token.text in _OWN_DATA:
                return None
        after_dot = token.text == b"."
    return None


def _split_at(sql: bytes, keyword: _Token, name: _Token | None) -> InlineInsert | None:
    if name is None or name.kind != "word":
        return None
    data_at = _DATA_START.match(sql, name.end)
    assert data_at is not None
    return InlineInsert(
        query=sql[: keyword.end - len(keyword.text)],
        format=sql[name.end - len(name.text) : name.end].decode(),
        data=sql[data_at.end() :],
    )
