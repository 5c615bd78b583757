"""Tool calls in the form of Hermes, Qwen 2.5 and 3, and our own model.

Pure. `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one pair of marks for each call.
"""

from collections.abc import Callable
from dataclasses import dataclass

import orjson

from gateway.dialects.marks import Marks, behind_space
from gateway.dialects.scanner import CallScanner

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_OPEN, _CLOSE = OPENING, CLOSING
_CLOSING = Marks(CLOSING)


class HermesParser(CallScanner):
    """Splits an answer into plain text and calls."""

    __slots__ = ()

    openings = Marks(OPENING)

    def after_opening(self, text: str, at: int) -> int:
        """Expect the object of a call."""
        self.open_object()
        return self.in_object(text, at)

    def after_object(self, text: str, at: int) -> int:
        """Take the closing mark; models that are cut short, or hurried, leave it out."""
        at = behind_space(text, at)
        mark = _CLOSING.at(text, at)
        if mark is None:
            return at
        self.step = self.after_call
        return at + len(mark)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call; `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str

    def as_dict(self) -> dict[str, object]:
        """Return it as OpenAI writes it."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolCallParser:
    """Splits a text that arrives in pieces into plain text and calls."""

    __slots__ = ("_held", "_is_after_call", "_is_inside", "_new_call_id", "calls")

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        """Prepare; `new_call_id` names each call."""
        self._new_call_id = new_call_id
        self._held = ""
        self._is_inside = False
        self._is_after_call = False  # and no text has come since
        self.calls: list[ParsedCall] = []

    def push(self, text: str) -> str:
        """Return the plain text among what came so far; whole calls are added to `calls`."""
        self._held += text
        shown = ""
        while True:
            mark = _CLOSE if self._is_inside else _OPEN
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._held = after
            shown += self._call_or_text(before, mark) if self._is_inside else self._text(before)
            self._is_inside = not self._is_inside
        if self._is_inside:
            return shown
        keep = _overlap(self._held, _OPEN)
        shown += self._text(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Return what was held back; a call without its end mark counts if it is whole."""
        held, self._held = self._held, ""
        shown = self._call_or_text(held, "") if self._is_inside else self._text(held)
        self._is_inside = False
        return shown

    def _call_or_text(self, body: str, end: str) -> str:
        call = self._parsed(body)
        if call is None:
            return self._text(_OPEN + body + end)
        self.calls.append(call)
        self._is_after_call = True
        return ""

    def _parsed(self, body: str) -> ParsedCall | None:
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", {})
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        return ParsedCall(self._new_call_id(), value["name"], text)

    def _text(self, text: str) -> str:
        """Return what to show of plain text: not the line breaks that models write after calls."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        return text


def _overlap(text: str, mark: str) -> int:
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
