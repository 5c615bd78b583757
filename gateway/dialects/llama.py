"""Parses tool calls in the forms of Llama 3 and 4. Pure.

Calls are either objects, `{"name": ..., "parameters": {...}}`, separated by semicolons, or a list
in Python's syntax, `[f(a=1), g()]`. They begin the answer or follow a mark.
"""

from collections.abc import Callable, Collection

from gateway.dialects.marks import PYTHON_END, PYTHON_START, PYTHON_TAG, Marks, behind_space
from gateway.dialects.python_call import PythonCall
from gateway.dialects.scanner import CallScanner

_BETWEEN = Marks(PYTHON_END, ";")


class LlamaParser(CallScanner):
    """Splits an answer into plain text and calls.

    Without a mark, an object or list is a call only if it names a known tool. Otherwise an answer
    that is JSON, or begins with a bracket, would be mistaken for a call.
    """

    __slots__ = ("_call", "_names")

    openings = Marks(PYTHON_TAG, PYTHON_START)

    def __init__(
        self,
        new_call_id: Callable[[], str],
        *,
        is_parallel: bool,
        names: Collection[str],
        is_forced: bool = False,
    ) -> None:
        """Start an answer. `names` are the request's tools. See also `CallScanner`."""
        super().__init__(new_call_id, is_parallel=is_parallel, is_forced=is_forced)
        self._names: Collection[str] | None = names  # None after a mark
        self._call = PythonCall(names)

    def begin(self, text: str, at: int) -> int:
        """Consume the first characters of the answer, which may begin a call without a mark."""
        return self._expect_call(text, at)

    def after_opening(self, text: str, at: int) -> int:
        """Expect a call. Other text after the mark is code for Meta's interpreter, and is shown."""
        self._names = None
        self.step = self._expect_call
        return self._expect_call(text, at)

    def after_object(self, text: str, at: int) -> int:
        """Consume the text after a call, which ends it or separates it from the next call."""
        at = behind_space(text, at)
        mark = _BETWEEN.at(text, at)
        if mark is None:
            return at
        if mark == ";" or text.startswith("{", at):
            self.suspect(mark)
            self.step = self._expect_next
        else:
            self.step = self.after_call
        return at + len(mark)

    def _expect_next(self, text: str, at: int) -> int:
        at, character = self.next_character(text, at)
        if character == "{":
            self.open_object(self._names)
        elif character:
            self.give_up()
        return at

    def _expect_call(self, text: str, at: int) -> int:
        at, character = self.next_character(text, at)
        if character == "[":
            self.suspect("[")
            self._open_python()
            return at + 1
        if character == "{":
            self.open_object(self._names)
        elif character:
            self.give_up()
        return at

    def _open_python(self) -> None:
        self._call = PythonCall(self._names)
        self.step = self._in_python

    def _in_python(self, text: str, at: int) -> int:
        behind = self._call.take(text, at)
        self.suspect(text[at:behind])
        if self._call.is_broken:
            self.give_up()
        elif self._call.is_complete:
            self.confirm()
            self.calls.begin(self._call.name)
            self.calls.extend(self._call.arguments)
            self.end_call()
            self.step = self._after_python
        return behind

    def _after_python(self, text: str, at: int) -> int:
        at, character = self.next_character(text, at)
        if not character:
            return at
        self.suspect(character)
        if character == ",":
            self._open_python()
        elif character == "]":
            self.confirm()
            self.step = self.after_object
        else:
            self.give_up()
        return at + 1
