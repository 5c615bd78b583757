"""A retained request and its answer, as redacted JSON of a bounded size. Pure.

The work proceeds in small steps, so that the caller can run other tasks in between. Text beyond the
bound is cut within its string, so that the JSON stays valid.
"""

import json
import re
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import orjson

from gateway.text.answer import ChoiceText
from gateway.text.pipe import TextPipe
from gateway.texts.patterns import Class, is_secret_name
from gateway.texts.redaction import OVERLAP, RedactionRules, redacted

CHARACTERS_MAX = 1 << 16  # maximum characters per prompt, and of all answers to one prompt
CUT = "[cut]"
_DEPTH_MAX = 32
_NODE_CHARACTERS = 4  # characters that each value counts in addition to its text
_TOKENS_AT_ONCE = 32
_NUMBER_CHARACTERS = 7  # shorter numbers are not sensitive, unless they are a word of the tenant
_LARGE_FLOAT = 1e15  # floats from this size on are written with all digits, without exponent
_HUGE_FLOAT = 1e20
_ESCAPES_AT_ONCE = 256
_FOUND_AT_ONCE = 512
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|([\"\\/bfnrt]))")
_ESCAPED_CHARACTERS = 6  # maximum number of JSON characters for one decoded character
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
# Names of this API's fields, which need not be redacted.
_KNOWN = frozenset(
    {
        *("role", "content", "type", "text", "name", "tool_calls", "tool_call_id", "function"),
        *("arguments", "refusal", "reasoning_content", "messages", "tools", "prompts", "id"),
        *("description", "parameters", "strict", "properties", "required", "reasoning"),
    }
)

# Types and keywords of JSON schemas. A tool's parameter may be named like a secret, but its schema
# contains no secret.
_SCHEMA_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_SCHEMA_KEYS = frozenset(
    {
        *("type", "title", "description", "format", "minLength", "maxLength", "minimum"),
        *("maximum", "pattern", "nullable", "readOnly", "writeOnly", "deprecated"),
    }
)

Steps = Generator[None, None, str]


@dataclass(frozen=True, slots=True)
class Document:
    """A redacted text.

    Attributes:
        json: The redacted text as JSON, with sorted keys.
        redactions: Number of redactions by class.
        is_cut: Whether the text was longer and has been cut.
    """

    json: str
    redactions: Mapping[str, int]
    is_cut: bool


def document(
    parts: Iterable[tuple[str, Iterable[object]]], rules: RedactionRules, most: int = CHARACTERS_MAX
) -> Generator[None, None, Document]:
    """Build one redacted object of named lists, whose values may be generated lazily.

    Args:
        parts: Names, each with its values (strings, numbers, lists, objects, or `TextTokens`).
        rules: Rules of the redaction.
        most: Approximate bound of the characters.
    """
    writer = _Writer(rules, most)
    found: dict[str, object] = {}
    for name, values in parts:
        written: list[object] = []
        for value in values:
            if writer.is_full:
                written.append(CUT)
                break
            written.append((yield from writer.value(value, 0)))
            yield
        if written:
            found[name] = written
    return Document(_dumped(found), writer.redactions, writer.is_cut)


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Text as token ids.

    With `is_answer`, reasoning and tool calls are shown besides the content.
    """

    pipe: TextPipe
    ids: Sequence[int]
    is_answer: bool = False


class _Writer:
    """Redacts values until the document has no room for more text."""

    def __init__(self, rules: RedactionRules, most: int) -> None:
        self._rules = rules
        self._left = most
        self.redactions: Counter[str] = Counter()
        self.is_cut = False

    @property
    def is_full(self) -> bool:
        """Whether no more text fits, so that the document is incomplete."""
        if self._left <= 0:
            self.is_cut = True
        return self._left <= 0

    def value(self, value: object, depth: int) -> Generator[None, None, object]:
        self._left -= _NODE_CHARACTERS
        if isinstance(value, str):
            return (yield from self._text(value))
        if isinstance(value, TextTokens):
            answer = yield from _decoded(value, self._left)
            shown = answer if value.is_answer else cast("dict[str, object]", answer)["content"]
            return (yield from self.value(shown, depth))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (yield from self._number(value))
        if not isinstance(value, dict | list):
            return value
        return (yield from self._nested(cast("dict[str, object] | list[object]", value), depth + 1))

    def _nested(
        self, value: dict[str, object] | list[object], depth: int
    ) -> Generator[None, None, object]:
        if depth > _DEPTH_MAX:
            self.is_cut = True
            return CUT
        if isinstance(value, dict):
            return (yield from self._object(value, depth))
        return (yield from self._list(value, depth))

    def _list(self, values: list[object], depth: int) -> Generator[None, None, list[object]]:
        """Redact values. Adjacent pieces of text are joined first, as in the model's prompt."""
        found: list[object] = []
        pieces, characters = list[str](), 0
        for value in chain(values, (_END,)):
            piece = _piece(value)
            if piece is not None and characters <= self._left:
                pieces.append(piece)
                characters += len(piece) + _NODE_CHARACTERS
                yield
                continue
            if pieces:
                whole = {"type": "text", "text": "".join(pieces)}
                found.append((yield from self.value(whole, depth)))
                pieces, characters = [], 0
            if value is _END:
                break
            if self.is_full:
                found.append(CUT)
                break
            found.append((yield from self.value(value, depth)))
            yield
        return found

    def _object(
        self, values: dict[str, object], depth: int
    ) -> Generator[None, None, dict[str, object]]:
        found: dict[str, object] = {}
        for key, value in values.items():
            if self.is_full:
                found[CUT] = True
                break
            self._left -= _NODE_CHARACTERS
            name = key if key in _KNOWN else (yield from self._text(key))
            if is_secret_name(key) and not _is_schema(value):
                found[name] = self._hidden(value)
            elif key == "arguments" and isinstance(value, str):
                found[name] = yield from self._arguments(value, depth)
            else:
                found[name] = yield from self.value(value, depth)
        return found

    def _hidden(self, value: object) -> object:
        """Redact the whole value of a field whose name marks it as a secret."""
        if value is None or isinstance(value, bool) or value == "":
            return value
        self._left -= _NODE_CHARACTERS
        self.redactions[str(Class.SECRET)] += 1
        return f"[{Class.SECRET}]"

    def _arguments(self, text: str, depth: int) -> Steps:
        """Redact the JSON text of a call, with its escapes decoded."""
        try:
            inner = orjson.loads(text) if len(text) <= self._left else None
        except orjson.JSONDecodeError:
            inner = None
        if isinstance(inner, dict | list):
            return _dumped((yield from self.value(cast("object", inner), depth)))
        # The JSON is incomplete or too long, so its decoded text is written instead.
        enough = max(0, self._left) + OVERLAP
        begin = text[: _ESCAPED_CHARACTERS * enough]
        self.is_cut = self.is_cut or len(text) > len(begin)
        return (yield from self._text((yield from _unescaped(begin, enough))))

    def _text(self, text: str) -> Steps:
        most = max(0, self._left)
        found = yield from redacted(text, self._rules, most)
        self._left -= min(len(text), most)
        for start in range(0, len(found.found), _FOUND_AT_ONCE):
            self.redactions.update(map(str, found.found[start : start + _FOUND_AT_ONCE]))
            yield
        if not found.is_cut:
            return found.text
        self.is_cut = True
        return found.text + CUT

    def _number(self, number: float) -> Generator[None, None, object]:
        """Redact a number, which may be a card or telephone number, or a word of the tenant."""
        is_large = isinstance(number, float) and _LARGE_FLOAT <= abs(number) < _HUGE_FLOAT
        text = f"{number:.1f}" if is_large else str(number)
        if len(text) < _NUMBER_CHARACTERS and not self._rules.words:
            return number
        shown = yield from self._text(text)
        return number if shown == text else shown


_END = object()


def _piece(value: object) -> str | None:
    """Return the text of a message part that has only text, or None for any other value."""
    if not isinstance(value, dict):
        return None
    part = cast("dict[str, object]", value)
    text = part.get("text")
    is_text = len(part) == 2 and part.get("type") == "text" and isinstance(text, str)
    return cast("str", text) if is_text else None


def _is_schema(value: object) -> bool:
    """Return whether a value is the schema of a field rather than the field's value."""
    if not isinstance(value, dict) or len(cast("dict[str, object]", value)) > len(_SCHEMA_KEYS):
        return False
    schema = cast("dict[str, object]", value)
    kind = schema.get("type")
    return isinstance(kind, str) and kind in _SCHEMA_TYPES and schema.keys() <= _SCHEMA_KEYS


def _unescaped(text: str, enough: int) -> Steps:
    """Return at least `enough` characters of the decoded form of incomplete JSON text."""
    whole, parts, at, characters = list[str](), list[str](), 0, 0
    for number, match in enumerate(_ESCAPE.finditer(text)):
        code, short = match.groups()
        meant = _ESCAPES.get(short, short) if code is None else chr(int(code, 16))
        parts += (text[at : match.start()], meant)
        at = match.end()
        if number % _ESCAPES_AT_ONCE == _ESCAPES_AT_ONCE - 1:
            whole.append("".join(parts))
            characters += len(whole[-1])
            parts.clear()
            yield
            if characters > enough:
                break
    whole += (*parts, text[at:])
    yield
    return "".join(whole)


def _decoded(tokens: TextTokens, most: int) -> Generator[None, None, object]:
    """Return the text of tokens, as far as it fits."""
    answer, pipe, characters = ChoiceText(), tokens.pipe, 0
    for start in range(0, len(tokens.ids), _TOKENS_AT_ONCE):
        if pipe.is_stopped or characters > 2 * most:  # enough to detect that the text is cut
            break
        delta = pipe.push(tokens.ids[start : start + _TOKENS_AT_ONCE])
        answer.add(delta)
        characters = pipe.characters
        yield
    answer.add(pipe.flush())
    found: dict[str, object] = {"content": answer.content}
    if answer.reasoning:
        found["reasoning"] = answer.reasoning
    if calls := answer.calls:
        # The call ids are left out, because they differ from the ids that the client received.
        found["tool_calls"] = [call["function"] for call in calls]
    return found


def _dumped(value: object) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # halves of characters, or numbers of more than 64 bits
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
