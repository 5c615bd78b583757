"""The interface of an API to generation, which maps bodies to token ids, and token ids to events.

A further API of generated text is one more `TextTask`. The task parses its own body, provides
prompts and bounds, and writes whole answers and the events of streams. The code between (limits,
fallback models, routers, retries, sockets, usage) is the same for all APIs.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

import orjson

from gateway.auto.board import AskedPrompt
from gateway.bases.assets import BaseAssets, EncodedPrompt
from gateway.bodies.generation import GenerationFields
from gateway.dispatch.generation import Generation, GenerationSpec, WholeGeneration
from gateway.dispatch.streamed import StreamedGeneration
from gateway.dispatch.tally import Tally
from gateway.resolved import ResolvedModel
from gateway.server.errors import body_of
from gateway.text.detokenizer import TokenTable
from gateway.text.logprobs import NewLogprobs
from gateway.text.pipe import TextPipe
from gateway.text.sse import DONE, ChunkWriter, StreamHead, error_event
from sluice.errors import PlatformError
from sluice.scopes import Scope
from sluice.wire.engine.v1 import engine_pb2 as engine


class StreamEnd(Protocol):
    """Writes the last bytes of a stream."""

    async def last(self, usage: dict[str, object], ended_unix_s: int) -> bytes:
        """Return the end of a stream whose choices are complete. `usage_of` returns the `usage`."""
        ...

    def failure(self, error: PlatformError) -> bytes:
        """Return the end of a stream that has failed."""
        ...


class LastingEnd(ABC):
    """The end of a stream that may go on after its client has disconnected."""

    __slots__ = ()

    @abstractmethod
    def detach(self) -> asyncio.WriteTransport | None:
        """Return the transport for the rest of the stream, or None if the stream ends now."""


class StreamWriters(NamedTuple):
    """The writers of a stream's events.

    Attributes:
        chunks: Writer of each choice's chunks.
        end: Writer of the end of the stream.
        counted: Head of chunks that report the usage so far, or None if no chunk reports usage.
        head: Head of chunks that belong to no choice, or None if the API has no such chunks.
    """

    chunks: Sequence[ChunkWriter]
    end: StreamEnd
    counted: StreamHead | None = None
    head: StreamHead | None = None


class TextTask(GenerationFields):
    """A validated body of an API, with the writers of its answers.

    A stream drops the body at its first byte, to free the memory of long bodies. `new_pipe`,
    `new_logprobs` and `chunks` return objects that a stream uses until its end. These objects
    therefore do not reference the body.

    Attributes:
        endpoint: Path of the API.
        scope: Scope that the key needs.
        kind: Object name of a whole answer.
        chunk_kind: Object name of a chunk.
        id_prefix: Prefix of the completion's id.
        streamed: Class that sends the tokens of a choice.
        has_rounds: Whether the task is a `RoundTask`, between whose rounds server tools run.
    """

    endpoint: ClassVar[str]
    scope: ClassVar[Scope]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    streamed: ClassVar[type[StreamedGeneration]] = StreamedGeneration
    has_rounds: ClassVar[bool] = False

    # --- in ---------------------------------------------------------------------------------

    @abstractmethod
    async def encoded(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[EncodedPrompt]:
        """Return the prompts as ids. Each prompt has `choices` answers."""

    async def predicted(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[int]:
        """Return the ids that the caller expects of each answer, empty without an expectation."""
        del assets, resolved
        return ()

    @abstractmethod
    def enforced(self, assets: BaseAssets, prompt: EncodedPrompt) -> engine.Grammar | None:
        """Return a grammar for the output in addition to `sampling`, or None without one."""

    @abstractmethod
    def asked(self) -> AskedPrompt:
        """Return the words of the request, by which `auto` chooses a model."""

    @abstractmethod
    def texts(self, table: TokenTable) -> Iterator[tuple[str, Iterable[object]]]:
        """Yield names and values of the request's texts, for `gateway.texts.documents`."""

    # --- out --------------------------------------------------------------------------------

    @abstractmethod
    def new_pipe(self, assets: BaseAssets, prompt: EncodedPrompt) -> Callable[[], TextPipe]:
        """Return a maker of pipes, which turn the tokens of one answer into text."""

    @abstractmethod
    def new_logprobs(self, assets: BaseAssets) -> NewLogprobs | None:
        """Return a maker of a choice's log probabilities, or None if they are not requested."""

    @abstractmethod
    def choice_of(self, generation: WholeGeneration, reason: str) -> dict[str, object]:
        """Return one choice of a whole answer."""

    @abstractmethod
    def chunks(self, head: StreamHead, index: int) -> ChunkWriter:
        """Return the writer of a choice's events in a stream."""

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
        """Return the JSON of a whole answer, with its choices and its usage.

        Args:
            uid: Id of the request.
            model: Name of the model that answers.
            created_unix_s: Time of the request's arrival.
            fingerprint: Fingerprint of the weights that answer.
            answers: Answers, each with its finish reason.
            usage: Usage from `usage_of`.
            ended_unix_s: Time of the answer's end.
        """
        del ended_unix_s  # OpenAI's form has no such field
        answer: dict[str, object] = {
            "id": f"{self.id_prefix}-{uid}",
            "object": self.kind,
            "created": created_unix_s,
            "model": model,
            "system_fingerprint": fingerprint,
            "choices": [self._annotated(it, self.choice_of(it, reason)) for it, reason in answers],
            "usage": usage,
        }
        if found := prompt_annotations([it for it, _ in answers], self.choices):
            answer["prompt_filter_results"] = found
        if self.served_tier:
            answer["service_tier"] = self.served_tier
        return orjson.dumps(answer)

    @staticmethod
    def _annotated(it: WholeGeneration, choice: dict[str, object]) -> dict[str, object]:
        found = None if it.guard is None else it.guard.annotations()
        return choice if found is None else choice | {"content_filter_results": found}

    def stream_writers(
        self,
        uid: str,
        *,
        model: str,
        created_unix_s: int,
        fingerprint: str,
        specs: Sequence[GenerationSpec],
    ) -> StreamWriters:
        """Return the writers of a stream's events. The `specs` belong to its choices."""
        head = StreamHead(
            self.chunk_kind,
            f"{self.id_prefix}-{uid}",
            model,
            created_unix_s,
            fingerprint=fingerprint,
            service_tier=self.served_tier or "",
            with_usage=self.include_usage,
        )
        return StreamWriters(
            [self.chunks(head, spec.choice) for spec in specs],
            _CompletionEnd(head) if self.include_usage else _BARE_END,
            head if self.counts_usage else None,
            head,
        )

    @staticmethod
    def usage_of(tally: Tally, reasoning_tokens: int) -> dict[str, object]:
        """Return the usage in the form of this API's answers."""
        output_tokens = tally.output_tokens - tally.unshown_tokens - tally.unbilled_tokens
        details = {"reasoning_tokens": reasoning_tokens}
        if tally.is_predicted:
            drafts = tally.drafts or engine.Drafts()
            right = drafts.prediction_accepted
            details["accepted_prediction_tokens"] = right
            details["rejected_prediction_tokens"] = drafts.prediction_tried - right
        return {
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": tally.prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": tally.cached_tokens},
            "completion_tokens_details": details,
        }


class _CompletionEnd:
    """Writes the end of a completion's stream, with the usage before it if there is a `head`."""

    __slots__ = ("_head",)

    def __init__(self, head: StreamHead | None) -> None:
        self._head = head

    async def last(self, usage: dict[str, object], ended_unix_s: int) -> bytes:
        del ended_unix_s
        return DONE if self._head is None else self._head.usage_chunk(usage) + DONE

    def failure(self, error: PlatformError) -> bytes:
        return error_event(body_of(error))


def prompt_annotations(
    generations: Sequence[Generation], answers_per_prompt: int
) -> list[dict[str, object]]:
    """Return the matches of rules in each prompt in Azure's form, or an empty list without any."""
    guard = generations[0].guard
    found = None if guard is None else guard.request_annotations()
    if found is None:
        return []
    count = len(generations) // answers_per_prompt
    return [{"prompt_index": it, "content_filter_results": found} for it in range(count)]


_BARE_END = _CompletionEnd(None)
