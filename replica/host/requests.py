"""Translates a wire `Sequence` into the driver's `SequenceRequest`, or refuses it.

In a message, an absent field and a zero both mean that an option is off. Columns must have equal
lengths, and numbers are mapped to enumerations. The driver decides later whether an engine can
serve the request.
"""

from array import array
from collections.abc import Callable, Sequence

from replica.engine.types import (
    URGENT_PRIORITY,
    Fork,
    Grammar,
    GrammarKind,
    RefusedError,
    Sampling,
    SequenceRequest,
)
from replica.host.received_spans import ReceivedPrompt, ReceivedSpans
from sluice.errors import ErrorCode
from sluice.hashing import HASH_BYTES, cache_root
from sluice.token_ids import ID_BYTES, unpacked_ids
from sluice.wire.engine.v1 import engine_pb2 as wire

_GRAMMARS = {
    wire.Grammar.KIND_JSON: GrammarKind.JSON,
    wire.Grammar.KIND_JSON_SCHEMA: GrammarKind.JSON_SCHEMA,
    wire.Grammar.KIND_REGEX: GrammarKind.REGEX,
    wire.Grammar.KIND_CHOICE: GrammarKind.CHOICE,
    wire.Grammar.KIND_EBNF: GrammarKind.EBNF,
}


def decode_sequence(
    message: wire.Sequence,
    keys: Sequence[int],
    *,
    base_digest: str,
    spans: ReceivedSpans,
    seen_at_s: float,
    entropy: Callable[[], int],
) -> SequenceRequest:
    """Return the request for a sequence and its forks.

    Args:
        message: Message from the router.
        keys: Driver keys of the sequence and of each of its forks, in order.
        base_digest: Digest of the base that the engine serves.
        spans: Spans of earlier prompts, to which the prompt is added.
        seen_at_s: Monotonic seconds when the message arrived and the queue time began.
        entropy: Source of seeds for sequences without a seed.

    Raises:
        RefusedError: With INVALID_REQUEST and a text that names the correction.
        UnknownSpanError: The engine lacks a span that the message names.
    """
    root = decode_root(message.cache_root, base_digest, message.adapter_digest)
    forks = tuple(
        Fork(key, fork.seed if fork.HasField("seed") else entropy())
        for key, fork in zip(keys[1:], message.forks, strict=True)
    )
    prompt = _prompt(message, root or cache_root(base_digest, "", b""), spans)
    return SequenceRequest(
        key=keys[0],
        prompt=prompt.ids,
        output_tokens_max=message.output_tokens_max,
        stop_token_ids=frozenset(message.stop_token_ids),
        sampling=_sampling(message.sampling, entropy),
        cache_root=root,
        adapter_digest=message.adapter_digest,
        priority=min(message.priority, URGENT_PRIORITY - 1),
        ignore_eos=message.ignore_eos,
        submitted_at_s=seen_at_s,
        forks=forks,
        resumed_tokens=message.resumed_tokens,
        prompt_logprobs=_prompt_logprobs(message),
        scored_tokens=message.scored_tokens,
        pinned_blocks=message.pinned_blocks,
        hashes=prompt.hashes,
        draft_tokens_max=message.draft_tokens_max,
        prediction=tuple(message.prediction),
        trace=_trace(message),
    )


def decode_root(root: bytes, base_digest: str, adapter_digest: str) -> bytes:
    """Return the root that a message names for its chain of block hashes, or the adapter's root.

    Without another root than the base's, the adapter's blocks would have the hashes of the base's
    blocks, and their contents would be confused.

    Raises:
        RefusedError: With INVALID_REQUEST if the root is longer than a root can be.
    """
    if len(root) > HASH_BYTES:
        text = f"cache_root has {len(root)} bytes; send {HASH_BYTES}, or none"
        raise RefusedError(ErrorCode.INVALID_REQUEST, text)
    if not root and adapter_digest:
        return cache_root(base_digest, adapter_digest, b"")
    return root


def prompt_tokens(message: wire.Sequence) -> int:
    """Return the number of tokens of a message's prompt, which need not be valid."""
    return message.known_tokens + len(message.prompt) + len(message.prompt_ids) // ID_BYTES


def decode_hashes(data: bytes, hash_bytes: int, hashes_max: int) -> list[bytes]:
    """Return the hashes that the bytes concatenate.

    Raises:
        RefusedError: With INVALID_REQUEST if the last hash is incomplete or there are more than
            `hashes_max`.
    """
    count, rest = divmod(len(data), hash_bytes)
    if rest or count > hashes_max:
        raise RefusedError(
            ErrorCode.INVALID_REQUEST,
            f"hashes have {len(data)} bytes; send up to {hashes_max} of {hash_bytes} bytes each",
        )
    return [data[start : start + hash_bytes] for start in range(0, len(data), hash_bytes)]


def _prompt(message: wire.Sequence, root: bytes, spans: ReceivedSpans) -> ReceivedPrompt:
    """Return a prompt. A router of the last release sends its ids one by one."""
    try:
        ids = unpacked_ids(message.prompt_ids)
    except ValueError:
        text = f"prompt_ids has {len(message.prompt_ids)} bytes; send {ID_BYTES} per token id"
        raise RefusedError(ErrorCode.INVALID_REQUEST, text, param="prompt") from None
    if message.prompt:
        ids = array("I", message.prompt[:])  # from a list, three times as fast
    return spans.read(ids, root, message.known_span, message.known_tokens)


def _prompt_logprobs(message: wire.Sequence) -> int:
    if message.scored_tokens:
        return 0
    return message.prompt_logprobs if message.HasField("prompt_logprobs") else -1


def _trace(message: wire.Sequence) -> dict[str, str] | None:
    if not message.traceparent:
        return None
    headers = {"traceparent": message.traceparent}
    return headers | {"tracestate": message.tracestate} if message.tracestate else headers


def _sampling(message: wire.Sampling, entropy: Callable[[], int]) -> Sampling:
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else entropy(),
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=_bias(message) if message.bias_token or message.logit_bias else (),
        tokens_min=message.tokens_min,
        logprobs=message.logprobs if message.HasField("logprobs") else -1,
        grammar=_grammar(message.grammar) if message.HasField("grammar") else None,
    )


def _bias(message: wire.Sampling) -> tuple[tuple[int, float], ...]:
    tokens, values = message.bias_token, message.logit_bias
    if len(tokens) != len(values):
        raise RefusedError(
            ErrorCode.INVALID_REQUEST,
            f"{len(tokens)} tokens have a bias and {len(values)} values are given; send one each",
        )
    if len(set(tokens)) != len(tokens):
        raise RefusedError(
            ErrorCode.INVALID_REQUEST, "a token has more than one bias; send one value per token"
        )
    return tuple(zip(tokens, values, strict=True))


def _grammar(message: wire.Grammar) -> Grammar:
    kind = _GRAMMARS.get(message.kind)
    if kind is None:
        raise RefusedError(
            ErrorCode.INVALID_REQUEST,
            f"grammar kind {message.kind} is not known; this engine knows"
            f" {', '.join(sorted(_GRAMMARS.values()))}",
        )
    return Grammar(kind, message.text)
