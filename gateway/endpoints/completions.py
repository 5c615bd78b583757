"""POST /v1/completions, which continues text or token ids without a template."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from gateway.auto.board import AskedPrompt
from gateway.bases.assets import BaseAssets, EncodedPrompt
from gateway.bodies.completions import CompletionRequest
from gateway.dispatch.generation import WholeGeneration
from gateway.endpoints.task import TextTask
from gateway.resolved import ResolvedModel
from gateway.text.detokenizer import TokenTable
from gateway.text.logprobs import (
    LogprobFormat,
    LogprobLine,
    NewLogprobs,
    TextOffsets,
    completion_logprobs,
)
from gateway.text.pipe import TextPipe
from gateway.text.sse import StreamHead, TextChunks
from gateway.texts.documents import TextTokens
from sluice.errors import ErrorCode, PlatformError
from sluice.scopes import Scope
from sluice.wire.engine.v1 import engine_pb2 as engine


class CompletionTask(CompletionRequest, TextTask):
    """A text completion, with one answer or several per prompt."""

    endpoint = "/v1/completions"
    scope = Scope.COMPLETIONS
    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl"

    async def encoded(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[EncodedPrompt]:
        """Return the prompts as ids, tokenized unless the request has ids already."""
        has_special_tokens = self.add_special_tokens is not False
        root, owner = resolved.cache_root, resolved.tenant_id
        context = resolved.context_tokens_max
        for index, prompt in enumerate(self.prompts):
            if isinstance(prompt, str):
                assets.require_fit(len(prompt), context, self.prompt_param(index))
        return [
            await assets.encode_text(
                prompt, root, owner=owner, add_special_tokens=has_special_tokens
            )
            if isinstance(prompt, str)
            else await assets.hash_ids(prompt, root, owner=owner)
            for prompt in self.prompts
        ]

    def asked(self) -> AskedPrompt:
        """Return the words of all prompts, and the number of their token ids."""
        said = [it for it in self.prompts if isinstance(it, str)]
        ids = sum([len(it) for it in self.prompts if not isinstance(it, str)])
        return AskedPrompt(said, ids=ids)

    def texts(self, table: TokenTable) -> Iterator[tuple[str, Iterable[object]]]:
        """Yield the prompts, for `gateway.texts.documents`."""
        prompts = self.prompts
        told = (it if isinstance(it, str) else TextTokens(TextPipe(table), it) for it in prompts)
        yield "prompts", told

    def enforced(self, assets: BaseAssets, prompt: EncodedPrompt) -> engine.Grammar | None:
        """Return None, because a text completion has neither tools nor a grammar of its own."""
        del assets, prompt

    def new_pipe(self, assets: BaseAssets, prompt: EncodedPrompt) -> Callable[[], TextPipe]:
        """Return a maker of pipes. All prompts have the same maker."""
        del prompt
        return partial(TextPipe, assets.table, tuple(self.stops))

    def new_logprobs(self, assets: BaseAssets) -> NewLogprobs | None:
        """Return a maker of a choice's log probabilities, or None if they are not requested."""
        if self.logprobs is None:
            return None
        # With an echo, every token of the prompt has an entry, also special ones. Evaluation
        # harnesses count the entries.
        hidden = frozenset[int]() if self.echo else assets.table.hidden
        return partial(_logprobs, assets.table, hidden)

    def chunks(self, head: StreamHead, index: int) -> TextChunks:
        """Return the writer of a choice's chunks. If requested, the prompt precedes them."""
        return TextChunks(head, index, self._echo(index))

    def choice_of(self, generation: WholeGeneration, reason: str) -> dict[str, object]:
        """Return one choice of a whole answer, with the echoed prompt if requested."""
        spec, line = generation.spec, generation.prompt_logprobs
        if line is not None and not line.is_whole:
            text = "The engine left log probabilities of the prompt out; try again."
            raise PlatformError(ErrorCode.ENGINE_FAILED, text)
        text = self._echo(spec.choice)
        if self.echo and not isinstance(self.prompts[0], str):
            pipe = TextPipe(generation.pipe.table)
            text = pipe.push(spec.prompt).content + pipe.flush().content
        return {
            "index": spec.choice,
            "text": text if self.is_echo_alone else text + generation.answer.content,
            "logprobs": generation.logprobs,
            "finish_reason": "length" if self.is_echo_alone else reason,
        }

    def _echo(self, index: int) -> str:
        """Return the prompt of a choice if it is text and is to be echoed."""
        prompt = self.prompts[index // self.choices]
        return prompt if self.echo and isinstance(prompt, str) else ""


def _logprobs(table: TokenTable, hidden: frozenset[int]) -> tuple[LogprobLine, LogprobFormat]:
    line = LogprobLine(hidden)
    return line, partial(completion_logprobs, table, offsets=TextOffsets())
