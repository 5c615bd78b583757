"""The base class of call parsers, which parses plain text, marks, and calls as JSON objects."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from gateway.dialects.call_object import CallObject
from gateway.dialects.call_writer import CallWriter
from gateway.dialects.delta import NOTHING, AnswerDelta
from gateway.dialects.marks import Marks, behind_space

# Maximum number of white space characters before a call. Models write one line break, so longer
# white space is part of the text.
_SPACE_CHARACTERS_MAX = 256

Step = Callable[[str, int], int]
"""Signature of a state's method. It receives the text and an index, and returns the next index.

A state that needs more text returns the index of the first unconsumed character. Later the state
receives the same text again, together with the next piece.
"""


class CallScanner(ABC):
    """A state machine that parses an answer, with one method per state. Subclasses add states.

    Each method receives the text and an index. It returns the index after the characters that it
    has consumed.

    Attributes:
        openings: Marks after which a call is expected.
        calls: Collects the calls.
        step: Method of the current state.
    """

    openings: Marks

    __slots__ = (
        "_content",
        "_is_forced",
        "_is_parallel",
        "_object",
        "_rest",
        "_spaces",
        "_suspects",
        "calls",
        "is_complete",
        "step",
    )

    def __init__(
        self, new_call_id: Callable[[], str], *, is_parallel: bool, is_forced: bool = False
    ) -> None:
        """Start before the first text.

        Args:
            new_call_id: Returns a new id for each call.
            is_parallel: Whether several calls are allowed. If not, one call ends the answer.
            is_forced: Whether the engine allows only calls. Then an incomplete call is not shown as
                text.
        """
        self.calls = CallWriter(new_call_id)
        self._is_forced = is_forced
        self._is_parallel = is_parallel
        self._content: list[str] = []
        self._spaces = 0  # number of consecutive white space characters before a call
        self._suspects: list[str] = []  # text that is shown only if it turns out to be no call
        self._rest = ""
        self.is_complete = False
        self._object = CallObject(self.calls)
        self.step: Step = self.begin

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was begun."""
        return self.calls.count > 0

    @property
    def is_reasoning(self) -> bool:
        """Always false, because another parser has already removed the reasoning."""
        return False

    @property
    def is_plain(self) -> bool:
        """Always false, because a call may follow."""
        return False

    def push(self, text: str) -> AnswerDelta:
        """Parse the next piece of text, and return the delta that it adds to the answer."""
        if self.is_complete:
            return NOTHING
        text = self._rest + text
        at = 0
        while at < len(text) and not self.is_complete:
            step = self.step
            behind = step(text, at)
            if behind == at and step == self.step:
                break  # the state needs more text
            at = behind
        self._rest = "" if self.is_complete else text[at:]
        return self._delta()

    def flush(self) -> AnswerDelta:
        """Return the text that was held back to wait for more, because the answer has ended."""
        if not self.is_complete and not self._is_forced:
            self._release()
            # After a call, the rest can only be an incomplete closing mark, so it is not shown.
            self.show("" if self.step == self.after_object else self._rest)
            self._rest = ""
        return self._delta()

    def begin(self, text: str, at: int) -> int:
        """Consume the first characters of the answer."""
        self.step = self.plain
        return self.plain(text, at)

    def plain(self, text: str, at: int) -> int:
        """Emit text as content, up to a mark that begins a call."""
        start, mark = self.openings.first(text, at)
        self.show(text[at:start])
        if mark:
            self.suspect(mark)
            self.step = self.after_opening
        return start + len(mark)

    @abstractmethod
    def after_opening(self, text: str, at: int) -> int:
        """Consume the text after a mark that begins a call."""

    @abstractmethod
    def after_object(self, text: str, at: int) -> int:
        """Consume the text after a whole call."""

    def after_call(self, text: str, at: int) -> int:
        """Drop the white space that models write after calls."""
        at = behind_space(text, at)
        if at < len(text):
            self.step = self.plain
        return at

    def in_object(self, text: str, at: int) -> int:
        """Consume characters of a call that is one JSON object."""
        at = self._object.take(text, at)
        if self._object.is_begun:
            self.confirm()
        if self._object.is_complete:
            self.end_call()
        elif self._object.is_broken:
            self.give_up()
        return at

    def next_character(self, text: str, at: int) -> tuple[int, str]:
        """Consume white space before a call, and store it in case no call follows.

        Returns:
            The index after the white space, and the character there. The character is empty if it
                has not arrived yet, or if the white space is so long that it is part of the text.
        """
        behind = behind_space(text, at)
        self.suspect(text[at:behind])
        self._spaces += behind - at
        if self._spaces > _SPACE_CHARACTERS_MAX:
            self.give_up()
        elif behind < len(text):
            self._spaces = 0
            return behind, text[behind]
        return behind, ""

    def open_object(self, names: Collection[str] | None = None) -> None:
        """Expect a call as one JSON object, whose name must be in `names` unless it is None."""
        self._object = CallObject(self.calls, names)
        self.step = self.in_object

    def end_call(self) -> None:
        """Record the end of a whole call."""
        self.is_complete = not self._is_parallel
        self.step = self.after_object

    def show(self, text: str) -> None:
        """Emit text as content of the answer."""
        if text:
            self._content.append(text)

    def suspect(self, text: str) -> None:
        """Store text that is part of a call if a call follows, and content otherwise."""
        if text:
            self._suspects.append(text)

    def confirm(self) -> None:
        """Drop the stored text, because it was the beginning of a call."""
        self._suspects.clear()

    def give_up(self) -> None:
        """Emit the stored text as content, because no call or a broken call followed."""
        self._release()
        self.step = self.plain

    def _release(self) -> None:
        for text in (*self._suspects, self._object.text):
            self.show(text)
        self._suspects.clear()
        self._spaces = 0
        self._object = CallObject(self.calls)

    def _delta(self) -> AnswerDelta:
        if not self._content and not self.calls.is_waiting:
            return NOTHING
        content = "".join(self._content)
        self._content.clear()
        return AnswerDelta(content, "", self.calls.take())
