"""From a validated body to what the engine is told: budget, sampling, session. Pure."""

from gateway.bases.assets import BaseAssets, EncodedPrompt
from gateway.bodies.chat import ChatRequest
from gateway.directory import Principal, ResolvedModel
from gateway.dispatch.generation import GenerationSpec
from gateway.server.middleware import Identity
from sluice.errors import BadRequestError, ErrorCode
from sluice.hashing import session_hash
from sluice.wire.engine.v1 import engine_pb2 as engine

# Bounds answers of models whose context nobody has stated.
_UNKNOWN_CONTEXT_TOKENS = 1 << 20


def output_budget(chat: ChatRequest, prompt_tokens: int, context_tokens_max: int) -> int:
    """Return how many tokens the answer may have; BadRequestError when there is no room at all.

    A `max_tokens` that does not fit beside the prompt is refused, as OpenAI does: an answer that
    is cut earlier than asked would look complete.
    """
    context = context_tokens_max or _UNKNOWN_CONTEXT_TOKENS
    wanted = chat.output_tokens_max
    if prompt_tokens + (wanted or 1) <= context:
        return wanted or context - prompt_tokens
    if wanted is None:
        detail = f"your messages resulted in {prompt_tokens} tokens"
    else:
        detail = (
            f"you requested {prompt_tokens + wanted} tokens ({prompt_tokens} in the messages, "
            f"{wanted} in the completion)"
        )
    raise BadRequestError(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {context} tokens. However, {detail}. "
        "Please reduce the length of the messages or completion.",
        param="messages",
    )


def generation_spec(
    chat: ChatRequest,
    *,
    identity: Identity,
    principal: Principal,
    resolved: ResolvedModel,
    assets: BaseAssets,
    prompt: EncodedPrompt,
    output_tokens_max: int,
) -> GenerationSpec:
    """Return what a router is told; what the request leaves open, the base's authors decide."""
    defaults = assets.defaults
    return GenerationSpec(
        request_id=identity.request_id,
        tenant_id=principal.tenant.id,
        tier_priority=principal.tier.priority,
        tenant_weight=principal.tenant.weight,
        pool_id=resolved.model.pool_id,
        adapter_digest=resolved.model.adapter_digest,
        cache_root=resolved.cache_root,
        prompt=prompt.ids,
        output_tokens_max=output_tokens_max,
        end_ids=assets.end_ids,
        sampling=engine.Sampling(
            temperature=defaults.temperature if chat.temperature is None else chat.temperature,
            top_p=defaults.top_p if chat.top_p is None else chat.top_p,
            top_k=defaults.top_k if chat.top_k is None else max(0, chat.top_k),
            seed=None if chat.seed is None else chat.seed % (1 << 64),
        ),
        session_hash=session_hash(principal.tenant.id, chat.session),
        deadline_ms=principal.tier.ttft_deadline_ms,
        ignore_eos=chat.ignore_eos,
        traceparent=identity.traceparent,
        block_hashes=prompt.block_hashes,
        tier_reserved_permille=principal.tier.reserved_permille,
        is_preemptible=principal.tier.is_preemptible,
    )
