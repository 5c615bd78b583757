"""One accepted request, answered streamed or whole; the same for chat and text.

The status line waits for the first token: until then a failure is a plain JSON answer with its own
status; after it, an `error` event ends the stream, without `[DONE]`. A client that hangs up
cancels the handler, which cancels the request upstream.
"""

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from gateway.bodies.mistakes import bad_value
from gateway.bodies.schema_keywords import left_out
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.exchange import Exchange, Tally, tally_of
from gateway.dispatch.generation import Ending, EndKind, Generation, WholeGeneration
from gateway.dispatch.pace import Pace
from gateway.dispatch.streamed import StreamedGeneration
from gateway.endpoints.event_stream import EventStream
from gateway.endpoints.keep_alive import KeepAlive, KeepAlives
from gateway.endpoints.task import Plan, Task
from gateway.metrics import FastHistogram
from gateway.rollouts.flaws import Flaws, flaws_of
from gateway.rollouts.refusals import opening
from gateway.server.errors import AnsweredError
from gateway.server.identity import identity_of
from gateway.text.logprobs import LogprobLine
from gateway.text.pipe import TextPipe
from gateway.text.sse import StreamHead
from sluice.errors import ErrorCode, PlatformError

if TYPE_CHECKING:
    from gateway.dispatch.attempts import Attempt
    from gateway.endpoints.texts import Kept


@dataclass(frozen=True, slots=True)
class Means:
    """What answering takes, the same for all requests of a worker.

    Attributes:
        dispatcher: Gets answers.
        itl: Told about every gap between tokens.
        pace: Says whether a token may wait for the next step.
        keep_alive_s: How long a stream may be silent.
        gateway_id: Of this worker.
    """

    dispatcher: Dispatcher
    itl: FastHistogram
    pace: Pace
    keep_alive_s: float
    gateway_id: str


