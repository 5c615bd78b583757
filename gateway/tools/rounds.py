"""The seam between an API and the loop over rounds: tasks of rounds, and writers of events."""

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
    """A call by the model in a round.

    Attributes:
        item_id: Id of the call.
        arguments: Arguments as the model wrote them.
        tool: Server tool; None: the client runs the call.
    """

    item_id: str
    arguments: str
    tool: PlannedTool | None


class ApprovedCall:
    """A call that a person has approved or refused.

    Attributes:
        request_id: Id of the approval request's item.
        tool: The tool.
        arguments: Arguments as the model wrote them.
    """

    __slots__ = ("arguments", "request_id", "tool")

    def __init__(self, request_id: str, tool: PlannedTool, arguments: str) -> None:
        self.request_id, self.tool, self.arguments = request_id, tool, arguments

    def call(self, item_id: str) -> LoopCall:
        """Return the call to run."""
        return self.tool.call(item_id, self.arguments, is_approved=True)


class RoundEvents(Protocol):
    """The writer of a stream over all its rounds."""

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
        """Open an approved call; return its id."""
        ...

    def answer(self, item_id: str, output: str, failure: str | None) -> bytes:
        """Return the events that end a call."""
        ...

    def end_as(self, reason: str) -> None:
        """Set the reason of the end: a finish reason, or a budget."""
        ...


class TaskRounds(Protocol):
    """The rounds of one answer, and the result of the last one."""

    @property
    def approved(self) -> Sequence[ApprovedCall]:
        """Calls that a person has approved or refused."""
        ...

    @property
    def events(self) -> RoundEvents:
        """Writer of the events."""
        ...

    @property
    def usage(self) -> dict[str, object] | None:
        """Usage of the last round; None: it failed."""
        ...

    @property
    def error(self) -> PlatformError | None:
        """Error of the last round, if it failed after it began."""
        ...

    def commit(self) -> None:
        """End the round: the next one continues behind it."""
        ...

    def messages(self) -> list[Message]:
        """Return the turns of the next round, as `RoundTask.next_round` takes them."""
        ...


class RoundTask(Protocol):
    """The task of an answer with server tools; also a `TextTask`."""

    @property
    def stream(self) -> bool | None:
        """Whether the client gets a stream."""
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
        """Calls that the answer may have; None: no bound."""
        ...

    @property
    def answer_id(self) -> str:
        """Id of the whole answer."""
        ...

    @property
    def output_tokens_max(self) -> int | None:
        """Tokens of all rounds' output; None: no bound besides the context."""
        ...

    def begin_rounds(self, uid: str) -> None:
        """Prepare the writers; no request is submitted yet."""
        ...

    def next_round(
        self, messages: Sequence[Message], tokens_left: int | None, *, is_first: bool
    ) -> TextTask:
        """Return the task of the next round."""
        ...

    async def ended(self, usage: Mapping[str, Any], ended_unix_s: int) -> tuple[bytes, bytes]:
        """Return the end of the stream, and the whole answer."""
        ...

    def failed(self, error: PlatformError) -> tuple[bytes, bytes]:
        """Return the end of a stream that failed after it began, and the whole answer.

        PlatformError: a whole answer of this API cannot report it.
        """
        ...


def output_tokens_of(usage: Mapping[str, Any]) -> int:
    """Return the tokens of output in a usage of any API."""
    return int(usage.get("output_tokens", usage.get("completion_tokens", 0)))
