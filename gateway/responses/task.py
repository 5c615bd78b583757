"""A response: a chat that is asked for, and told, in other words."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson
from pydantic import Field

from gateway.bodies.messages import Message
from gateway.bodies.responses import ResponseRequest, echo_of
from gateway.dispatch.generation import GenerationSpec, WholeGeneration
from gateway.dispatch.tally import Tally
from gateway.endpoints.chat import ChatTask
from gateway.endpoints.task import StreamWriters
from gateway.responses.document import (
    ResponseFrame,
    call_item,
    ended_as,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)
from gateway.responses.events import ResponseEvents
from gateway.responses.stream import NumberedGeneration
from gateway.text.detokenizer import json_fragment
from sluice.wire.engine.v1 import engine_pb2 as engine

_DIGITS = 6  # of sampling values, which the wire has in 32 bits


class ResponseTask(ChatTask):
    """One response.

    Attributes:
        echo: What the answer says of its request.
        response_id: Of the answer.
    """

    endpoint = "/v1/responses"
    streamed = NumberedGeneration
    effort_param: ClassVar[str] = "reasoning.effort"
    parameters_param: ClassVar[str] = "tools[{}].parameters"

    echo: dict[str, Any] = Field(default_factory=dict)
    response_id: str = ""

    @property
    def guide_param(self) -> str | None:
        """See `GenerationFields`."""
        return None if self.guide is None else "text.format"

    @property
    def include_usage(self) -> bool:
        """See `GenerationFields`: the last event always has it."""
        return True

    @property
    def alternatives_param(self) -> str:
        """See `GenerationFields`."""
        return "top_logprobs" if self.top_logprobs else "include"

    def prompt_param(self, index: int) -> str:
        """See `GenerationFields`."""
        del index  # there is one
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
        """See `TextTask`."""
        del fingerprint  # OpenAI's response has none
        frame = self._frame(uid, model, created_unix_s, specs[0].sampling)
        events = ResponseEvents(frame)
        return StreamWriters([events], events)

    def whole(
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
        """See `TextTask`."""
        del fingerprint
        ((generation, reason),) = answers
        frame = self._frame(uid, model, created_unix_s, generation.spec.sampling)
        status, details = ended_as(reason)
        return frame.written(
            status,
            _items_of(generation, frame, status),
            usage=usage,
            completed_unix_s=None if details else ended_unix_s,
            incomplete=details,
        )

    @staticmethod
    def usage_of(tally: Tally, reasoning_tokens: int) -> dict[str, object]:
        """See `TextTask`."""
        return {
            "input_tokens": tally.prompt_tokens,
            "input_tokens_details": {"cached_tokens": tally.cached_tokens},
            "output_tokens": tally.output_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": tally.prompt_tokens + tally.output_tokens,
        }

    def _frame(
        self, uid: str, model: str, created_unix_s: int, sampling: engine.Sampling
    ) -> ResponseFrame:
        used = {
            "temperature": _told(self.temperature, sampling.temperature),
            "top_p": _told(self.top_p, sampling.top_p),
            "service_tier": self.served_tier or "default",
        }
        return ResponseFrame(
            self.response_id,
            uid,
            self.echo | used,
            model=model,
            created_unix_s=created_unix_s,
        )


def response_task(request: ResponseRequest, response_id: str) -> ResponseTask:
    """Return what a request comes to; BadRequestError when its tools do not go together."""
    messages: list[Message] = list(request.messages)
    if request.instructions is not None:
        messages.insert(0, Message.model_construct(role="system", content=request.instructions))
    fields = request.chat_fields()
    task = ResponseTask.model_construct(
        **fields,
        messages=messages,
        echo=_full_echo(request),
        response_id=response_id,
    )
    task.check_tools()
    _ = task.guide
    return task


def _full_echo(request: ResponseRequest) -> dict[str, Any]:
    none: Mapping[str, object] = {"previous_response_id": None, "background": False}
    return {**echo_of(request), **none}


def _told(asked: float | None, used: float) -> float:
    return round(used, _DIGITS) if asked is None else asked


def _items_of(generation: WholeGeneration, frame: ResponseFrame, status: str) -> Sequence[bytes]:
    """Return the items of an answer; the last one has the status of the response."""
    answer = generation.answer
    told = generation.logprobs
    content, calls, items = answer.content, answer.calls, list[bytes]()

    def state(*, is_last: bool) -> str:
        return status if is_last else "completed"

    if answer.reasoning:
        part = reasoning_part(json_fragment(answer.reasoning))
        is_last = not content and not calls
        items.append(reasoning_item(frame.item_id("rs", 0), state(is_last=is_last), part))
    if content or not (items or calls):
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
