"""The parts of a piece of a model's output: content, reasoning and tool calls. Pure."""

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
    """The content, reasoning and calls that a piece of text adds to the answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


NOTHING = AnswerDelta()


def joined(first: AnswerDelta, second: AnswerDelta) -> AnswerDelta:
    """Return the sum of two consecutive deltas."""
    return AnswerDelta(
        first.content + second.content,
        first.reasoning + second.reasoning,
        first.calls + second.calls,
    )


class OutputParser(Protocol):
    """Splits the text of one answer, which arrives in pieces cut anywhere.

    The concatenated output does not depend on the cuts.
    """

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was begun."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether no text may follow, e.g. after the one call that the client allows."""
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
        """Parse the next piece, and return its contribution to the answer."""
        ...

    def flush(self) -> AnswerDelta:
        """Return the text that waited for more text, because the answer has ended."""
        ...
