"""A chat completion with server tools, whose answer several rounds of the model write."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import ConfigDict

from gateway.bodies.messages import CompactedHistory, Message
from gateway.chat.keeper import CompletionKeeper
from gateway.chat.record import completion_head, record_of
from gateway.chat.tool_events import ToolChatChunks
from gateway.dispatch.generation import GenerationSpec
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.streamed import StreamedGeneration
from gateway.endpoints.chat_task import ChatTask
from gateway.endpoints.task import StreamWriters, prompt_annotations
from gateway.metrics import FastHistogram
from gateway.server.errors import body_of
from gateway.text.sse import ChunkWriter, StreamHead, error_event
from gateway.tools.plan import ToolPlan
from gateway.tools.rounds import ApprovedCall
from sluice.errors import PlatformError


class RoundGeneration(StreamedGeneration):
    """The stream of one round, which also collects the text in the writer `chunks`."""

    __slots__ = ("_events",)

    def __init__(
        self, spec: GenerationSpec, chunks: ChunkWriter, itl: FastHistogram, pace: AttemptPace
    ) -> None:
        """Start a round. `chunks` writes the chunks and collects the whole answer."""
        assert isinstance(chunks, ToolChatChunks), "only these take it"
        super().__init__(spec, chunks, itl, pace)
        self._events = chunks

    def _send(self, fragment: bytes) -> None:
        events = self._events
        if between := events.parted():
            self.send(between)
        events.add(fragment)
        super()._send(fragment)

    def last_chunks(self, reason: str) -> bytes:
        """Return the last chunks, and store the rules' matches for the end of the whole answer."""
        chunks = super().last_chunks(reason)
        if self.guard is not None:
            self._events.found = self.guard.annotations() or self._events.found
        self._events.prompt_found = self._events.prompt_found or prompt_annotations([self], 1)
        return chunks


class ChatRounds:
    """The rounds of one completion, with the writer of their chunks and the last round's result.

    Attributes:
        plan: Server tools of the request.
        approved: Always empty, since only the Responses API has approvals.
        events: Writer of the chunks, as of the last successful round.
        uid: Id of the first round, which is part of the completion's id.
        usage: Usage of the last round, or None if that round failed.
        error: Error of the last round if the round failed after its start, or None.
    """

    approved: Sequence[ApprovedCall] = ()

    def __init__(self, plan: ToolPlan) -> None:
        self.plan = plan
        self.events: ToolChatChunks
        self.uid = ""
        self.usage: dict[str, object] | None = None
        self.error: PlatformError | None = None
        self._now: ToolChatChunks | None = None

    def messages(self) -> list[Message]:
        """Return the messages of the ended rounds."""
        return [*self.events.messages]

    def writers(self, made: ToolChatChunks) -> StreamWriters:
        """Return the writers of one round's chunks."""
        self._now, self.usage, self.error = made, None, None
        return StreamWriters([made], self, head=None if made.has_begun else made.completion)

    def commit(self) -> None:
        """Accept the round, so that the next round continues after its chunks."""
        if self._now is not None:
            self.events, self._now = self._now, None

    async def last(self, usage: dict[str, object], ended_unix_s: int) -> bytes:
        """Record the usage of the round. Nothing is written, because further rounds may follow."""
        del ended_unix_s
        self.usage = usage
        return b""

    def failure(self, error: PlatformError) -> bytes:
        """Record the round's error. Nothing is written, since `ToolChatTask.failed` writes it."""
        self.error = error
        return b""


class ToolChatTask(ChatTask):
    """A chat completion with server tools, or one of its rounds.

    Attributes:
        rounds: Rounds of the completion.
        keeper: Queue of completions to store, or None if this completion is not stored.
        tenant_id: Tenant that owns the completion.
        sent: Messages of the request.
        compaction: Item that replaces earlier messages, or None if nothing was summarized.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    streamed = RoundGeneration
    has_rounds = True

    rounds: ChatRounds
    keeper: CompletionKeeper | None = None
    tenant_id: str = ""
    sent: Sequence[Message] = ()
    compaction: CompactedHistory | None = None

    @property
    def answer_id(self) -> str:
        """Id of the completion."""
        return f"{self.id_prefix}-{self.rounds.uid}"

    def begin_rounds(self, uid: str) -> None:
        """Start the completion, whose id contains `uid`."""
        self.rounds.uid = uid
        plan, head = self.rounds.plan, StreamHead(self.chunk_kind, self.answer_id, self.model, 0)
        self.rounds.events = ToolChatChunks(head, plan.tools, plan.servers, self.compaction)

    def next_round(
        self, messages: Sequence[Message], tokens_left: int | None, *, is_first: bool
    ) -> "ToolChatTask":
        """Return the next round's task. Only the first has forced calls and `min_tokens`."""
        changes: dict[str, Any] = {
            "messages": [*self.messages, *messages],
            "stream": True,
            "max_tokens": None,
            "max_completion_tokens": tokens_left,
            # All rounds have a common prefix, so they share one session.
            "session_id": self.session or self.answer_id,
        }
        if not is_first:
            changes["min_tokens"] = None
            if self.must_call:
                changes["tool_choice"] = "auto"
        return self.model_copy(update=changes)

    def stream_writers(
        self,
        uid: str,
        *,
        model: str,
        created_unix_s: int,
        fingerprint: str,
        specs: Sequence[GenerationSpec],
    ) -> StreamWriters:
        """Return the writers of one round, whose chunks have the id of the whole completion."""
        del uid, specs
        head = StreamHead(
            self.chunk_kind,
            self.answer_id,
            model,
            created_unix_s,
            fingerprint=fingerprint,
            service_tier=self.served_tier or "",
            with_usage=self.include_usage,
        )
        named = completion_head(
            self,
            self.rounds.uid,
            model=model,
            created_unix_s=created_unix_s,
            fingerprint=fingerprint,
        )
        return self.rounds.writers(self.rounds.events.next_round(head, named))

    async def ended(self, usage: Mapping[str, Any], ended_unix_s: int) -> tuple[bytes, bytes]:
        """Return the end of the stream and the whole completion, and queue it for storage."""
        del ended_unix_s
        events, told = self.rounds.events, dict(usage)
        choice = events.choice(has_to_call=self.must_call, has_logprobs=bool(self.logprobs))
        if self.keeper is not None:
            record = record_of(
                self.sent,
                self.metadata,
                self.tenant_id,
                events.named,
                [choice],
                told,
                time.time_ns() // 1_000_000,
            )
            self.keeper.offer(record)
        answer: dict[str, object] = {**events.named, "choices": [choice], "usage": told}
        if not self.served_tier:
            del answer["service_tier"]
        if events.prompt_found:
            answer["prompt_filter_results"] = events.prompt_found
        return events.last(told if self.include_usage else None), orjson.dumps(answer)

    def failed(self, error: PlatformError) -> tuple[bytes, bytes]:
        """Return an error event for the stream. Without a stream, the error is raised."""
        if not self.stream:
            raise error
        return error_event(body_of(error)), b""
