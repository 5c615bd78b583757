"""The base class of all call parsers, which parses plain text, marks, and calls as JSON objects."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from gateway.dialects.call_object import CallObject
from gateway.dialects.call_writer import CallWriter
from gateway.dialects.delta import NOTHING, AnswerDelta
from gateway.dialects.marks import Marks, behind_space

# Maximum amount of white space before a call. Longer white space is text. Models write one line
# break.
_SPACE_CHARACTERS_MAX = 256

Step = Callable[[str, int], int]
"""Signature of a state's method. It receives the text and an index, and returns the next index.

If a state needs more text, it returns the index of the unconsumed text. The same text is passed to
the state again, together with the next piece.
"""


class CallScanner(ABC):
    """A state machine that parses an answer, with one method per state. Subclasses add states.

    Each state's method receives the text and an index, and returns the index after the characters
    that it has consumed.

    Attributes:
        openings: Marks after which a call is expected.
        calls: Collects the calls.
        step: Method of the present state.
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
        """Prepare.

        Args:
            new_call_id: Returns the id of each call.
            is_parallel: Whether several calls are allowed. If not, one call ends the answer.
            is_forced: Whether the engine allows only calls, so that an incomplete call is not shown
                as text.
        """
        self.calls = CallWriter(new_call_id)
        self._is_forced = is_forced
        self._is_parallel = is_parallel
        self._content: list[str] = []
        self._spaces = 0  # consecutive white space before a call
        self._suspects: list[str] = []  # text that belongs to a call, if a call follows
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
        """Always false, because another parser has removed the reasoning before."""
        return False

    @property
    def is_plain(self) -> bool:
        """Always false, because a call may follow."""
        return False

    def push(self, text: str) -> AnswerDelta:
        """Parse the next piece, and return its contribution to the answer."""
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
        """Return the text that waited for more text, because the answer has ended."""
        if not self.is_complete and not self._is_forced:
            self._release()
            # After a call, the rest is the beginning of its closing mark.
            self.show("" if self.step == self.after_object else self._rest)
            self._rest = ""
        return self._delta()

    def begin(self, text: str, at: int) -> int:
        """Consume the first characters of the answer."""
        self.step = self.plain
        return self.plain(text, at)

    def plain(self, text: str, at: int) -> int:
        """Show text up to a mark that begins a call."""
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
        """Consume the characters of a call that is one JSON object."""
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
            has not arrived yet, or if there is so much white space that it counts as text.
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
        """Expect a call that is one JSON object with one of `names`, or with any name if None."""
        self._object = CallObject(self.calls, names)
        self.step = self.in_object

    def end_call(self) -> None:
        """Record the end of a whole call."""
        self.is_complete = not self._is_parallel
        self.step = self.after_object

    def show(self, text: str) -> None:
        """Emit plain text."""
        if text:
            self._content.append(text)

    def suspect(self, text: str) -> None:
        """Store text that belongs to a call, if a call follows."""
        if text:
            self._suspects.append(text)

    def confirm(self) -> None:
        """Drop the stored text, because it began a call."""
        self._suspects.clear()

    def give_up(self) -> None:
        """Show the stored text as content, because it began no call or a broken call."""
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