class Run:
    """One accepted request, from its admission to its single event.

    As a context it is closed at the end of the block, with the outcome of whatever ended it.

    Attributes:
        plan: For the model that answers.
        has_begun: Whether the client has got something.
        generations: Of the plan, once they run.
        kept: Of its texts; None: nothing is.
    """

    __slots__ = (
        *("_attempts_before", "_close", "exchange", "generations", "has_begun"),
        *("kept", "plan", "request", "task"),
    )

    def __init__(
        self,
        close: Callable[["Run"], None],
        request: web.Request,
        task: Task,
        exchange: Exchange,
        plan: Plan,
    ) -> None:
        """Prepare; `close` is called once, at the end."""
        self._close = close
        self.request = request
        self.task = task
        self.exchange = exchange
        self.plan = plan
        self.has_begun = False
        self.generations: Sequence[Generation] = ()
        self.kept: Kept | None = None
        self._attempts_before: list[Attempt] | None = None

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close, once."""
        self.exchange.end_by(exc)
        self._close(self)

    def answer(
        self, means: Means, keep_alives: KeepAlives
    ) -> Coroutine[None, None, web.StreamResponse]:
        """Return the answer, to be awaited.

        PlatformError: it was refused before anything was sent.
        """
        if self.task.fields.stream:
            return self._stream(means, keep_alives)
        return self._whole(means)

    def start_over(self, plan: Plan) -> None:
        """Let another model answer, as long as the answer has not begun."""
        assert not self.has_begun, "the client has got something of another model"
        self.plan = plan
        if self.generations:
            self._attempts_before = self.generations[0].attempts
        self.generations = ()

    @property
    def tally(self) -> Tally:
        """What the plan has come to so far."""
        return tally_of(self.generations, self.plan.answers_per_prompt)

    @property
    def flaws(self) -> Flaws:
        """What is wrong with the first answer, as far as it has come."""
        if not self.generations:
            return Flaws()
        return flaws_in(self.plan.pipe(self.task, 0), self.generations[0])

    # --- whole ------------------------------------------------------------------------------

    async def _whole(self, means: Means) -> web.Response:
        task, plan, exchange = self.task, self.plan, self.exchange
        generations = [
            WholeGeneration(spec, plan.pipe(task, index), self._line())
            for index, spec in enumerate(plan.specs)
        ]
        self._begin(generations, means)
        with means.dispatcher.ask(generations, plan.answers_per_prompt) as answers:
            refusal = await answers.finished()
        if refusal is not None:
            raise self._error_of(refusal)
        for generation in generations:
            generation.finish()
        reasons = [finish_reason(it.ending, it) for it in generations if it.ending is not None]
        exchange.outcome, exchange.status = reasons[0], 200
        exchange.first_sent_at_s = now_s()
        answer: dict[str, object] = {
            "id": f"{task.id_prefix}-{exchange.uid}",
            "object": task.kind,
            "created": exchange.received_at_unix_ms // 1000,
            "model": exchange.model.id,
            "system_fingerprint": plan.fingerprint,
            "choices": [
                task.choice(plan.assets, index, generation, reasons[index])
                for index, generation in enumerate(generations)
            ],
            "usage": self._usage(),
        }
        if task.fields.served_tier:
            answer["service_tier"] = task.fields.served_tier
        return web.Response(
            body=orjson.dumps(answer), content_type="application/json", headers=self._headers()
        )

    # --- streamed ---------------------------------------------------------------------------

    async def _stream(self, means: Means, keep_alives: KeepAlives) -> web.StreamResponse:
        events = self._prepared_stream(means)
        self._begin(events.streams, means)
        with (
            means.dispatcher.ask(events.streams, self.plan.answers_per_prompt) as answers,
            KeepAlive(events.streams, keep_alives),
        ):
            refusal = await answers.begun()
            if refusal is not None:
                raise self._error_of(refusal)
            self._begin_stream(events)
            async for generation in answers:
                self._end_choice(events, generation)
        if answers.refusal is not None:
            self.exchange.outcome = answers.refusal.code
            await events.fail(self._failure_of(answers.refusal))
        else:
            head = events.usage_head
            await events.finish(b"" if head is None else head.usage_chunk(self._usage()))
        return events.response

    def _begin_stream(self, events: EventStream) -> None:
        """Write the first bytes; from then on the choices write by themselves."""
        exchange = self.exchange
        self.has_begun, exchange.status = True, 200
        events.begin()
        self.task.forget_request()
        if any(stream.emitted for stream in self.generations):  # not a sign of life
            exchange.first_sent_at_s = events.first_sent_at_s

    def _end_choice(self, events: EventStream, generation: Generation) -> None:
        assert generation.ending is not None
        reason, index = finish_reason(generation.ending, generation), generation.spec.choice
        if not index:
            self.exchange.outcome = reason
        events.end_choice(index, reason)

    def _prepared_stream(self, means: Means) -> EventStream:
        task, plan, head = self.task, self.plan, self._stream_head()
        streams: list[StreamedGeneration] = []
        for index, spec in enumerate(plan.specs):
            line, form = self._line(), task.logprob_format(plan.assets)
            streams.append(
                StreamedGeneration(
                    spec,
                    plan.pipe(task, index),
                    task.chunks(head, index),
                    means.itl,
                    means.pace,
                    None if line is None or form is None else (line, form),
                )
            )
        if task.fields.counts_usage:
            for stream in streams:
                stream.count_usage(head)
        usage_head = head if task.fields.include_usage else None
        return EventStream(self.request, self._headers(), streams, usage_head)

    def _stream_head(self) -> StreamHead:
        task, exchange = self.task, self.exchange
        return StreamHead(
            task.chunk_kind,
            f"{task.id_prefix}-{exchange.uid}",
            exchange.model.id,
            exchange.received_at_unix_ms // 1000,
            fingerprint=self.plan.fingerprint,
            service_tier=task.fields.served_tier or "",
            with_usage=task.fields.include_usage,
        )

    # --- both -------------------------------------------------------------------------------

    def _begin(self, generations: Sequence[Generation], means: Means) -> None:
        if self._attempts_before is not None:
            generations[0].attempts = self._attempts_before
        self.generations = generations
        self.exchange.prepare_closings(generations, self.plan.answers_per_prompt, means.gateway_id)

    def _line(self) -> LogprobLine | None:
        plan = self.plan
        if not plan.specs[0].sampling.HasField("logprobs"):
            return None
        return LogprobLine(plan.assets.table.hidden)

    def _headers(self) -> dict[str, str]:
        exchange = self.exchange
        headers = {**identity_of(self.request).headers, "x-sluice-model": exchange.model.id}
        if (schemas := self.task.fields.free_schemas) and (ignored := left_out(schemas)):
            headers["x-sluice-ignored-keywords"] = ", ".join(sorted(ignored))
        if (decision := exchange.decision) is not None and decision.has_decided:
            headers["x-sluice-release"] = exchange.model.release
        return headers if exchange.reservation is None else headers | exchange.reservation.headers

    def _usage(self) -> dict[str, object]:
        tally = self.tally
        return {
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.output_tokens,
            "total_tokens": tally.prompt_tokens + tally.output_tokens,
            "prompt_tokens_details": {"cached_tokens": tally.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": sum([it.pipe.reasoning_tokens for it in self.generations])
            },
        }

    def _error_of(self, refusal: Ending) -> PlatformError:
        """Return what the client is told, with the headers of the limits that were looked at."""
        reservation, fields = self.exchange.reservation, self.task.fields
        headers = {} if reservation is None else dict(reservation.headers)
        error = self._failure_of(refusal)
        tier_ms = self.exchange.principal.tier.ttft_deadline_ms
        is_own = fields.deadline_ms is not None and (
            fields.ttft_deadline_ms(tier_ms) == fields.deadline_ms
        )
        if is_own and refusal.code is ErrorCode.DEADLINE_EXCEEDED:
            error.message = f"No first token within 'deadline_ms', {fields.deadline_ms} ms."
            headers["x-should-retry"] = "false"  # to official SDKs: it would have to be as fast
        return AnsweredError(error, headers)

    def _failure_of(self, refusal: Ending) -> PlatformError:
        param = self.task.param_names.get(refusal.param)
        if param is not None and refusal.code is ErrorCode.INVALID_REQUEST:
            return bad_value(param, refusal.message)
        message = refusal.message or "The request could not be served."
        return PlatformError(
            refusal.code, message, retry_after_s=refusal.retry_after_s, param=param
        )


def finish_reason(ending: Ending, generation: Generation) -> str:
    """Return why an answer ended, in OpenAI's words."""
    if ending.kind is EndKind.LENGTH:
        return "length"
    return "tool_calls" if generation.pipe.has_calls else "stop"


def flaws_in(pipe: TextPipe, generation: Generation) -> Flaws:
    """Return the flaws of an answer; of a new pipe no more is used than this takes."""
    first, tokens = opening(pipe, generation.emitted), generation.emitted
    has_more = generation.pipe.has_calls or generation.pipe.reasoning_tokens > 0
    return flaws_of(first, tokens, has_more=has_more)


def now_s() -> float:
    """Return precise monotonic time: that of uvloop's loop is cached and has milliseconds."""
    return time.monotonic()
