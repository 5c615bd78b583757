"""What a request said and was answered, as redacted JSON of a bounded size. Pure.

Everything is made in small steps, so that whoever asks can let others run in between. What does not
fit is cut where it is: the JSON stays one.
"""

import json
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import orjson

from gateway.text.answer import Answer
from gateway.text.pipe import TextPipe
from gateway.texts.redaction import Rules, redacted

CHARACTERS_MAX = 1 << 16  # of a prompt, and of all answers to it
CUT = "[cut]"
_DEPTH_MAX = 32
_NODE_CHARACTERS = 4  # what a value weighs besides its characters
_TOKENS_AT_ONCE = 32
_LONG_NUMBER = 10**6  # smaller ones are no numbers of anything
# Names of fields of our API, which need not be looked at.
_KNOWN = frozenset(
    {
        *("role", "content", "type", "text", "name", "tool_calls", "tool_call_id", "function"),
        *("arguments", "refusal", "reasoning_content", "messages", "tools", "prompts", "id"),
        *("description", "parameters", "strict", "properties", "required", "reasoning"),
    }
)

Steps = Generator[None, None, str]


@dataclass(frozen=True, slots=True)
class Document:
    """A redacted text.

    Attributes:
        json: With keys in order.
        redactions: How often something of a class was taken out.
        is_cut: There was more than fits.
    """

    json: str
    redactions: Mapping[str, int]
    is_cut: bool


def document(
    parts: Iterable[tuple[str, Iterable[object]]], rules: Rules, most: int = CHARACTERS_MAX
) -> Generator[None, None, Document]:
    """Make one object of named lists; their values may be made while this runs.

    Args:
        parts: Name and values; strings, numbers, lists, objects, or `Tokens`.
        rules: What to take out.
        most: Characters, about.
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
class Tokens:
    """Text as token ids; with `is_answer`, what a client sees of an answer."""

    pipe: TextPipe
    ids: Sequence[int]
    is_answer: bool = False


class _Writer:
    """Redacts values until there is no room for more."""

    def __init__(self, rules: Rules, most: int) -> None:
        self._rules = rules
        self._left = most
        self.redactions: Counter[str] = Counter()
        self.is_cut = False

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits; then something is missing."""
        if self._left <= 0:
            self.is_cut = True
        return self._left <= 0

    def value(self, value: object, depth: int) -> Generator[None, None, object]:
        self._left -= _NODE_CHARACTERS
        if isinstance(value, str):
            return (yield from self._text(value))
        if isinstance(value, Tokens):
            answer = yield from _decoded(value, self._left)
            shown = answer if value.is_answer else cast("dict[str, object]", answer)["content"]
            return (yield from self.value(shown, depth))
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LONG_NUMBER:
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
        found: list[object] = []
        for value in values:
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
            if key == "arguments" and isinstance(value, str):
                found[name] = yield from self._arguments(value, depth)
            else:
                found[name] = yield from self.value(value, depth)
        return found

    def _arguments(self, text: str, depth: int) -> Steps:
        """Redact the JSON text of a call: what is escaped in it must not be overlooked."""
        try:
            inner = orjson.loads(text) if len(text) <= self._left else None
        except orjson.JSONDecodeError:
            inner = None
        if not isinstance(inner, dict | list):
            return (yield from self._text(text))
        return _dumped((yield from self.value(cast("object", inner), depth)))

    def _text(self, text: str) -> Steps:
        most = max(0, self._left)
        found = yield from redacted(text, self._rules, most)
        self._left -= min(len(text), most)
        self.redactions.update(str(kind) for kind in found.found)
        if not found.is_cut:
            return found.text
        self.is_cut = True
        return found.text + CUT

    def _number(self, number: int) -> Generator[None, None, object]:
        """A number may be that of a card, or of a telephone."""
        text = str(number)
        shown = yield from self._text(text)
        return number if shown == text else shown


def _decoded(tokens: Tokens, most: int) -> Generator[None, None, object]:
    """Return what the tokens say, as far as there is room for it."""
    answer, pipe, characters = Answer(), tokens.pipe, 0
    for start in range(0, len(tokens.ids), _TOKENS_AT_ONCE):
        if pipe.is_stopped or characters > 2 * most:  # what is to be cut is seen as well
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
        # The ids are not those that the client got: they were made anew here.
        found["tool_calls"] = [call["function"] for call in calls]
    return found


def _dumped(value: object) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # halves of characters, or numbers of more than 64 bits
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
