"""Renders chat templates, which turn messages into the text that the model was trained to continue.

Templates are part of downloaded weights and untrusted code, so they run in a sandbox and under a
budget. The environment is that of Hugging Face's `apply_chat_template`.

Only the template may write special tokens. If a caller's text contains the text of a special token,
the prompt is cut inside that text. The tokenizer encodes the two pieces separately, so it does not
recognize a special token there.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, cast

from jinja2 import Template, nodes

from gateway.bases.growing import KEPT, NEW, going_on, head_messages, with_seams
from gateway.bases.sandbox import BoundedEnvironment, OutOfTimeError, RenderBudget
from gateway.bodies.messages import Message, Tool
from sluice.errors import BadRequestError, ErrorCode

# Processor seconds of one rendering. A usual template needs 3 ms per 100 messages.
CPU_S = 1.0

# Maximum number of nested objects and arrays in tools and in arguments of earlier calls, because
# `tojson` and this module recurse. Schemas may have 120 levels, and a tool adds some levels.
_LEVELS_MAX = 128

_PATTERN_CHARACTERS_MAX = 256  # maximum length of a pattern for dates
_SEPARATOR_CHARACTERS_MAX = 8  # maximum length of a separator in JSON

# Templates with this text are Mistral's. They refuse call ids that `_SHORT_CALL_ID` does not match.
_SHORT_CALL_IDS = "length != 9"
_SHORT_CALL_ID = re.compile("[a-zA-Z0-9]{9}")

# Noncharacters of Unicode. One that the caller's texts do not contain marks where to cut a prompt.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
_BETWEEN = " " * 8  # filler between two values, about as long as JSON's punctuation


# Variables by which a template receives whether the model shall reason, and with which effort.
_EFFORT = re.compile(r"\b(reasoning_effort|enable_thinking)\b")


class TemplateError(Exception):
    """The template has called `raise_exception` with this message."""


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would escape <, > and &, but models are not trained on escaped text.
    for text in (indent, *(separators or ())):
        if isinstance(text, str) and len(text) > _SEPARATOR_CHARACTERS_MAX:
            raise TemplateError("it asks for JSON with long separators")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _PATTERN_CHARACTERS_MAX:
        raise TemplateError("it asks for a very long date")
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - what the templates of Llama 3 expect


class WrittenChat(NamedTuple):
    """A rendered conversation, split into the texts of its messages.

    Attributes:
        messages: All messages.
        rows: The messages as dicts, which templates receive.
        tools: The tools as dicts, which templates receive.
        options: Options for the template.
        given: Number of characters of all texts that the template received.
        kept: Number of first messages that were not rendered and have no text in `texts`.
        before: Text before the first message.
        texts: Texts of the other messages, one per message.
        behind: Text after the last message.
    """

    messages: Sequence[Message]
    rows: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: Mapping[str, object]
    given: int
    kept: int
    before: str
    texts: Sequence[str]
    behind: str


class ChatTemplate:
    """A compiled template with the special tokens to which it may refer.

    Attributes:
        heeds_effort: Whether the template uses the requested effort of reasoning.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], reserved: Collection[str] = ()
    ) -> None:
        """Compile the template, or raise ValueError if `source` is not a template.

        Args:
            source: Text of the template, in Jinja.
            special_tokens: Texts of the special tokens, by the names that the template uses.
            reserved: Texts that the tokenizer recognizes as special tokens.
        """
        self._environment = BoundedEnvironment(
            filters={"tojson": _tojson},
            functions={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
        )
        self._head: int | None = None
        self._going_on: Template | None = None
        self._template = self._environment.compiled(source, self._with_seams)
        if self._head is not None:
            self._going_on = self._environment.compiled(source, going_on)
        self._special_tokens = special_tokens
        self.heeds_effort = _EFFORT.search(source) is not None
        self._knows_developer = "developer" in source
        self._wants_short_ids = _SHORT_CALL_IDS in source
        words = "|".join(map(re.escape, sorted(reserved, key=len, reverse=True)))
        self._reserved = re.compile(words) if words else None
        self._first_character = re.compile(f"(?={words})(.)", re.DOTALL)

    def _with_seams(self, tree: nodes.Template) -> nodes.Template:
        self._head = head_messages(tree)
        return tree if self._head is None else with_seams(tree)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the prompt text, or raise BadRequestError if the template refuses the messages."""
        return "".join(self.pieces(messages, tools))

    def pieces(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, object] = MappingProxyType({}),
        *,
        cpu_s: float = CPU_S,
        param: str = "messages",
    ) -> list[str]:
        """Return the prompt text in pieces for the tokenizer, which is nearly always one piece."""
        return self.written(messages, tools, options, cpu_s=cpu_s, param=param)[0]

    def written(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, object] = MappingProxyType({}),
        *,
        cpu_s: float = CPU_S,
        param: str = "messages",
    ) -> tuple[list[str], WrittenChat | None]:
        """Return the prompt text in pieces for the tokenizer (usually one), and split by messages.

        The second result is None if a longer conversation may change the text of these messages.

        Args:
            messages: The conversation.
            tools: Tools that the model may call.
            options: Additional variables for the template, e.g. `enable_thinking`.
            cpu_s: Processor seconds that rendering may use. If a value below `CPU_S` is not enough,
                the call raises OutOfTimeError.
            param: Name of the body's field for the conversation.

        Raises:
            BadRequestError: The template refuses the messages.
        """
        listed = _template_tools(tools) if tools else []
        rows = [self._row(message) for message in messages]
        texts = _texts(rows, listed)
        try:
            given = len(texts)
            if self._reserved is None or self._reserved.search(texts) is None:
                parts = self._rendered(self._template, rows, listed, options, cpu_s, given)
                if self._head is None or len(parts) != len(rows) + 2:
                    return ["".join(parts)], None
                before, *own, behind = parts
                chat = WrittenChat(messages, rows, listed, options, given, 0, before, own, behind)
                return ["".join(parts)], chat
            mark = _unused_mark(texts)
            rows, listed = self._with_marks(rows, mark), self._with_marks(listed, mark)
            parts = self._rendered(self._template, rows, listed, options, cpu_s, given)
            return "".join(parts).split(mark), None
        except Exception as error:
            if isinstance(error, OutOfTimeError) and cpu_s < CPU_S:
                raise
            raise BadRequestError(
                ErrorCode.INVALID_REQUEST,
                f"These messages do not fit the model's chat template: {error}",
                param=param,
            ) from None

    def written_before(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, object],
        *,
        opening: str,
        given: int,
    ) -> WrittenChat | None:
        """Return messages that another gateway has rendered, in the form for `continued`.

        The result is None if the template cannot render only new messages.

        Args:
            messages: The messages.
            tools: Tools that the model may call.
            options: Additional variables for the template.
            opening: Text before the first message.
            given: Number of characters of all texts that the template received.
        """
        if self._going_on is None:
            return None
        rows = [self._row(message) for message in messages]
        listed = _template_tools(tools) if tools else []
        kept = len(rows)
        return WrittenChat(list(messages), rows, listed, options, given, kept, opening, (), "")

    def continued(
        self,
        known: WrittenChat,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, object],
        *,
        cpu_s: float = CPU_S,
    ) -> WrittenChat | None:
        """Render only the new messages of a conversation that extends a known conversation.

        The last known message is rendered again, since its text may depend on the next message.

        Returns:
            None if the conversation must be rendered as a whole.
        """
        kept = len(known.messages) - 1
        if self._going_on is None or kept < max(1, (self._head or 1) - 1):
            return None
        listed = _template_tools(tools) if tools else []
        if listed != known.tools or options != known.options:
            return None
        new = [self._row(message) for message in messages[kept + 1 :]]
        texts = _texts(new, [])
        if self._reserved is not None and self._reserved.search(texts) is not None:
            return None
        rows, given = [*known.rows, *new], known.given + len(texts)
        more = {NEW: rows[kept:], KEPT: kept}
        try:
            parts = self._rendered(self._going_on, rows, listed, {**options, **more}, cpu_s, given)
        except Exception:  # noqa: BLE001 - a template's: the whole one says the same to the client
            return None
        before, *own, behind = parts
        if before != known.before or len(own) != len(rows) - kept:
            return None
        return WrittenChat(messages, rows, listed, options, given, kept, before, own, behind)

    def _with_marks(self, value: Any, mark: str) -> Any:
        """Return `value` with `mark` inserted after the first character of each reserved text."""
        if isinstance(value, str):
            return self._first_character.sub(rf"\1{mark}", value)
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return {
                self._with_marks(key, mark): self._with_marks(item, mark) for key, item in items
            }
        if isinstance(value, list):
            return [self._with_marks(item, mark) for item in cast("list[Any]", value)]
        return value

    def _rendered(
        self,
        template: Template,
        rows: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        options: Mapping[str, object],
        cpu_s: float,
        given: int,
    ) -> list[str]:
        values = {
            **options,
            **self._special_tokens,
            "messages": rows,
            "tools": tools or None,
            "add_generation_prompt": True,
        }
        return self._environment.render(template, values, RenderBudget(cpu_s, given))

    def _row(self, message: Message) -> dict[str, Any]:
        role: str = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        row: dict[str, Any] = {"role": role, "content": message.text()}
        if message.reasoning_content is not None:
            row["reasoning_content"] = message.reasoning_content
        if message.name is not None:
            row["name"] = message.name
        if message.tool_call_id is not None:
            row["tool_call_id"] = self._call_id(message.tool_call_id)
        if message.tool_calls:
            row["tool_calls"] = [
                {
                    "id": self._call_id(call.id),
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        return row

    def _call_id(self, call_id: str) -> str:
        if not self._wants_short_ids or _SHORT_CALL_ID.fullmatch(call_id):
            return call_id
        return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]


def _template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools as dicts for templates, or raise BadRequestError if nested too deeply."""
    listed = [tool.model_dump(exclude_none=True) for tool in tools]
    if _levels(listed) > _LEVELS_MAX:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST,
            f"Invalid value for 'tools': a tool has at most {_LEVELS_MAX} levels.",
            param="tools",
        )
    return listed


