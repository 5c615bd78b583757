"""The seam between an API and what generates: body in, ids on; ids back, events out.

A further API of generated text is one more `TextTask`: it parses its own body, says which prompts
and bounds that comes to, and writes whole answers and the events of streams. Everything between
(limits, models that stand in, routers, retries, sockets, usage) is the same for all.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from gateway.bases.assets import BaseAssets, EncodedPrompt
from gateway.bodies.generation import GenerationFields
from gateway.directory import ResolvedModel
from gateway.dispatch.generation import WholeGeneration
from gateway.dispatch.tally import Tally
from gateway.server.errors import body_of
from gateway.text.detokenizer import TokenTable
from gateway.text.logprobs import NewLogprobs
from gateway.text.pipe import TextPipe
from gateway.text.sse import DONE, ChunkWriter, StreamHead, error_event
from sluice.errors import PlatformError
from sluice.scopes import Scope
from sluice.wire.engine.v1 import engine_pb2 as engine


class TextTask(GenerationFields):
    """A validated body of an API, and how that API writes the answers to it.

    A stream lets go of it at its first byte: it may be long, and so may the answer. What is needed
    until the end is made before: `new_pipe`, `new_logprobs` and `chunks` keep nothing of it.

    Attributes:
        endpoint: Path of the API.
        scope: What a key needs.
        kind: Name of a whole answer.
        chunk_kind: Name of a chunk.
        id_prefix: Of the completion's id.
    """

    endpoint: ClassVar[str]
    scope: ClassVar[Scope]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    # --- in ---------------------------------------------------------------------------------

    @abstractmethod
    async def encoded(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[EncodedPrompt]:
        """Return the prompts as ids; each is answered `choices` times."""

    @abstractmethod
    def enforced(self, assets: BaseAssets, prompt: EncodedPrompt) -> engine.Grammar | None:
        """Return what the output must follow besides `sampling`; None: nothing."""

    @abstractmethod
    def texts(self, table: TokenTable) -> Iterator[tuple[str, Iterable[object]]]:
        """Yield name and values of what the request says, for `gateway.texts.documents`."""

    # --- out --------------------------------------------------------------------------------

    @abstractmethod
    def new_pipe(self, assets: BaseAssets, prompt: EncodedPrompt) -> Callable[[], TextPipe]:
        """Return what makes a pipe, which turns the tokens of one answer into text."""

    @abstractmethod
    def new_logprobs(self, assets: BaseAssets) -> NewLogprobs | None:
        """Return what keeps and writes the log probabilities of one choice; None: nobody asked."""

    @abstractmethod
    def choice_of(self, generation: WholeGeneration, reason: str) -> dict[str, object]:
        """Return one choice of a whole answer."""

    @abstractmethod
    def chunks(self, head: StreamHead, index: int) -> ChunkWriter:
        """Return what writes the events of one choice of a stream."""

    def whole(
        self,
        uid: str,
        *,
        model: str,
        created_unix_s: int,
        fingerprint: str,
        choices: Sequence[dict[str, object]],
        usage: dict[str, object],
    ) -> dict[str, object]:
        """Return a whole answer: what `choice_of` and `usage_of` say, and what it is called."""
        answer: dict[str, object] = {
            "id": f"{self.id_prefix}-{uid}",
            "object": self.kind,
            "created": created_unix_s,
            "model": model,
            "system_fingerprint": fingerprint,
            "choices": choices,
            "usage": usage,
        }
        if self.served_tier:
            answer["service_tier"] = self.served_tier
        return answer

    def stream_head(
        self, uid: str, *, model: str, created_unix_s: int, fingerprint: str
    ) -> StreamHead:
        """Return what all events of a stream have in common."""
        return StreamHead(
            self.chunk_kind,
            f"{self.id_prefix}-{uid}",
            model,
            created_unix_s,
            fingerprint=fingerprint,
            service_tier=self.served_tier or "",
            with_usage=self.include_usage,
        )

    @staticmethod
    def usage_of(tally: Tally, reasoning_tokens: int) -> dict[str, object]:
        """Return what was used, as clients are told."""
        return {
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.output_tokens,
            "total_tokens": tally.prompt_tokens + tally.output_tokens,
            "prompt_tokens_details": {"cached_tokens": tally.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }

    @staticmethod
    def last_event(usage: bytes) -> bytes:
        """Return the end of a stream that has all its choices; `usage` is its event, or empty."""
        return usage + DONE

    @staticmethod
    def failure(error: PlatformError) -> bytes:
        """Return the event that ends a stream that has failed."""
        return error_event(body_of(error))
