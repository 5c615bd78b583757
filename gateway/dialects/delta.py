"""The meaning of a piece of a model's text: content, reasoning, tool calls. Pure."""

from typing import NamedTuple, Protocol


class CallDelta(NamedTuple):
    """A piece of a tool call, as OpenAI streams it.

    Attributes:
        index: Index of the call in the answer.
        arguments: The next piece of its JSON text; all pieces together are one JSON object.
        call_id: Id of the call, in its first piece only.
        name: Name of the function, in the first piece of the call only.
    """

    index: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody searches in a delta
    arguments: str = ""
    call_id: str = ""
    name: str = ""


class AnswerDelta(NamedTuple):
    """The addition of a piece of text to the answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


NOTHING = AnswerDelta()


def joined(first: AnswerDelta, second: AnswerDelta) -> AnswerDelta:
    """Return what two deltas add, one after the other."""
    return AnswerDelta(
        first.content + second.content,
        first.reasoning + second.reasoning,
        first.calls + second.calls,
    )


class OutputParser(Protocol):
    """Splits the text of one answer, which arrives in pieces cut anywhere.

    The sum of what it gives out does not depend on how the text was cut.
    """

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was begun."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow, e.g. after the one call that the client allows."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes now belongs to the model's reasoning."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether all that follows is content as it comes: the parser may be left out from now."""
        ...

    def push(self, text: str) -> AnswerDelta:
        """Take the next piece."""
        ...

    def flush(self) -> AnswerDelta:
        """Return what was held back: the text has ended."""
        ...
