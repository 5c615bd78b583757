"""What a sequence must be before an engine sees it.

An engine does not notice these by itself: an id outside the vocabulary gives silent nonsense, an
empty or oversized prompt waits for ever, a position beyond the context goes on in noise.
"""

import math

from replica.engine.types import Limits, RefusedError, SequenceRequest
from sluice.errors import ErrorCode
from sluice.hashing import BLOCK_TOKENS, HASH_BYTES

STOP_IDS_MAX = 64
TEMPERATURE_MAX = 100.0


def check_request(request: SequenceRequest, limits: Limits) -> None:
    """Raise RefusedError, with the limit and the value, when the engine cannot serve this."""
    prompt_tokens = len(request.prompt)
    if prompt_tokens == 0:
        raise _invalid("the prompt is empty; send at least one token")
    if request.output_tokens_max < 1:
        raise _invalid("output_tokens_max is 0; ask for at least one token")
    total = prompt_tokens + request.output_tokens_max
    if total > limits.context_tokens_max:
        raise RefusedError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{prompt_tokens} prompt tokens and up to {request.output_tokens_max} new ones are"
            f" more than the context of {limits.context_tokens_max} tokens",
        )
    blocks = -(-total // BLOCK_TOKENS)
    if blocks > limits.kv_blocks:
        raise RefusedError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{total} tokens need {blocks} KV blocks; the engine has {limits.kv_blocks}",
        )
    if max(request.prompt) >= limits.vocabulary or min(request.prompt) < 0:
        raise _invalid(f"a prompt id is outside the vocabulary of {limits.vocabulary} tokens")
    if len(request.stop_token_ids) > STOP_IDS_MAX:
        raise _invalid(f"{len(request.stop_token_ids)} stop token ids; at most {STOP_IDS_MAX}")
    if request.cache_root and len(request.cache_root) != HASH_BYTES:
        raise _invalid(f"cache_root has {len(request.cache_root)} bytes instead of {HASH_BYTES}")
    if request.adapter_digest:
        raise RefusedError(
            ErrorCode.UNSUPPORTED_PARAMETER,
            f"adapter {request.adapter_digest[:12]}: this engine serves its base alone",
        )
    _check_sampling(request)


def _check_sampling(request: SequenceRequest) -> None:
    sampling = request.sampling
    if not (math.isfinite(sampling.temperature) and 0 <= sampling.temperature <= TEMPERATURE_MAX):
        raise _invalid(f"temperature {sampling.temperature} is not in 0..{TEMPERATURE_MAX:g}")
    if not 0 < sampling.top_p <= 1:
        raise _invalid(f"top_p {sampling.top_p} is not in (0, 1]")
    if sampling.top_k < 0:
        raise _invalid(f"top_k {sampling.top_k} is negative")


def _invalid(message: str) -> RefusedError:
    return RefusedError(ErrorCode.INVALID_REQUEST, message)
