"""The task of a chat completion that is stored, or whose chat a summary has shortened."""

import time
from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict

from gateway.bodies.messages import CompactedHistory, Message
from gateway.chat.keeper import CompletionKeeper
from gateway.chat.record import completion_head, record_of
from gateway.dialects.delta import AnswerDelta
from gateway.dispatch.generation import GenerationSpec, WholeGeneration
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.streamed import StreamedGeneration
from gateway.endpoints.chat_task import ChatTask
from gateway.endpoints.task import StreamEnd, StreamWriters
from gateway.metrics import FastHistogram
from gateway.text.sse import ChatChunks, ChunkWriter, StreamHead
from sluice.errors import PlatformError


class KeptChatChunks(ChatChunks):
    """Writes the chunks of one choice, and collects the whole choice.

    Attributes:
        call_ids: Ids of the tool calls, as sent to the client.
        ended: The whole answer and its finish reason, or None until the choice has ended.
    """

    __slots__ = ("_compaction", "call_ids", "ended")

    def __init__(
        self, head: StreamHead, index: int, compaction: CompactedHistory | None = None
    ) -> None:
        """Start a choice. `compaction` is the item that replaces earlier messages, or None."""
        super().__init__(head, index)
        self._compaction = compaction
        self.call_ids: list[str] = []
        self.ended: tuple[WholeGeneration, str] | None = None

    def first(self) -> bytes:
        """Return the first chunk, which contains the compaction item if there is one."""
        told = self._compaction
        return super().first() if told is None else self.opened({"compaction": told.model_dump()})

    def delta(self, delta: AnswerDelta, logprobs: dict[str, object] | None = None) -> bytes:
        """Return the chunk of a delta, and record the ids of its tool calls."""
        self.call_ids += [call.call_id for call in delta.calls if call.call_id]
        return super().delta(delta, logprobs)


class KeptStreamedGeneration(StreamedGeneration):
    """A streamed choice that also collects the whole answer."""

    __slots__ = ("_kept",)

    def __init__(
        self, spec: GenerationSpec, chunks: ChunkWriter, itl: FastHistogram, pace: AttemptPace
    ) -> None:
        """Start a choice. `chunks` writes its chunks and collects the whole choice."""
        assert isinstance(chunks, KeptChatChunks), "only these take it"
        super().__init__(spec, chunks, itl, pace)
        self._kept = chunks

    def last_chunks(self, reason: str) -> bytes:
        """Return the last chunks, and record the whole answer with its finish reason."""
        last = super().last_chunks(reason)
        whole = WholeGeneration(self.spec)
        whole.push(self.emitted, 0.0)
        whole.finish()
        self._kept.ended = whole, reason
        return last


class _KeptEnd:
    """The end of a stream whose completion may be stored."""

    def __init__(self, task: "KeptChatTask", inner: StreamEnd, told: dict[str, object]) -> None:
        self._task, self._inner, self._told = task, inner, told
        self.chunks: Sequence[KeptChatChunks] = ()

    async def last(self, usage: dict[str, object], ended_unix_s: int) -> bytes:
        if self._task.keeper is not None:
            choices = [_choice(self._task, it) for it in self.chunks if it.ended is not None]
            self._task.keep(self._told, choices, usage)
        return await self._inner.last(usage, ended_unix_s)

    def failure(self, error: PlatformError) -> bytes:
        return self._inner.failure(error)


class KeptChatTask(ChatTask):
    """A chat completion that is stored, or whose chat a summary has shortened.

    Attributes:
        keeper: Queue of completions to store, or None if this completion is not stored.
        tenant_id: Tenant that owns the completion.
        sent: Messages of the request.
        compaction: Item that replaces earlier messages, or None if nothing was summarized.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    streamed = KeptStreamedGeneration

    keeper: CompletionKeeper | None = None
    tenant_id: str = ""
    sent: Sequence[Message] = ()
    compaction: CompactedHistory | None = None

    def chunks(self, head: StreamHead, index: int) -> KeptChatChunks:
        """Return the writer of a choice's chunks."""
        return KeptChatChunks(head, index, self.compaction)

    def choice_of(self, generation: WholeGeneration, reason: str) -> dict[str, object]:
        """Return a choice as JSON object, with the compaction item if there is one."""
        choice = super().choice_of(generation, reason)
        if self.compaction is not None:
            message: Any = choice["message"]
            message["compaction"] = self.compaction.model_dump()
        return choice

    def stream_writers(
        self,
        uid: str,
        *,
        model: str,
        created_unix_s: int,
        fingerprint: str,
        specs: Sequence[GenerationSpec],
    ) -> StreamWriters:
        """Return writers of all choices and of the stream's end, which stores the completion."""
        writers = super().stream_writers(
            uid, model=model, created_unix_s=created_unix_s, fingerprint=fingerprint, specs=specs
        )
        told = completion_head(
            self, uid, model=model, created_unix_s=created_unix_s, fingerprint=fingerprint
        )
        end = _KeptEnd(self, writers.end, told)
        end.chunks = [it for it in writers.chunks if isinstance(it, KeptChatChunks)]
        return writers._replace(end=end)

    async def whole(
        self,
        uid: str,
        *,
        model: str,
        created_unix_s: int,
        fingerprint: str,
        answers: Sequence[tuple[WholeGeneration, str]],
        usage: dict[str, object],
        ended_unix_s: int,
    ) -> bytes:
        """Return the whole completion as JSON, and queue it for storage if requested."""
        if self.keeper is not None:
            choices = [self.choice_of(generation, reason) for generation, reason in answers]
            head = completion_head(
                self, uid, model=model, created_unix_s=created_unix_s, fingerprint=fingerprint
            )
            self.keep(head, choices, usage)
        return await super().whole(
            uid,
            model=model,
            created_unix_s=created_unix_s,
            fingerprint=fingerprint,
            answers=answers,
            usage=usage,
            ended_unix_s=ended_unix_s,
        )

    def keep(
        self,
        head: dict[str, object],
        choices: Sequence[dict[str, object]],
        usage: dict[str, object],
    ) -> None:
        """Queue the completion for storage, with the messages of its request."""
        assert self.keeper is not None, "it is to be stored"
        now_unix_ms = time.time_ns() // 1_000_000
        record = record_of(
            self.sent, self.metadata, self.tenant_id, head, choices, usage, now_unix_ms
        )
        self.keeper.offer(record)


def _choice(task: KeptChatTask, chunks: KeptChatChunks) -> dict[str, object]:
    """Return a choice of a stream, with the ids of calls that the client has received."""
    assert chunks.ended is not None, "it has ended"
    choice = task.choice_of(*chunks.ended)
    message: Any = choice["message"]
    for call, call_id in zip(message.get("tool_calls", ()), chunks.call_ids, strict=True):
        call["id"] = call_id
    return choice
