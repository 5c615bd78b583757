"""A response with server tools, whose several rounds write one sequence of events."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.bodies.messages import Message
from gateway.dispatch.generation import GenerationSpec
from gateway.endpoints.task import StreamWriters
from gateway.responses.task import ResponseTask
from gateway.responses.tool_events import ToolEvents
from gateway.tools.plan import ToolPlan
from gateway.tools.rounds import ApprovedCall
from sluice.errors import PlatformError
from sluice.wire.engine.v1 import engine_pb2 as engine


class ToolRounds:
    """The rounds of one response, with the writers of their events and the last round's result.

    Attributes:
        plan: Server tools of the response.
        approved: Calls that a person has approved.
        events: Writer of the events.
        usage: Usage of the last round, or None if that round failed.
        error: Error of the last round if it failed after it began.
    """

    def __init__(
        self,
        plan: ToolPlan,
        render: Callable[[Sequence[bytes]], list[Message]],
        *,
        approved: Sequence[ApprovedCall] = (),
    ) -> None:
        """The first round has not begun.

        Args:
            plan: Server tools of the response.
            render: Returns the chat messages of a round from the output items so far as JSON.
            approved: Calls that a person has approved.
        """
        self.plan, self._render, self.approved = plan, render, approved
        self.events: ToolEvents
        self.usage: dict[str, object] | None = None
        self.error: PlatformError | None = None
        self._now: ToolEvents | None = None

    def messages(self) -> list[Message]:
        """Return the chat messages of the next round, with the output items so far."""
        return self._render(self.events.output())

    def writers(self, made: ToolEvents) -> StreamWriters:
        """Return the writers of one round's events."""
        self._now, self.usage, self.error = made, None, None
        return StreamWriters([made], self)

    def commit(self) -> None:
        """End the round successfully, so that the next round continues after its events."""
        if self._now is not None:
            self.events, self._now = self._now, None

    async def last(self, usage: dict[str, object], ended_unix_s: int) -> bytes:
        """Store the usage of a round, and write no end, because further rounds may follow."""
        del ended_unix_s
        self.usage = usage
        return b""

    def failure(self, error: PlatformError) -> bytes:
        """Store the error of a round, which the response itself reports at its end."""
        self.error = error
        return b""


class ToolResponseTask(ResponseTask):
    """A response with server tools, or one round of it.

    Attributes:
        rounds: Rounds of the response.
    """

    has_rounds = True

    rounds: ToolRounds

    @property
    def answer_id(self) -> str:
        """Id of the response."""
        return self.response_id

    def begin_rounds(self, uid: str) -> None:
        """Create the writer of the response's events."""
        del uid  # the response has an id
        frame = self._frame(self.model, engine.Sampling(temperature=1.0, top_p=1.0))
        plan, keeping = self.rounds.plan, self.keeping
        self.rounds.events = ToolEvents(
            frame,
            plan.tools,
            plan.servers,
            will_be_stored=keeping is not None and keeping.is_storing,
            compaction=self.compaction,
        )

    def next_round(
        self, messages: Sequence[Message], tokens_left: int | None, *, is_first: bool
    ) -> "ToolResponseTask":
        """Return the task of the next round.

        A forced tool call is forced in the first round only.
        """
        changes: dict[str, Any] = {
            "messages": messages,
            "stream": True,
            "max_completion_tokens": tokens_left,
        }
        if not is_first and self.must_call:
            changes["tool_choice"] = "auto"
        return self.model_copy(update=changes)

    async def ended(self, usage: Mapping[str, Any], ended_unix_s: int) -> tuple[bytes, bytes]:
        """Store the response, and return the end of its stream and its JSON."""
        events, keeping = self.rounds.events, self.keeping
        response = events.response(usage, ended_unix_s)
        if keeping is not None:
            stored = events.response(usage, ended_unix_s, is_stored=True)
            if await keeping.keep(stored):
                response = stored
        return events.last(response), response

    def failed(self, error: PlatformError) -> tuple[bytes, bytes]:
        """Return the end of a failed stream, and the failed response."""
        events, keeping = self.rounds.events, self.keeping
        is_stored = keeping is not None and keeping.keeps_failures
        response = events.failed(error, is_stored=is_stored)
        if keeping is not None:
            keeping.note_failure(response)
        return events.cut("failed", response), response

    def stream_writers(
        self,
        uid: str,
        *,
        model: str,
        created_unix_s: int,
        fingerprint: str,
        specs: Sequence[GenerationSpec],
    ) -> StreamWriters:
        """Return the writers of one round's events."""
        del fingerprint, uid, created_unix_s
        made = self.rounds.events.next_round(
            self._frame(model, specs[0].sampling, specs[0].dropped_turns)
        )
        if self.keeping is not None:
            self.keeping.begin(made)
        return self.rounds.writers(made)
