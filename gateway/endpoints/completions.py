"""POST /v1/completions: text, or token ids, continued as they are."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from aiohttp import web

from gateway.bases.assets import BaseAssets, EncodedPrompt
from gateway.bodies.completions import CompletionRequest, parse_completion_request
from gateway.directory import Directory, ResolvedModel
from gateway.dispatch.generation import WholeGeneration
from gateway.dispatch.streamed import LogprobFormat
from gateway.endpoints.completer import Completer
from gateway.endpoints.reading import read_parsed
from gateway.server.middleware import authenticate
from gateway.text.logprobs import TextOffsets, completion_logprobs
from gateway.text.pipe import TextPipe
from gateway.text.sse import StreamHead, TextChunks
from gateway.texts.documents import Tokens
from sluice.scopes import Scope
from sluice.wire.engine.v1 import engine_pb2 as engine


class Completions:
    """The endpoint."""

    def __init__(self, directory: Directory, completer: Completer) -> None:
        """Compose."""
        self._directory = directory
        self._completer = completer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        principal = authenticate(self._directory, request)
        self._directory.require_scope(principal, Scope.COMPLETIONS)
        task = _CompletionTask(await read_parsed(request, parse_completion_request))
        return await self._completer.answer(request, principal, task)


class _CompletionTask:
    """One request, with one answer or several."""

    endpoint = "/v1/completions"
    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl"

    __slots__ = ("_stops", "fields", "param_names")

    def __init__(self, fields: CompletionRequest) -> None:
        self.fields = fields
        self.param_names = fields.param_names
        self._stops = tuple(fields.stops)

    async def prompts(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[EncodedPrompt]:
        has_special_tokens = self.fields.add_special_tokens is not False
        root, owner = resolved.cache_root, resolved.tenant_id
        context = resolved.context_tokens_max
        for index, prompt in enumerate(self.fields.prompts):
            if isinstance(prompt, str):
                assets.require_fit(len(prompt), context, self.fields.prompt_param(index))
        return [
            await assets.encode_text(
                prompt, root, owner=owner, add_special_tokens=has_special_tokens
            )
            if isinstance(prompt, str)
            else await assets.hash_ids(prompt, root, owner=owner)
            for prompt in self.fields.prompts
        ]

    def forget_request(self) -> None:
        del self.fields

    def copied(self) -> "_CompletionTask":
        return _CompletionTask(self.fields)

    def texts(self, assets: BaseAssets) -> Iterator[tuple[str, Iterable[object]]]:
        prompts = self.fields.prompts
        yield "prompts", (it if isinstance(it, str) else _text(assets, it) for it in prompts)

    def grammar(self, assets: BaseAssets, prompt: EncodedPrompt) -> engine.Grammar | None:  # noqa: ARG002 - text has no tools
        return None

    def pipe(self, assets: BaseAssets, prompt: EncodedPrompt) -> TextPipe:  # noqa: ARG002 - the same for all
        return TextPipe(assets.table, self._stops)

    def chunks(self, head: StreamHead, index: int) -> TextChunks:
        return TextChunks(head, index, self._echo(index))

    def logprob_format(self, assets: BaseAssets) -> LogprobFormat | None:
        if self.fields.logprobs is None:
            return None
        return partial(completion_logprobs, assets.table, offsets=TextOffsets())

    def choice(
        self, assets: BaseAssets, index: int, generation: WholeGeneration, reason: str
    ) -> dict[str, object]:
        answer = generation.answer
        logprobs = None
        if self.fields.logprobs is not None:
            logprobs = completion_logprobs(assets.table, answer.logprobs, TextOffsets())
        return {
            "index": index,
            "text": self._echo(index) + answer.content,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _echo(self, index: int) -> str:
        """Return the prompt of a choice if it is wanted back."""
        prompt = self.fields.prompts[index // self.fields.choices]
        return prompt if self.fields.echo and isinstance(prompt, str) else ""


def _text(assets: BaseAssets, ids: Sequence[int]) -> Tokens:
    """Return a prompt that came as token ids as one whose text can be told."""
    return Tokens(TextPipe(assets.table), ids)
