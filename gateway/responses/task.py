"""The task of a response, which maps a Responses request to a chat, and the chat's answer back."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import orjson
from pydantic import ConfigDict, Field, InstanceOf

from gateway.bases.assets import BaseAssets, EncodedPrompt
from gateway.bases.prompt_trail import NO_TRAIL, PromptTrail
from gateway.bodies.messages import Message
from gateway.bodies.response_items import CompactionItem, InputItem, messages_of
from gateway.bodies.responses import ResponseRequest, echo_of
from gateway.dispatch.generation import GenerationSpec, WholeGeneration
from gateway.dispatch.tally import Tally
from gateway.endpoints.chat_task import ChatTask
from gateway.endpoints.task import StreamWriters
from gateway.resolved import ResolvedModel
from gateway.responses.context import ResponseContext
from gateway.responses.document import (
    ResponseFrame,
    call_item,
    compaction_item,
    ended_as,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)
from gateway.responses.events import ResponseEvents
from gateway.responses.keeping import Keeping, ResponseEnd
from gateway.responses.stream import NumberedGeneration
from gateway.text.detokenizer import json_fragment
from sluice.response_ids import created_unix_ms, item_stem
from sluice.wire.engine.v1 import engine_pb2 as engine

_DIGITS = 6  # decimal digits shown of a sampling value, because the wire has 32-bit floats


class ResponseTask(ChatTask):
    """The task of one response.

    Attributes:
        echo: Fields of the answer that repeat the request.
        response_id: Id of the response.
        keeping: Storage of the response, or None if the response is not stored.
        compaction: Item with the summary that replaces earlier turns, sent first, or None without
            a summary.
        before: Stored prompt of the continued responses.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    endpoint = "/v1/responses"
    streamed = NumberedGeneration
    effort_param: ClassVar[str] = "reasoning.effort"
    parameters_param: ClassVar[str] = "tools[{}].parameters"

    echo: dict[str, Any] = Field(default_factory=dict)
    response_id: str = ""
    keeping: Keeping | None = None
    compaction: CompactionItem | None = None
    before: InstanceOf[PromptTrail] = NO_TRAIL

    @property
    def trail(self) -> PromptTrail | None:
        """Stored prompt of the continued responses."""
        return self.before

    async def encoded(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[EncodedPrompt]:
        """Return the prompts as `TextTask` describes.

        The turn's own part of the prompt is stored with the response.
        """
        prompts = await super().encoded(assets, resolved)
        if self.keeping is not None:
            self.keeping.note_prompt(prompts[0].record)
        return prompts

    @property
    def guide_param(self) -> str | None:
        """Name of the field with the output's form, for errors, or None without such a field."""
        return None if self.guide is None else "text.format"

    @property
    def include_usage(self) -> bool:
        """Whether usage is sent, which is always true because the last event has it."""
        return True

    @property
    def alternatives_param(self) -> str:
        """Name of the field that requests alternative tokens, for errors."""
        return "top_logprobs" if self.top_logprobs else "include"

    def prompt_param(self, index: int) -> str:
        """Return the name of the field with the prompt, for errors."""
        del index  # a response has only one prompt
        return "input"

    def stream_writers(
        self,
        uid: str,
        *,
        model: str,
        created_unix_s: int,
        fingerprint: str,
        specs: Sequence[GenerationSpec],
    ) -> StreamWriters:
        """Return the writers of the response's events, and begin its storage."""
        del fingerprint  # OpenAI's response has none
        del uid, created_unix_s  # the response's id contains both
        frame, keeping = self._frame(model, specs[0].sampling, specs[0].dropped_turns), self.keeping
        will_be_stored = keeping is not None and keeping.is_storing
        events = ResponseEvents(frame, will_be_stored=will_be_stored, compaction=self.compaction)
        if keeping is not None:
            keeping.begin(events)
        return StreamWriters([events], ResponseEnd(events, keeping))

    def queued(self, model: str) -> bytes:
        """Return the JSON of the response in the status `queued`."""
        frame = self._frame(model, engine.Sampling(temperature=1.0, top_p=1.0))
        return frame.written("queued", is_stored=self.keeping is not None)

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
        """Return the whole response as JSON, after storing it if requested."""
        del uid, created_unix_s, fingerprint
        ((generation, reason),) = answers
        spec = generation.spec
        frame = self._frame(model, spec.sampling, spec.dropped_turns)
        status, details = ended_as(reason)
        written = partial(
            frame.written,
            status,
            _items_of(generation, frame, status, self.compaction),
            usage=usage,
            completed_unix_s=None if details else ended_unix_s,
            incomplete=details,
        )
        if self.keeping is not None:
            stored = written(is_stored=True)
            if await self.keeping.keep(stored):
                return stored
        return written()

    @staticmethod
    def usage_of(tally: Tally, reasoning_tokens: int) -> dict[str, object]:
        """Return the usage in the form of the Responses API."""
        return {
            "input_tokens": tally.prompt_tokens,
            "input_tokens_details": {"cached_tokens": tally.cached_tokens},
            "output_tokens": tally.output_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": tally.prompt_tokens + tally.output_tokens,
        }

    def _frame(
        self, model: str, sampling: engine.Sampling, dropped_turns: int = 0
    ) -> ResponseFrame:
        used: dict[str, object] = {
            "temperature": _effective(self.temperature, sampling.temperature),
            "top_p": _effective(self.top_p, sampling.top_p),
            "service_tier": self.served_tier or "default",
        }
        if dropped_turns:
            used["dropped_turns"] = dropped_turns
        return ResponseFrame(
            self.response_id,
            item_stem(self.response_id),
            self.echo | used,
            model=model,
            created_unix_s=created_unix_ms(self.response_id) // 1000,
        )


# A copy of an empty task costs 7 us. A task of 71 fields from `model_construct` costs 40 us.
_BLANK = ResponseTask.model_construct()


def response_task(
    request: ResponseRequest,
    response_id: str,
    *,
    context: ResponseContext,
    session: str = "",
    keeping: Keeping | None = None,
) -> ResponseTask:
    """Return the task of a request.

    Args:
        request: The body.
        response_id: Id of the response.
        context: Continued turns, and the items of the response's own turn.
        session: Key that groups the turns of a chain, unless the request has a session id.
        keeping: Storage of the response, or None if the response is not stored.

    Raises:
        BadRequestError: The order of the items is not valid, or the tools cannot be combined.
    """
    fields = request.chat_fields() | {
        "messages": messages_for(request.instructions, context),
        "echo": dict(echo_of(request)),
        "response_id": response_id,
        "keeping": keeping,
        "before": context.trail,
    }
    task = _BLANK.model_copy(update=fields)
    if session and not task.session:
        task = task.model_copy(update={"session_id": session})
    task.check_tools()
    _ = task.guide
    return task


def messages_for(
    instructions: str | None, context: ResponseContext, output: Sequence[InputItem] = ()
) -> list[Message]:
    """Return the chat messages of a response, with the output items that it has so far.

    Raises BadRequestError if the order of the items is not valid.
    """
    before, items = context.shown or (context.before, context.items)
    begun = context.begun if context.shown is None else None
    messages = messages_of([*items, *output], before, begun=begun)
    if instructions is not None:
        messages.insert(0, Message.model_construct(role="system", content=instructions))
    return messages


def _effective(asked: float | None, used: float) -> float:
    return round(used, _DIGITS) if asked is None else asked


def _items_of(
    generation: WholeGeneration,
    frame: ResponseFrame,
    status: str,
    compaction: CompactionItem | None,
) -> Sequence[bytes]:
    """Return the output items of an answer as JSON. The last item has the response's status."""
    answer = generation.answer
    told = generation.logprobs
    content, calls = answer.content, answer.calls
    items = [] if compaction is None else [compaction_item(compaction)]
    first = len(items)

    def state(*, is_last: bool) -> str:
        return status if is_last else "completed"

    if answer.reasoning:
        part = reasoning_part(json_fragment(answer.reasoning))
        is_last = not content and not calls
        items.append(reasoning_item(frame.item_id("rs", first), state(is_last=is_last), part))
    if content or not (len(items) > first or calls):
        logprobs = b"" if told is None else orjson.dumps(told["content"])[1:-1]
        part = text_part(json_fragment(content), logprobs)
        item_id = frame.item_id("msg", len(items))
        items.append(message_item(item_id, state(is_last=not calls), part))
    for number, call in enumerate(calls):
        function: Any = call["function"]
        items.append(
            call_item(
                frame.item_id("fc", len(items)),
                state(is_last=number == len(calls) - 1),
                str(call["id"]),
                function["name"],
                function["arguments"],
            )
        )
    return items
