"""The interface between an API and the tool loop, with round tasks and event writers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.bodies.messages import Message
from gateway.endpoints.task import TextTask
from gateway.tools.loop import LoopCall
from gateway.tools.plan import PlannedTool
from sluice.errors import PlatformError


@dataclass(frozen=True, slots=True)
class RoundCall:
    """A tool call of the model in a round.

    Attributes:
        item_id: Id of the call.
        arguments: Arguments in the model's own text.
        tool: Server tool, or None if the client runs the call.
    """

    item_id: str
    arguments: str
    tool: PlannedTool | None


class ApprovedCall:
    """A call that a person has approved.

    Attributes:
        request_id: Id of the approval request's item.
        tool: The tool.
        arguments: Arguments in the model's own text.
    """

    __slots__ = ("arguments", "request_id", "tool")

    def __init__(self, request_id: str, tool: PlannedTool, arguments: str) -> None:
        self.request_id, self.tool, self.arguments = request_id, tool, arguments

    def call(self, item_id: str) -> LoopCall:
        """Return the call in the form of the tool loop."""
        return self.tool.call(item_id, self.arguments, is_approved=True)


class RoundEvents(Protocol):
    """The writer of one stream's events over all its rounds."""

    round_calls: list[RoundCall]
    round_reason: str

    @property
    def has_begun(self) -> bool:
        """Whether the first events were sent."""
        ...

    def first(self) -> bytes:
        """Return the events that begin the stream."""
        ...

    def begin_approved(self, request_id: str, tool: PlannedTool, arguments: str) -> str:
        """Open the item of an approved call, and return the item's id."""
        ...

    def answer(self, item_id: str, output: str, failure: str | None) -> bytes:
        """Return the events that end a call."""
        ...

    def end_as(self, reason: str) -> None:
        """Set the reason of the end, which is a finish reason or a used-up budget."""
        ...


class TaskRounds(Protocol):
    """The rounds of one answer, and the result of the last round."""

    @property
    def approved(self) -> Sequence[ApprovedCall]:
        """Calls that a person has approved."""
        ...

    @property
    def events(self) -> RoundEvents:
        """The writer of the answer's events."""
        ...

    @property
    def usage(self) -> dict[str, object] | None:
        """Usage of the last round, or None if that round failed."""
        ...

    @property
    def error(self) -> PlatformError | None:
        """Error of the last round, if it failed after it began."""
        ...

    def commit(self) -> None:
        """End the round successfully, so that the next round continues after its events."""
        ...

    def messages(self) -> list[Message]:
        """Return the chat messages of the next round, for `RoundTask.next_round`."""
        ...


class RoundTask(Protocol):
    """The task of an answer with server tools. The object is also a `TextTask`."""

    @property
    def stream(self) -> bool | None:
        """Whether the client has requested a stream."""
        ...

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def rounds(self) -> TaskRounds:
        """Rounds of the answer."""
        ...

    @property
    def max_tool_calls(self) -> int | None:
        """Maximum number of tool calls in the answer, or None if the request sets no bound."""
        ...

    @property
    def answer_id(self) -> str:
        """Id of the whole answer."""
        ...

    @property
    def output_tokens_max(self) -> int | None:
        """Maximum output tokens of all rounds, or None if only the context bounds the output."""
        ...

    def begin_rounds(self, uid: str) -> None:
        """Create the event writers, before any request is submitted."""
        ...

    def next_round(
        self, messages: Sequence[Message], tokens_left: int | None, *, is_first: bool
    ) -> TextTask:
        """Return the task of the next round."""
        ...

    async def ended(self, usage: Mapping[str, Any], ended_unix_s: int) -> tuple[bytes, bytes]:
        """Return the end of the stream, and the complete answer as JSON."""
        ...

    def failed(self, error: PlatformError) -> tuple[bytes, bytes]:
        """Return the end of a stream that failed after its start, and the complete answer.

        Raises PlatformError if a complete answer of this API cannot report an error.
        """
        ...


def output_tokens_of(usage: Mapping[str, Any]) -> int:
    """Return the output tokens of a usage object of any API."""
    return int(usage.get("output_tokens", usage.get("completion_tokens", 0)))
