"""Parses tool calls in the form of Hermes, of Qwen 2.5 and 3, and of Sluice's own model. Pure.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Each call has its own pair of
marks.
"""

from gateway.dialects.marks import TOOL_CALL, TOOL_CALL_END, Marks, behind_space
from gateway.dialects.scanner import CallScanner

_CLOSING = Marks(TOOL_CALL_END)


class HermesParser(CallScanner):
    """Splits an answer into plain text and calls."""

    __slots__ = ()

    openings = Marks(TOOL_CALL)

    def after_opening(self, text: str, at: int) -> int:
        """Expect the JSON object of a call."""
        self.open_object()
        return self.in_object(text, at)

    def after_object(self, text: str, at: int) -> int:
        """Consume the closing mark, which some models omit."""
        at = behind_space(text, at)
        mark = _CLOSING.at(text, at)
        if mark is None:
            return at
        self.step = self.after_call
        return at + len(mark)
