"""Parses reasoning at the beginning of an answer, between a pair of marks. Pure."""

import re

from gateway.dialects.delta import AnswerDelta, OutputParser, joined
from gateway.dialects.marks import Marks, ReasoningMarks, behind_space, matched

# White space before an answer, and in empty lines there, is dropped up to this number of
# characters. Longer white space is part of the answer.
_SPACE_CHARACTERS_MAX = 64
_EMPTY_LINES = re.compile(rf"(?:[ \t]{{0,{_SPACE_CHARACTERS_MAX}}}[\r\n])*")


class ReasoningParser:
    """Separates reasoning from an answer. The parser `after` parses the text after the reasoning.

    Marks after the beginning of the answer are text, because an answer may mention marks.
    """

    __slots__ = ("_after", "_closing", "_is_forced", "_opening", "_rest", "_step")

    def __init__(
        self,
        marks: ReasoningMarks,
        after: OutputParser | None,
        *,
        is_open: bool,
        is_forced: bool = False,
    ) -> None:
        """Start before the first text.

        Args:
            marks: Marks of the model family.
            after: Parser of the text after the reasoning, or None if that text is content.
            is_open: Whether the prompt ends with the opening mark, so that the answer begins inside
                the reasoning.
            is_forced: Whether only calls may follow. Then an incomplete opening mark is not shown
                as text.
        """
        self._is_forced = is_forced
        self._opening, self._closing = Marks(marks.opening), Marks(marks.closing)
        self._after = after
        self._step = self._before_text if is_open else self._before_mark
        self._rest = ""

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was begun."""
        return self._after is not None and self._after.has_calls

    @property
    def is_complete(self) -> bool:
        """Whether no text may follow."""
        return self._after is not None and self._after.is_complete

    @property
    def is_reasoning(self) -> bool:
        """Whether reasoning has been opened, in the answer or the prompt, and not yet closed."""
        return self._step in (self._before_text, self._in_text)

    @property
    def is_plain(self) -> bool:
        """Whether all further text is content."""
        return self._step == self._behind and (self._after is None or self._after.is_plain)

    def push(self, text: str) -> AnswerDelta:
        """Parse the next piece of text, and return the delta that it adds to the answer."""
        text, self._rest = self._rest + text, ""
        return self._step(text)

    def flush(self) -> AnswerDelta:
        """Return the text that was held back to wait for more, because the answer has ended."""
        rest, self._rest = self._rest, ""
        if self._step == self._in_text:
            return AnswerDelta("", rest)
        if self._is_forced and self._step == self._before_mark:
            return AnswerDelta()
        self._step = self._behind
        delta = self._behind(rest)
        return delta if self._after is None else joined(delta, self._after.flush())

    def _before_mark(self, text: str) -> AnswerDelta:
        at = behind_space(text, 0)
        mark = self._opening.at(text, at)
        if mark is None and at <= _SPACE_CHARACTERS_MAX:
            self._rest = text
            return AnswerDelta()
        if not mark or at > _SPACE_CHARACTERS_MAX:
            self._step = self._behind
            return self._behind(text)
        self._step = self._before_text
        return self._before_text(text[at + len(mark) :])

    def _before_text(self, text: str) -> AnswerDelta:
        """Drop the white space after the opening mark."""
        at = behind_space(text, 0)
        if at == len(text):
            return AnswerDelta()
        self._step = self._in_text
        return self._in_text(text[at:])

    def _in_text(self, text: str) -> AnswerDelta:
        at, mark = self._closing.first(text, 0)
        if not mark:
            self._rest = text[at:]
            return AnswerDelta("", text[:at])
        self._step = self._before_answer
        return joined(AnswerDelta("", text[:at]), self._before_answer(text[at + len(mark) :]))

    def _before_answer(self, text: str) -> AnswerDelta:
        """Drop empty lines after the closing mark. Spaces are kept if the answer follows them."""
        at = len(matched(_EMPTY_LINES, text, 0))
        spaces = behind_space(text, at) - at
        if at + spaces == len(text) and spaces <= _SPACE_CHARACTERS_MAX:
            self._rest = text[at:]
            return AnswerDelta()
        self._step = self._behind
        return self._behind(text[at:])

    def _behind(self, text: str) -> AnswerDelta:
        if not text:
            return AnswerDelta()
        return AnswerDelta(text) if self._after is None else self._after.push(text)
