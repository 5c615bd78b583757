"""Types for a piece of a model's output, which has content, reasoning and tool calls. Pure."""

from typing import NamedTuple, Protocol


class CallDelta(NamedTuple):
    """A piece of a tool call, as OpenAI streams it.

    Attributes:
        index: Index of the call in the answer.
        arguments: Next piece of the arguments' JSON text. All pieces together are one JSON object.
        call_id: Id of the call, in its first piece only.
        name: Name of the function, in the first piece of the call only.
    """

    index: int  # pyright: ignore[reportIncompatibleMethodOverride] - no search in a delta
    arguments: str = ""
    call_id: str = ""
    name: str = ""


class AnswerDelta(NamedTuple):
    """The content, reasoning and tool calls that a piece of the model's text contains."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


NOTHING = AnswerDelta()


def joined(first: AnswerDelta, second: AnswerDelta) -> AnswerDelta:
    """Return two consecutive deltas as one delta."""
    return AnswerDelta(
        first.content + second.content,
        first.reasoning + second.reasoning,
        first.calls + second.calls,
    )


class OutputParser(Protocol):
    """Splits the text of one answer into content, reasoning and calls.

    The text arrives in pieces, and its output does not depend on where the pieces are cut.
    """

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was begun."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether no text may follow, e.g. after the only call that the client allows."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text belongs to the model's reasoning."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether all further text is content, so that the parser may be skipped from now on."""
        ...

    def push(self, text: str) -> AnswerDelta:
        """Parse the next piece of text, and return the delta that it adds to the answer."""
        ...

    def flush(self) -> AnswerDelta:
        """Return the text that was held back to wait for more, because the answer has ended."""
        ...
