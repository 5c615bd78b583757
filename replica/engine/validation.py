"""Checks a sequence request before an engine accepts it.

An engine computes nonsense for an id outside the vocabulary or a position beyond the context. It
would never schedule an empty or oversized prompt. So this module refuses such requests. Checks that
only a backend can perform are in `Backend.check_request`.
"""

import math
from array import array
from collections.abc import Sequence

import numpy as np

from replica.engine.speculation import DRAFT_TOKENS_MAX
from replica.engine.types import Capabilities, Limits, RefusedError, Sampling, SequenceRequest
from sluice.errors import ErrorCode
from sluice.hashing import BLOCK_TOKENS, HASH_BYTES

STOP_IDS_MAX = 64
TEMPERATURE_MAX = 100.0
# The limits on n (128), penalties and biases are those of OpenAI's API.
FORKS_MAX = 127
PENALTY_MAX = 2.0
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 10.0  # near 0, logits would overflow
BIASES_MAX = 300
BIAS_MAX = 100.0
GRAMMAR_BYTES_MAX = 64 * 1024


def check_request(request: SequenceRequest, limits: Limits, capabilities: Capabilities) -> None:
    """Raise RefusedError if the engine cannot serve a request. The message has limit and value."""
    _check_size(request, limits)
    if not _are_ids(request.prompt, limits.vocabulary):
        text = f"a prompt id is outside the vocabulary of {limits.vocabulary} tokens"
        raise _invalid("prompt", text)
    if len(request.stop_token_ids) > STOP_IDS_MAX:
        text = f"{len(request.stop_token_ids)} stop token ids; at most {STOP_IDS_MAX}"
        raise _invalid("stop_token_ids", text)
    if request.cache_root and len(request.cache_root) != HASH_BYTES:
        text = f"cache_root has {len(request.cache_root)} bytes instead of {HASH_BYTES}"
        raise _invalid("cache_root", text)
    if request.adapter_digest and not capabilities.adapter_slots:
        name = request.adapter_digest[:12]
        raise _unsupported("adapter_digest", f"adapter {name}: this engine serves its base alone")
    if len(request.forks) > FORKS_MAX:
        text = f"{len(request.forks)} forks; at most {FORKS_MAX}, n = {FORKS_MAX + 1}"
        raise _invalid("forks", text)
    keys = {request.key, *(fork.key for fork in request.forks)}
    if len(keys) != 1 + len(request.forks):
        raise _invalid("forks", "two forks have the same key; each needs one of its own")
    _check_draft(request.draft_tokens_max, capabilities)
    _check_prediction(request, limits, capabilities)
    if request.scored_tokens:
        _check_scores(request, capabilities)
    else:
        _check_prompt_logprobs(request, capabilities)
    sampling = request.sampling
    if sampling != _PLAIN:
        _check_distribution(sampling)
        _check_logprobs("logprobs", sampling.logprobs, capabilities)
        _check_logits(request, limits, capabilities)
        _check_grammar(sampling, capabilities)


