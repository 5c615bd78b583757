"""Converts a validated body to specs for a router, with tokens, budget, sampling and session."""

from collections.abc import Sequence
from hashlib import blake2b
from sys import intern

from gateway.bases.assets import AssetCache, BaseAssets, EncodedPrompt
from gateway.bodies.budget import output_budget
from gateway.directory import Principal
from gateway.dispatch.generation import GenerationSpec
from gateway.endpoints.task import TextTask
from gateway.resolved import ResolvedModel
from gateway.server.identity import CallerIdentity
from sluice.deadlines import admission_ms
from sluice.hashing import session_hash
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine


async def specs_of(
    task: TextTask,
    *,
    identity: CallerIdentity,
    principal: Principal,
    resolved: ResolvedModel,
    cache: AssetCache,
) -> list[GenerationSpec]:
    """Return the specs of a body's answers for a model.

    Specs of one prompt are adjacent.

    Args:
        task: The body.
        identity: Identity of the request.
        principal: The caller.
        resolved: The model.
        cache: Returns or loads the assets of the model's base.

    Raises:
        PlatformError: The model lacks a requested feature, or its base is not loaded here.
    """
    assets = await cache.get(resolved.model.base_digest)
    task.check_vocabulary(len(assets.table.fragments))
    predicted = await task.predicted(assets, resolved)
    specs = list[GenerationSpec]()
    for prompt in await task.encoded(assets, resolved):
        specs += generation_specs(
            task,
            identity=identity,
            principal=principal,
            resolved=resolved,
            assets=assets,
            prompt=prompt,
            first_index=len(specs),
            predicted=predicted,
        )
    return specs


def generation_specs(
    task: TextTask,
    *,
    identity: CallerIdentity,
    principal: Principal,
    resolved: ResolvedModel,
    assets: BaseAssets,
    prompt: EncodedPrompt,
    first_index: int,
    predicted: Sequence[int] = (),
) -> list[GenerationSpec]:
    """Return the specs of the answers to one prompt.

    The defaults of the base's authors apply where the request sets no value. Later answers wait
    until the first one has begun, and have their own seeds. `predicted` has the expected ids.
    """
    sampling = task.sampling(assets.defaults)
    if (grammar := task.enforced(assets, prompt)) is not None:
        sampling = _own(sampling)
        sampling.grammar.CopyFrom(grammar)
    tier, context = principal.tier, resolved.context_tokens_max
    choices = task.choices
    leader = GenerationSpec(
        request_id=identity.request_id,
        # Protobuf returns a new string at each read, so the interned string saves memory.
        tenant_id=intern(principal.tenant.id),
        tier_priority=task.queue_priority(tier.priority),
        tenant_weight=principal.tenant.weight,
        pool_id=intern(resolved.model.pool_id),
        adapter_digest=resolved.model.adapter_digest,
        cache_root=resolved.cache_root,
        prompt=prompt.ids,
        output_tokens_max=output_budget(task, len(prompt.ids), context, first_index // choices),
        end_ids=assets.end_ids,
        sampling=sampling,
        session_hash=session_hash(principal.tenant.id, task.session),
        deadline_ms=task.deadline_ms or 0,
        admission_ms=_admission_ms(task, tier),
        ignore_eos=bool(task.ignore_eos),
        traceparent=identity.traceparent,
        tracestate=identity.upstream.state,
        new_pipe=task.new_pipe(assets, prompt),
        new_logprobs=task.new_logprobs(assets),
        block_hashes=prompt.block_hashes,
        prediction=predicted,
        pinned_blocks=prompt.pinned_blocks,
        prompt_logprobs=task.echoed_alternatives,
        is_echo_alone=task.is_echo_alone,
        tier_reserved_permille=0 if task.is_lowered else tier.reserved_permille,
        is_preemptible=tier.is_preemptible or task.is_lowered,
        dropped_turns=prompt.dropped_turns,
        pools=() if resolved.options is None else resolved.options.alike(resolved.model.pool_id),
    )
    first = leader if not first_index else _sibling(leader, first_index, is_begun=False)
    if choices == 1:
        return [first]
    return [first, *[_sibling(leader, first_index + number) for number in range(1, choices)]]


def _admission_ms(task: TextTask, tier: control.Tier) -> int:
    """Return the tier's deadline of the first token, or 0 if the request has its own."""
    if task.deadline_ms:
        return 0
    return admission_ms(tier.ttft_deadline_ms, is_preemptible=tier.is_preemptible)


def _own(shared: engine.Sampling) -> engine.Sampling:
    """Return a copy of shared sampling parameters, so that the copy may be changed."""
    sampling = engine.Sampling()
    sampling.CopyFrom(shared)
    return sampling


def derived_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of an answer after the first, as a hash of the seed and the index.

    With sums instead, the second answer of one seed would equal the first answer of the next seed.

    Args:
        seed: Seed of the request, 64 bits.
        index: Index of the answer among the request's answers, from 1 on.
    """
    key = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


def _sibling(leader: GenerationSpec, index: int, *, is_begun: bool = True) -> GenerationSpec:
    sampling = _own(leader.sampling)
    if sampling.HasField("seed"):
        sampling.seed = derived_seed(sampling.seed, index)
    request_id = f"{leader.request_id}-{index}"
    return leader._replace(
        request_id=request_id, sampling=sampling, choice=index, is_begun=is_begun
    )
