"""Chat templates: messages to the one string that the model was trained to continue.

Templates come with the weights, so they are code from elsewhere: they run sandboxed, and what they
may write is bounded. The environment is that of Hugging Face's `apply_chat_template`.

Only the template may write special tokens. Where callers write the text of one, the prompt is cut
inside that text, so that the tokenizer, which reads each piece by itself, sees nothing special.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.bodies.chat import Message, Tool
from sluice.errors import BadRequestError, ErrorCode

# A template adds some marks per message; one that writes much more than it was given is broken.
_OUTPUT_FACTOR = 4
_OUTPUT_ALLOWANCE = 64 << 10

# Noncharacters of Unicode: one that the caller does not use marks where a prompt is cut.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class TemplateError(Exception):
    """The template itself called `raise_exception`; the message is the template's."""


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and &, which models are not trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - what the templates of Llama 3 expect


class ChatTemplate:
    """A compiled template with the special tokens it may refer to."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], reserved: Collection[str] = ()
    ) -> None:
        """Compile; jinja2.TemplateSyntaxError when `source` is not a template.

        Args:
            source: In Jinja.
            special_tokens: What the template may refer to by name.
            reserved: Texts that the tokenizer reads as special tokens.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _tojson
        known = cast("dict[str, Any]", environment.globals)
        known.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        self._knows_developer = "developer" in source
        words = "|".join(map(re.escape, sorted(reserved, key=len, reverse=True)))
        self._reserved = re.compile(words) if words else None
        self._first_character = re.compile(f"(?={words})(.)", re.DOTALL)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the prompt text; BadRequestError when these messages do not fit the template."""
        return "".join(self.pieces(messages, tools))

    def pieces(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[str]:
        """Return the prompt text cut for the tokenizer, nearly always in one piece.

        BadRequestError when these messages do not fit the template.
        """
        rows = [self._row(message) for message in messages]
        try:
            listed = [tool.model_dump(exclude_none=True) for tool in tools]
            if not self._has_reserved([rows, listed]):
                return [self._written(rows, listed)]
            mark = _unused_mark([rows, listed])
            rows, listed = self._marked(rows, mark), self._marked(listed, mark)
            return self._written(rows, listed).split(mark)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            raise BadRequestError(
                ErrorCode.INVALID_REQUEST,
                f"These messages do not fit the model's chat template: {error}",
                param="messages",
            ) from None

    def _has_reserved(self, value: object) -> bool:
        find = self._reserved
        return find is not None and any(map(find.search, _strings(value)))

    def _marked(self, value: Any, mark: str) -> Any:
        """Return `value` with a mark after the first character of every special token's text."""
        if isinstance(value, str):
            return self._first_character.sub(rf"\1{mark}", value)
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value).items()
            return {self._marked(key, mark): self._marked(item, mark) for key, item in items}
        if isinstance(value, list):
            return [self._marked(item, mark) for item in cast("list[Any]", value)]
        return value

    def _written(self, rows: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        size_max = _OUTPUT_ALLOWANCE + _OUTPUT_FACTOR * (_size(rows) + _size(tools))
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(
            messages=rows,
            tools=tools or None,
            add_generation_prompt=True,
            **self._special_tokens,
        ):
            pieces.append(piece)
            size += len(piece)
            if size > size_max:
                raise TemplateError("it writes far more than it was given")
        return "".join(pieces)

    def _row(self, message: Message) -> dict[str, Any]:
        role: str = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        row: dict[str, Any] = {"role": role, "content": message.text()}
        if message.name is not None:
            row["name"] = message.name
        if message.tool_call_id is not None:
            row["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            row["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        return row


def _arguments(text: str) -> object:
    """Return the arguments as the object that templates expect; invalid JSON stays a string."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError):
        return text
    return value


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast("dict[Any, object]", value).items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _strings(item)


def _unused_mark(value: object) -> str:
    used: set[str] = set()
    for text in _strings(value):
        used.update(mark for mark in _MARKS if mark in text)
    mark = next((mark for mark in _MARKS if mark not in used), None)
    if mark is None:
        raise TemplateError("they hold all noncharacters of Unicode at once")
    return mark


def _size(value: object) -> int:
    """Return the characters of all strings in `value`, plus a little for every container."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 8 + sum(len(str(key)) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return 8 + sum(map(_size, value))
    return 8
