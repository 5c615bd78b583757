"""Converts protobuf messages of gateways and engines to the core's data types, and back."""

from collections.abc import Sequence

from router.core.fleet.prefix_index import BlockHashes
from router.core.types.batch import GatewayBatch
from router.core.types.request import Dispatch, Request
from router.sent_spans import SentSpans
from sluice.hashing import BLOCK_TOKENS
from sluice.prompt_spans import SPAN_BYTES, SPAN_TOKENS
from sluice.token_ids import ID_BYTES, packed_ids, unpacked_ids
from sluice.tracecontext import is_sampled, later_attempt
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

PROMPT_IDS = "prompt_ids"  # feature of engines that read `Sequence.prompt_ids`


def prompt_tokens_of(submit: wire.Submit) -> int:
    """Return the number of tokens of a submit's prompt. Raises ValueError for a part of an id."""
    count, rest = divmod(len(submit.prompt_ids), ID_BYTES)
    if rest:
        raise ValueError(f"prompt_ids ends with {rest} bytes; send {ID_BYTES} per id")
    return count + len(submit.prompt)


def request(submit: wire.Submit) -> Request:
    """Return the core's request for a gateway's submit.

    Raises:
        ValueError: There are more block hashes than the prompt has blocks, or its last id is
            incomplete.
    """
    prompt_tokens = prompt_tokens_of(submit)
    hashes: BlockHashes | tuple[int, ...] = ()
    if submit.block_hashes:
        hashes = BlockHashes(submit.block_hashes)
        if len(hashes) * BLOCK_TOKENS > prompt_tokens:
            raise ValueError(f"{len(hashes)} block hashes for a prompt of {prompt_tokens} tokens")
    return Request(
        handle=submit.handle,
        cell_id=submit.cell_id,
        prompt_tokens=prompt_tokens,
        output_max=submit.output_tokens_max,
        tenant_id=submit.tenant_id,
        request_id=submit.request_id,
        priority=submit.tier_priority,
        reserved_permille=submit.tier_reserved_permille,
        is_preemptible=submit.is_preemptible,
        weight=submit.tenant_weight,
        deadline_s=submit.deadline_ms * 1e-3,
        admission_s=submit.admission_ms * 1e-3,
        absence_s=submit.absence_ms * 1e-3,
        hashes=hashes,
        session=submit.session_hash,
        adapter=submit.adapter_digest,
        payload=submit,
        is_traced=submit.resumed_tokens > 0 or is_sampled(submit.traceparent),
    )


def add_sequence(
    message: engine.Submit,
    dispatch: Dispatch,
    *,
    reads_prompt_ids: bool = False,
    sent: SentSpans | None = None,
) -> None:
    """Append a dispatch to a message for the engine.

    For a preempted request, the emitted tokens are appended to the prompt. `reads_prompt_ids` is
    whether the engine has the feature `PROMPT_IDS`. `sent` are the spans that the engine has, or
    None for an engine without the feature `PROMPT_SPANS`.
    """
    submit = dispatch.request.payload
    assert submit is not None, "a dispatch is converted before its request can end"
    output = dispatch.request.output or ()
    sequence = message.sequences.add(
        id=dispatch.sequence,
        output_tokens_max=dispatch.output_max,
        cache_root=submit.cache_root,
        priority=submit.tier_priority,
    )
    # Most sequences have none of these fields, and setting a default value costs as much as any
    # other.
    if submit.stop_token_ids:
        sequence.stop_token_ids.extend(submit.stop_token_ids)
    if submit.adapter_digest:
        sequence.adapter_digest = submit.adapter_digest
    if submit.traceparent:
        sequence.traceparent = _of_dispatch(submit, dispatch.request.interrupted)
        if submit.tracestate:
            sequence.tracestate = submit.tracestate
    if submit.ignore_eos:
        sequence.ignore_eos = True
    if submit.pinned_blocks:
        sequence.pinned_blocks = submit.pinned_blocks
    if submit.prediction:
        sequence.prediction.extend(submit.prediction)
    if submit.resumed_tokens or output:
        sequence.resumed_tokens = submit.resumed_tokens + len(output)
    _ask_for_logprobs(sequence, submit)
    _add_prompt(sequence, submit, output, reads_prompt_ids=reads_prompt_ids, sent=sent)
    sequence.sampling.CopyFrom(submit.sampling)


def _add_prompt(
    sequence: engine.Sequence,
    submit: wire.Submit,
    output: Sequence[int],
    *,
    reads_prompt_ids: bool,
    sent: SentSpans | None,
) -> None:
    """Set a prompt and the tokens emitted after it, converted only for another release."""
    if not submit.prompt_ids:
        # C code copies the ids in their packed form, 20 times as fast as through Python integers.
        prompt = wire.PackedSubmit.FromString(submit.SerializeToString()).prompt
        sequence.MergeFromString(wire.PackedSequence(prompt=prompt).SerializeToString())
        sequence.prompt.extend(output)
    elif reads_prompt_ids:
        ids = submit.prompt_ids
        if sent is not None and (known := sent.send(submit.block_hashes)):
            sequence.known_span = known[-1]
            sequence.known_tokens = len(known) * SPAN_TOKENS
            ids = ids[len(known) * SPAN_BYTES :]
        sequence.prompt_ids = ids + packed_ids(output)
    else:
        sequence.prompt.extend(unpacked_ids(submit.prompt_ids))
        sequence.prompt.extend(output)


def _ask_for_logprobs(sequence: engine.Sequence, submit: wire.Submit) -> None:
    """Request log probabilities of prompt tokens, if the submit requests them."""
    if submit.HasField("prompt_logprobs"):
        sequence.prompt_logprobs = submit.prompt_logprobs
    if submit.scored_tokens:
        sequence.scored_tokens = submit.scored_tokens


def _of_dispatch(submit: wire.Submit, interrupted: int) -> str:
    """Return the trace context of a dispatch, with another span for each further attempt."""
    if not interrupted:
        return submit.traceparent
    return later_attempt(submit.traceparent, submit.attempt, interrupted)


def submit_message(
    epoch: int, dispatches: list[Dispatch], *, reads_prompt_ids: bool = False
) -> engine.Submit:
    """Return one message for the engine with all given dispatches."""
    message = engine.Submit(epoch=epoch)
    for dispatch in dispatches:
        add_sequence(message, dispatch, reads_prompt_ids=reads_prompt_ids)
    return message


def connect_response(batch: GatewayBatch) -> wire.ConnectResponse:
    """Return one message with all output of a tick for one gateway."""
    message = wire.ConnectResponse(handle=batch.handles, count=batch.counts, token=batch.tokens)
    # Most messages have none of these fields, and setting an empty list costs as much as any other.
    if batch.logprobs is not None:
        message.logprobs.CopyFrom(batch.logprobs)
    if batch.prompt_logprobs:
        message.prompt_logprobs.extend(batch.prompt_logprobs)
    if batch.placed:
        message.placed.extend(batch.placed)
    if batch.outcomes:
        message.outcomes.extend(batch.outcomes)
    if batch.cells:
        message.cells.extend(batch.cells)
    if batch.sketches:
        message.sketches.extend(batch.sketches)
    return message