def _are_ids(tokens: Sequence[int], vocabulary: int) -> bool:
    """Whether all tokens are ids of the vocabulary. An array is checked 100 times as fast."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        return int(np.frombuffer(tokens, np.uint32).max()) < vocabulary
    return max(tokens) < vocabulary and min(tokens) >= 0


_PLAIN = Sampling()
# Fields that an engine supports only if `has_penalties` is set.
_OF_LOGITS = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "min_p", "tokens_min"),
)


def _check_scores(request: SequenceRequest, capabilities: Capabilities) -> None:
    if not capabilities.has_scores:
        raise _unsupported("scored_tokens", "scored_tokens: this engine scores no answers")
    if not 0 < request.scored_tokens < len(request.prompt):
        raise _invalid(
            "scored_tokens",
            f"scored_tokens {request.scored_tokens} is not in 1..{len(request.prompt) - 1}: they"
            " are the end of the prompt, and something must stand before them",
        )


def _check_prompt_logprobs(request: SequenceRequest, capabilities: Capabilities) -> None:
    _check_logprobs("prompt_logprobs", request.prompt_logprobs, capabilities)
    if request.prompt_logprobs >= 0 and not capabilities.has_prompt_logprobs:
        text = "prompt_logprobs: this engine reports none of the prompt"
        raise _unsupported("prompt_logprobs", text)


def _check_size(request: SequenceRequest, limits: Limits) -> None:
    prompt_tokens = len(request.prompt)
    if prompt_tokens == 0:
        raise _invalid("prompt", "the prompt is empty; send at least one token")
    if request.output_tokens_max < 1:
        raise _invalid("output_tokens_max", "output_tokens_max is 0; ask for at least one token")
    if not 0 <= request.resumed_tokens < prompt_tokens:
        raise _invalid(
            "resumed_tokens",
            f"resumed_tokens {request.resumed_tokens} is not in 0..{prompt_tokens - 1}: they are"
            " the end of the prompt, and something must stand before them",
        )
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


def _check_draft(draft_tokens_max: int, capabilities: Capabilities) -> None:
    if not 0 <= draft_tokens_max <= DRAFT_TOKENS_MAX:
        text = f"draft_tokens_max {draft_tokens_max} is not in 0..{DRAFT_TOKENS_MAX}"
        raise _invalid("draft_tokens_max", text)
    if draft_tokens_max and not capabilities.has_drafts:
        text = "draft_tokens_max: this engine does not speculate; send 0"
        raise _unsupported("draft_tokens_max", text)


def _check_prediction(request: SequenceRequest, limits: Limits, capabilities: Capabilities) -> None:
    prediction = request.prediction
    if not prediction or not capabilities.has_drafts:
        return  # without speculation the answer is the same, and only takes longer
    if len(prediction) > limits.context_tokens_max:
        size = f"{len(prediction)} tokens; at most {limits.context_tokens_max}"
        raise _invalid("prediction", f"the prediction has {size}")
    if not _are_ids(prediction, limits.vocabulary):
        text = f"an id of the prediction is outside the vocabulary of {limits.vocabulary} tokens"
        raise _invalid("prediction", text)


def _check_logprobs(name: str, wanted: int, capabilities: Capabilities) -> None:
    if wanted < -1:
        raise _invalid(name, f"{name} {wanted} is negative; -1 is off")
    if wanted >= 0 and not capabilities.logprobs_max:
        raise _unsupported(name, f"{name}: this engine reports none")
    if wanted > capabilities.logprobs_max:
        raise _invalid(name, f"{name} {wanted}: at most {capabilities.logprobs_max} alternatives")


def _check_distribution(sampling: Sampling) -> None:
    if not (math.isfinite(sampling.temperature) and 0 <= sampling.temperature <= TEMPERATURE_MAX):
        text = f"temperature {sampling.temperature} is not in 0..{TEMPERATURE_MAX:g}"
        raise _invalid("temperature", text)
    if not 0 < sampling.top_p <= 1:
        raise _invalid("top_p", f"top_p {sampling.top_p} is not in (0, 1]")
    if sampling.top_k < 0:
        raise _invalid("top_k", f"top_k {sampling.top_k} is negative")
    if not 0 <= sampling.min_p <= 1:
        raise _invalid("min_p", f"min_p {sampling.min_p} is not in [0, 1]")


def _check_logits(request: SequenceRequest, limits: Limits, capabilities: Capabilities) -> None:
    """Check penalties, bias, min_p and tokens_min."""
    sampling = request.sampling
    for name, penalty in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ):
        if not -PENALTY_MAX <= penalty <= PENALTY_MAX:
            raise _invalid(name, f"{name} {penalty} is not in {-PENALTY_MAX:g}..{PENALTY_MAX:g}")
    if not REPETITION_PENALTY_MIN <= sampling.repetition_penalty <= REPETITION_PENALTY_MAX:
        raise _invalid(
            "repetition_penalty",
            f"repetition_penalty {sampling.repetition_penalty} is not in"
            f" {REPETITION_PENALTY_MIN:g}..{REPETITION_PENALTY_MAX:g}",
        )
    tokens_max = request.resumed_tokens + request.output_tokens_max
    if not 0 <= sampling.tokens_min <= tokens_max:
        raise _invalid(
            "tokens_min",
            f"min_tokens {sampling.tokens_min} is not in 0..{tokens_max}, which is all that the"
            " answer may have",
        )
    _check_bias(sampling.logit_bias, limits)
    for name in () if capabilities.has_penalties else _OF_LOGITS:
        if getattr(sampling, name) != getattr(_PLAIN, name):
            raise _unsupported(
                name, "this engine has no penalties, logit_bias, min_p and min_tokens; leave it out"
            )


def _check_bias(bias: tuple[tuple[int, float], ...], limits: Limits) -> None:
    if len(bias) > BIASES_MAX:
        raise _invalid("logit_bias", f"{len(bias)} entries of logit_bias; at most {BIASES_MAX}")
    seen: set[int] = set()
    for token, value in bias:
        if not 0 <= token < limits.vocabulary:
            text = f"id {token} is outside the vocabulary of {limits.vocabulary} tokens"
            raise _invalid("logit_bias", f"logit_bias: {text}")
        if token in seen:
            raise _invalid("logit_bias", f"logit_bias: id {token} is there twice")
        if not -BIAS_MAX <= value <= BIAS_MAX:
            text = f"{value} of id {token} is not in {-BIAS_MAX:g}..{BIAS_MAX:g}"
            raise _invalid("logit_bias", f"logit_bias: {text}")
        seen.add(token)


def _check_grammar(sampling: Sampling, capabilities: Capabilities) -> None:
    if sampling.grammar is None:
        return
    if not capabilities.has_grammars:
        text = f"a grammar ({sampling.grammar.kind}): this engine cannot constrain answers"
        raise _unsupported("grammar", text)
    size = len(sampling.grammar.text.encode(errors="surrogatepass"))
    if size > GRAMMAR_BYTES_MAX:
        raise _invalid("grammar", f"the grammar has {size} bytes; at most {GRAMMAR_BYTES_MAX}")


def _invalid(param: str, message: str) -> RefusedError:
    return RefusedError(ErrorCode.INVALID_REQUEST, message, param=param)


def _unsupported(param: str, message: str) -> RefusedError:
    return RefusedError(ErrorCode.UNSUPPORTED_PARAMETER, message, param=param)
