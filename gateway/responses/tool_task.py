"""A response with server tools: rounds of requests that write one lifecycle of events."""

from collections.abc import Callable, Sequence

from gateway.bodies.messages import Message
from gateway.dispatch.generation import GenerationSpec
from gateway.endpoints.task import StreamWriters
from gateway.responses.task import ResponseTask
from gateway.responses.tool_events import ToolEvents
from gateway.tools.loop import LoopCall
from gateway.tools.plan import PlannedTool, ToolPlan
from sluice.errors import PlatformError
from sluice.wire.engine.v1 import engine_pb2 as engine


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


class ToolRounds:
    """The rounds of one response: their writers, and the result of the last one.

    Attributes:
        plan: Server tools of the response.
        approved: Calls that a person has approved or refused.
        events: Writer of the events.
        usage: Usage of the last round; None: it failed.
        error: Error of the last round, if it failed after it began.
    """

    def __init__(
        self,
        plan: ToolPlan,
        render: Callable[[Sequence[bytes]], list[Message]],
        *,
        approved: Sequence[ApprovedCall] = (),
    ) -> None:
        """Prepare; `render` returns the turns with the items that the response has so far."""
        self.plan, self.render, self.approved = plan, render, approved
        self.events: ToolEvents
        self.usage: dict[str, object] | None = None
        self.error: PlatformError | None = None
        self._now: ToolEvents | None = None

    def writers(self, made: ToolEvents) -> StreamWriters:
        """Return the writers of a round."""
        self._now, self.usage, self.error = made, None, None
        return StreamWriters([made], self)

    def commit(self) -> None:
        """End the round: the next one continues behind it."""
        if self._now is not None:
            self.events, self._now = self._now, None

    async def last(self, usage: dict[str, object], ended_unix_s: int) -> bytes:
        """See `StreamEnd`; the response goes on."""
        del ended_unix_s
        self.usage = usage
        return b""

    def failure(self, error: PlatformError) -> bytes:
        """See `StreamEnd`; the response reports it."""
        self.error = error
        return b""


class ToolResponseTask(ResponseTask):
    """A response with server tools, or one round of it.

    Attributes:
        rounds: Rounds of the response.
        max_tool_calls: Calls that the response may have; None: no bound.
    """

    rounds: ToolRounds
    max_tool_calls: int | None = None

    def begin_rounds(self, model: str) -> None:
        """Prepare the writers; no request is submitted yet."""
        frame = self._frame(model, engine.Sampling(temperature=1.0, top_p=1.0))
        plan, keeping = self.rounds.plan, self.keeping
        self.rounds.events = ToolEvents(
            frame,
            plan.tools,
            plan.servers,
            will_be_stored=keeping is not None and keeping.is_storing,
            compaction=self.compaction,
        )

    def stream_writers(
        self,
        uid: str,
        *,
        model: str,
        created_unix_s: int,
        fingerprint: str,
        specs: Sequence[GenerationSpec],
    ) -> StreamWriters:
        """See `TextTask`."""
        del fingerprint, uid, created_unix_s
        made = self.rounds.events.next_round(
            self._frame(model, specs[0].sampling, specs[0].dropped_turns)
        )
        if self.keeping is not None:
            self.keeping.begin(made)
        return self.rounds.writers(made)
