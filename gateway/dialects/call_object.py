"""Parses a call as one JSON object, `{"name": ..., "arguments": {...}}`, incrementally. Pure.

The keys may have any order, and `parameters` is a synonym of `arguments`. The name is sent to the
client when it is complete, and the arguments are sent piece by piece.
"""

from collections.abc import Collection
from typing import Any

import orjson

from gateway.dialects.call_writer import CallWriter
from gateway.dialects.json_text import JsonText
from gateway.dialects.marks import behind_space

# Maximum number of characters of a call before its name ends. Longer text is not a call.
HELD_CHARACTERS_MAX = 64 << 10
_NAME_CHARACTERS_MAX = 512  # maximum number of characters of a name or key as JSON text
_ARGUMENTS_KEYS = ("arguments", "parameters")
# Other keys that are allowed in the object of a call without a mark.
_OTHER_KEYS = ("type", "id")


class CallObject:
    """The parser's state for one call that is written as a JSON object.

    Attributes:
        is_begun: Whether the text is certainly a call, so that its name was passed on.
        is_complete: Whether the object has ended and is a call.
        is_broken: Whether the text cannot be a call, or has stopped to be one.
    """

    __slots__ = (
        "_arguments",
        "_calls",
        "_captured",
        "_captured_characters",
        "_has_arguments",
        "_held",
        "_held_characters",
        "_key",
        "_names",
        "_step",
        "_value",
        "is_begun",
        "is_broken",
        "is_complete",
    )

    def __init__(self, calls: CallWriter, names: Collection[str] | None = None) -> None:
        """Expect the opening brace of the object.

        Args:
            calls: Receives the call.
            names: Names of the tools, or None after a mark. Without a mark, an object is a call
                only if it has one of these names.
        """
        self._calls = calls
        self._names = names
        self._step = self._opening
        self._value = JsonText()
        self._key = ""
        self._captured: list[str] = []  # pieces of a key or value, joined at its end
        self._captured_characters = 0
        self._arguments: list[str] = []  # pieces of arguments that have arrived before the name
        self._has_arguments = False
        self._held: list[str] = []
        self._held_characters = 0
        self.is_begun = self.is_complete = self.is_broken = False

    @property
    def text(self) -> str:
        """The consumed text, unchanged, or empty once `is_begun` is true."""
        return "".join(self._held)

    def take(self, text: str, start: int) -> int:
        """Consume the object's characters from `start` on, and return the index after them."""
        at = start
        while at < len(text) and not (self.is_complete or self.is_broken):
            begin = at
            at = self._step(text, at)
            if not self.is_begun:
                self._hold(text[begin:at])
        return at

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._held_characters += len(text)
        if self._held_characters > HELD_CHARACTERS_MAX:
            self.is_broken = True

    def _opening(self, text: str, at: int) -> int:
        return self._punctuation(text, at, {"{": self._first_key})

    def _first_key(self, text: str, at: int) -> int:
        return self._punctuation(text, at, {'"': self._in_key, "}": None})

    def _next_key(self, text: str, at: int) -> int:
        return self._punctuation(text, at, {'"': self._in_key})

    def _colon(self, text: str, at: int) -> int:
        return self._punctuation(text, at, {":": self._before_value})

    def _next(self, text: str, at: int) -> int:
        return self._punctuation(text, at, {",": self._next_key, "}": None})

    def _punctuation(self, text: str, at: int, steps: dict[str, Any]) -> int:
        """Consume a character that is a key of `steps`, and set its step. None ends the object."""
        at = behind_space(text, at)
        if at == len(text):
            return at
        if text[at] not in steps:
            self.is_broken = True
            return at
        step = steps[text[at]]
        if step is None:
            return self._end(at)
        self._step = step
        if text[at] != '"':
            return at + 1
        self._expect_value()
        return at

    def _expect_value(self) -> None:
        self._value, self._captured, self._captured_characters = JsonText(), [], 0

    def _end(self, at: int) -> int:
        if not self.is_begun:
            self.is_broken = True
            return at
        if not self._has_arguments:
            self._calls.extend("{}")
        self.is_complete = True
        return at + 1

    def _in_key(self, text: str, at: int) -> int:
        at = self._capture(text, at, _NAME_CHARACTERS_MAX)
        if self._value.is_complete and not self.is_broken:
            self._key = self._taken()
            is_known = self._key in ("name", *_ARGUMENTS_KEYS, *_OTHER_KEYS)
            self.is_broken |= self._names is not None and not is_known
            self._step = self._colon
        return at

    def _before_value(self, text: str, at: int) -> int:
        at = behind_space(text, at)
        if at == len(text):
            return at
        self._expect_value()
        self._step = self._skipped
        if self._key == "name" and not self.is_begun:
            self._step = self._in_name
        elif self._key in _ARGUMENTS_KEYS and not self._has_arguments:
            self._has_arguments = True
            self._step = self._in_arguments if text[at] == "{" else self._in_other_arguments
        return at

    def _in_name(self, text: str, at: int) -> int:
        behind = self._capture(text, at, _NAME_CHARACTERS_MAX)
        is_short = self._held_characters + behind - at <= HELD_CHARACTERS_MAX
        if self._value.is_complete and not self.is_broken and is_short:
            name = self._taken()
            self._step = self._next
            is_name = isinstance(name, str) and bool(name)
            if is_name and (self._names is None or name in self._names):
                self._begin(name)
            else:
                self.is_broken = True
        return behind

    def _begin(self, name: str) -> None:
        self.is_begun = True
        self._calls.begin(name)
        self._calls.extend("".join(self._arguments))
        self._held.clear()
        self._arguments.clear()

    def _in_arguments(self, text: str, at: int) -> int:
        at, piece = self._value.take(text, at)
        self._extend(piece)
        return self._after_value(at)

    def _in_other_arguments(self, text: str, at: int) -> int:
        """Consume arguments that are a string with JSON text in it, as some models write them."""
        at = self._capture(text, at, HELD_CHARACTERS_MAX)
        if self._value.is_complete and not self.is_broken:
            value = self._taken()
            whole = "".join(self._captured)
            self._extend(value if isinstance(value, str) else "{}" if value is None else whole)
        return self._after_value(at)

    def _extend(self, arguments: str) -> None:
        if self.is_begun:
            self._calls.extend(arguments)
        else:
            self._arguments.append(arguments)

    def _skipped(self, text: str, at: int) -> int:
        at, _ = self._value.take(text, at)
        return self._after_value(at)

    def _after_value(self, at: int) -> int:
        self.is_broken |= self._value.is_broken
        if self._value.is_complete:
            self._step = self._next
        return at

    def _capture(self, text: str, at: int, characters_max: int) -> int:
        at, piece = self._value.take(text, at)
        self._captured.append(piece)
        self._captured_characters += len(piece)
        self.is_broken |= self._value.is_broken or self._captured_characters > characters_max
        return at

    def _taken(self) -> Any:
        try:
            return orjson.loads("".join(self._captured))
        except orjson.JSONDecodeError:  # the text has half a surrogate pair
            self.is_broken = True
            return None
