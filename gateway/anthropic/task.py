"""The task of an Anthropic message, which is answered like a chat and written as a message."""

from collections.abc import Sequence
from typing import ClassVar

from gateway.anthropic.document import blocks_of, message, stop_reason
from gateway.anthropic.events import MessageEvents
from gateway.anthropic.stream import BlockGeneration
from gateway.bodies.anthropic import AnthropicRequest
from gateway.dispatch.generation import GenerationSpec, WholeGeneration
from gateway.dispatch.tally import Tally
from gateway.endpoints.chat_task import ChatTask
from gateway.endpoints.task import StreamWriters
from sluice.errors import PlatformError


class MessageTask(ChatTask):
    """The task of one message."""

    endpoint = "/v1/messages"
    streamed = BlockGeneration
    effort_param: ClassVar[str] = "output_config.effort"
    parameters_param: ClassVar[str] = "tools[{}].input_schema"

    @property
    def guide_param(self) -> str | None:
        """Name of the body's field for the required form of the answer, or None."""
        return None if self.guide is None else "output_config.format"

    @property
    def include_usage(self) -> bool:
        """Always true, because the last event of a message reports the usage."""
        return True

    def stream_writers(
        self,
        uid: str,
        *,
        model: str,
        created_unix_s: int,
        fingerprint: str,
        specs: Sequence[GenerationSpec],
    ) -> StreamWriters:
        """Return the writer of the message's events, and of the end of its stream."""
        del created_unix_s, fingerprint  # the API reports neither
        events = MessageEvents(f"msg_{uid}", model, len(specs[0].prompt))
        return StreamWriters([events], _MessageEnd(events))

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
        """Return the whole message as JSON."""
        del created_unix_s, fingerprint, ended_unix_s
        ((generation, reason),) = answers
        stopped_by = generation.pipe.stopped_by
        return message(
            f"msg_{uid}",
            model,
            blocks_of(generation.answer),
            stopped=stop_reason(reason, stopped_by),
            stop_sequence=stopped_by,
            usage=usage,
        )

    @staticmethod
    def usage_of(tally: Tally, reasoning_tokens: int) -> dict[str, object]:
        """Return the usage by Anthropic's names, in which `input_tokens` excludes cached tokens."""
        del reasoning_tokens  # the output tokens already include them
        return {
            "input_tokens": tally.prompt_tokens - tally.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": tally.cached_tokens,
            "output_tokens": tally.output_tokens,
            "service_tier": "standard",
        }


def message_task(request: AnthropicRequest) -> MessageTask:
    """Return the task of a request, or raise BadRequestError if its tools cannot be combined."""
    task = MessageTask.model_construct(**request.chat_fields(), messages=request.turns)
    task.check_tools()
    _ = task.guide
    return task


class _MessageEnd:
    """The end of a message's stream."""

    __slots__ = ("_events",)

    def __init__(self, events: MessageEvents) -> None:
        self._events = events

    async def last(self, usage: dict[str, object], ended_unix_s: int) -> bytes:
        return self._events.last(usage, ended_unix_s)

    def failure(self, error: PlatformError) -> bytes:
        return self._events.failure(error)
