"""A validated request for text: what an endpoint knows of it, and what it comes to for a model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from gateway.bases.assets import AssetCache, BaseAssets, EncodedPrompt
from gateway.bodies.generation import GenerationFields
from gateway.directory import Principal, ResolvedModel
from gateway.dispatch.generation import GenerationSpec, WholeGeneration
from gateway.dispatch.streamed import LogprobFormat
from gateway.endpoints.submission import generation_specs
from gateway.server.identity import Identity
from gateway.text.pipe import TextPipe
from gateway.text.sse import ChunkWriter, StreamHead
from sluice.wire.engine.v1 import engine_pb2 as engine


class Task(Protocol):
    """What an endpoint knows of one request, and how it writes answers.

    Attributes:
        endpoint: Path of the API.
        kind: OpenAI's name of a whole answer; that of a chunk is the endpoint's business.
        chunk_kind: OpenAI's name of a chunk.
        id_prefix: Of the completion's id.
    """

    endpoint: str
    kind: str
    chunk_kind: str
    id_prefix: str

    @property
    def param_names(self) -> Mapping[str, str]:
        """Fields of the body, by the name that an engine has for what it refuses."""
        ...

    @property
    def fields(self) -> GenerationFields:
        """What every body that asks for text has; gone once `forget_request` was called."""
        ...

    async def prompts(self, assets: BaseAssets, resolved: ResolvedModel) -> Sequence[EncodedPrompt]:
        """Return the prompts; each is answered `fields.choices` times."""
        ...

    def forget_request(self) -> None:
        """Let go of what no answer needs once it has begun; `pipe` goes on working.

        Prompts may be long, and so may the answer; a body of few words takes 2.5 kB as well.
        """
        ...

    def copied(self) -> "Task":
        """Return the same task, which does not forget with this one."""
        ...

    def texts(self, assets: BaseAssets) -> Iterator[tuple[str, Iterable[object]]]:
        """Yield name and values of what the request says, for `gateway.texts.documents`."""
        ...

    def grammar(self, assets: BaseAssets, prompt: EncodedPrompt) -> engine.Grammar | None:
        """Return what the output must follow besides `fields.sampling`; None: nothing."""
        ...

    def pipe(self, assets: BaseAssets, prompt: EncodedPrompt) -> TextPipe:
        """Return what turns the tokens of one answer into text."""
        ...

    def chunks(self, head: StreamHead, index: int) -> ChunkWriter:
        """Return what writes the chunks of one choice."""
        ...

    def logprob_format(self, assets: BaseAssets) -> LogprobFormat | None:
        """Return what writes the log probabilities of one choice; None: nobody asked."""
        ...

    def choice(
        self, assets: BaseAssets, index: int, generation: WholeGeneration, reason: str
    ) -> dict[str, object]:
        """Return one choice of a whole answer."""
        ...


class Plan(NamedTuple):
    """A task for one model: everything that is known before anything is asked of a router."""

    resolved: ResolvedModel
    assets: BaseAssets
    prompts: Sequence[EncodedPrompt]
    specs: Sequence[GenerationSpec]

    @property
    def answers_per_prompt(self) -> int:
        """How many specs stand together for one prompt."""
        return len(self.specs) // len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum([len(prompt.ids) for prompt in self.prompts])

    @property
    def output_tokens_max(self) -> int:
        """Of all answers."""
        return sum([spec.output_tokens_max for spec in self.specs])

    def pipe(self, task: Task, index: int) -> TextPipe:
        """Return what turns the tokens of an answer into text."""
        return task.pipe(self.assets, self.prompts[index // self.answers_per_prompt])

    @property
    def fingerprint(self) -> str:
        """Names the weights that answer, as far as clients need to tell them apart."""
        model = self.resolved.model
        return _fingerprint(model.base_digest, model.adapter_digest)


async def plan_of(
    task: Task,
    *,
    identity: Identity,
    principal: Principal,
    resolved: ResolvedModel,
    cache: AssetCache,
) -> Plan:
    """Return what a task comes to for a model; PlatformError when that cannot be.

    Args:
        task: The request.
        identity: Of the request.
        principal: The caller.
        resolved: The model.
        cache: Has, or reads, what belongs to the model's base.
    """
    assets = await cache.get(resolved.model.base_digest)
    task.fields.check_vocabulary(len(assets.table.fragments))
    prompts = await task.prompts(assets, resolved)
    specs = list[GenerationSpec]()
    for prompt in prompts:
        specs += generation_specs(
            task.fields,
            identity=identity,
            principal=principal,
            resolved=resolved,
            assets=assets,
            prompt=prompt,
            first_index=len(specs),
            grammar=task.grammar(assets, prompt),
        )
    return Plan(resolved, assets, prompts, specs)


@lru_cache(maxsize=1024)
def _fingerprint(*digests: str) -> str:
    return "fp_" + "_".join([it.rpartition(":")[2][:10] for it in digests if it])
