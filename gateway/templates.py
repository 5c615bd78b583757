"""Chat templates: messages to the one string that the model was trained to continue.

Templates come with the weights, so they are code from elsewhere: they run sandboxed, and what they
may write is bounded. The environment is that of Hugging Face's `apply_chat_template`.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.chat_request import Message, Tool
from sluice.errors import BadRequestError, ErrorCode

# A template adds some marks per message; one that writes much more than it was given is broken.
_OUTPUT_FACTOR = 4
_OUTPUT_ALLOWANCE = 64 << 10


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

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compile; jinja2.TemplateSyntaxError when `source` is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _tojson
        known = cast("dict[str, Any]", environment.globals)
        known.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        self._knows_developer = "developer" in source

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the prompt text; BadRequestError when these messages do not fit the template."""
        rows = [self._row(message) for message in messages]
        listed = [tool.model_dump(exclude_none=True) for tool in tools]
        try:
            return self._written(rows, listed)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            raise BadRequestError(
                ErrorCode.INVALID_REQUEST,
                f"These messages do not fit the model's chat template: {error}",
                param="messages",
            ) from None

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
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _size(value: object) -> int:
    """Return the characters of all strings in `value`, plus a little for every container."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 8 + sum(len(str(key)) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return 8 + sum(map(_size, value))
    return 8
