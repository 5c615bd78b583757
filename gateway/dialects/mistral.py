"""Parses tool calls in the forms of Mistral. Pure.

Models with one of Mistral's first three tokenizers write `[TOOL_CALLS][{"name": ..., "arguments":
{...}}, ...]`. Models since the eleventh tokenizer write `[TOOL_CALLS]name[ARGS]{...}` for each
call. Some of these models omit `[ARGS]`, and some insert `[CALL_ID]`.
"""

import re
from collections.abc import Callable

from gateway.dialects.json_text import JsonText
from gateway.dialects.marks import ARGUMENTS, CALL_ID, TOOL_CALLS, Marks, behind_space, matched
from gateway.dialects.scanner import CallScanner

_NAME_CHARACTERS_MAX = 128
_ID_CHARACTERS_MAX = 64
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_IDENTIFIER = re.compile(r"[^\[{]*")
_AFTER_NAME = Marks(ARGUMENTS, CALL_ID)


class MistralParser(CallScanner):
    """Splits an answer into plain text and calls."""

    __slots__ = ("_arguments", "_is_list", "_name", "_seen")

    openings = Marks(TOOL_CALLS)

    def __init__(
        self, new_call_id: Callable[[], str], *, is_parallel: bool, is_forced: bool = False
    ) -> None:
        super().__init__(new_call_id, is_parallel=is_parallel, is_forced=is_forced)
        self._is_list = False
        self._name = ""
        self._seen = 0  # number of consumed characters of a call's id
        self._arguments = JsonText()

    def after_opening(self, text: str, at: int) -> int:
        """Expect either a list of calls or the name of one call."""
        at, character = self.next_character(text, at)
        if not character:
            return at
        self._is_list = character == "["
        if character in "[{":
            self.suspect("[" if self._is_list else "")
            self.open_object()
            return at + self._is_list
        self._name = ""
        self.step = self._in_name
        return at

    def after_object(self, text: str, at: int) -> int:
        """Consume the end of a list of calls, or the separator before its next call."""
        at = behind_space(text, at)
        if at == len(text):
            return at
        self.step = self.after_call
        if not self._is_list or text[at] not in ",]":
            return at
        if text[at] == ",":
            self.suspect(",")
            self.open_object()
        return at + 1

    def _in_name(self, text: str, at: int) -> int:
        name = matched(_NAME, text, at)
        self._name += name
        self.suspect(name)
        at += len(name)
        if len(self._name) > _NAME_CHARACTERS_MAX or (at < len(text) and not self._name):
            self.give_up()
        elif at < len(text):
            self.step = self._after_name
        return at

    def _after_name(self, text: str, at: int) -> int:
        at, character = self.next_character(text, at)
        if not character:
            return at
        if character == "{":
            return self._begin(at)
        mark = _AFTER_NAME.at(text, at)
        if mark is None:
            return at
        self.suspect(mark)
        if mark == ARGUMENTS:
            self.step = self._before_arguments
        elif mark == CALL_ID:
            self._seen = 0
            self.step = self._in_id
        else:
            self.give_up()
        return at + len(mark)

    def _in_id(self, text: str, at: int) -> int:
        """Skip the id that the model has written, because the gateway assigns its own ids."""
        identifier = matched(_IDENTIFIER, text, at)
        self.suspect(identifier)
        self._seen += len(identifier)
        at += len(identifier)
        if self._seen > _ID_CHARACTERS_MAX:
            self.give_up()
        elif at < len(text):
            self.step = self._after_name
        return at

    def _before_arguments(self, text: str, at: int) -> int:
        at, character = self.next_character(text, at)
        if character == "{":
            return self._begin(at)
        if character:
            self.give_up()
        return at

    def _begin(self, at: int) -> int:
        self.confirm()
        self.calls.begin(self._name)
        self._arguments = JsonText()
        self.step = self._in_arguments
        return at

    def _in_arguments(self, text: str, at: int) -> int:
        at, piece = self._arguments.take(text, at)
        self.calls.extend(piece)
        if self._arguments.is_complete:
            self.end_call()
        elif self._arguments.is_broken:
            self.give_up()
        return at