def _levels(value: object) -> int:
    """Return the depth of nested objects and lists. Counting stops above `_LEVELS_MAX`."""
    level, levels = [value], 0
    while level and levels <= _LEVELS_MAX:
        level = list(chain.from_iterable(map(_below, level)))
        levels += bool(level)
    return levels


def _below(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return cast("dict[Any, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _arguments(text: str) -> object:
    """Return a call's arguments as an object, which templates expect instead of JSON text.

    Text that is not JSON, or is nested too deeply, is returned unchanged.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError):
        return text
    return text if _levels(value) > _LEVELS_MAX else value


def _texts(rows: list[dict[str, Any]], listed: list[dict[str, Any]]) -> str:
    """Return all strings in messages and tools joined, with a filler for all other values.

    The result is searched for special tokens. A match that spans two strings is harmless, because
    prompts are cut only at tokens inside a single string.
    """
    found: list[str] = []
    for row in rows:
        _collect(row, found)
    if listed:
        _collect(listed, found)
    return _BETWEEN.join(found)


def _collect(value: object, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict) and value:
        items = cast("dict[str, object]", value)
        found += items  # keys are always strings, because the value was read from JSON
        for item in items.values():
            # Nearly all items are strings, so this branch avoids a call for each of them.
            if isinstance(item, str):
                found.append(item)
            else:
                _collect(item, found)
    elif isinstance(value, list) and value:
        for item in cast("list[object]", value):
            _collect(item, found)
    else:
        found.append(_BETWEEN)


def _unused_mark(texts: str) -> str:
    mark = next((mark for mark in _MARKS if mark not in texts), None)
    if mark is None:
        raise TemplateError("they hold all noncharacters of Unicode at once")
    return mark
