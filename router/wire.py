"""From the core's plain data to the messages that are sent."""

from router.core.model import Batch, Slot
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire


def add_sequence(message: engine.Submit, slot: Slot) -> None:
    """Append what the engine is told about a dispatch.

    The prompt goes over in its packed form, copied and parsed in C: 20 times as fast as going
    through Python integers.
    """
    submit = slot.request.submit
    assert submit is not None, "a dispatch is converted before its request can end"
    sequence = message.sequences.add(
        id=slot.sequence,
        output_tokens_max=slot.output_max,
        stop_token_ids=submit.stop_token_ids,
        cache_root=submit.cache_root,
        adapter_digest=submit.adapter_digest,
        priority=submit.tier_priority,
        ignore_eos=submit.ignore_eos,
    )
    prompt = wire.PackedSubmit.FromString(submit.SerializeToString()).prompt
    sequence.MergeFromString(wire.PackedSequence(prompt=prompt).SerializeToString())
    sampling = sequence.sampling
    sampling.temperature = submit.temperature
    sampling.top_p = submit.top_p
    sampling.top_k = submit.top_k
    if submit.HasField("seed"):
        sampling.seed = submit.seed


def submit_message(epoch: int, slots: list[Slot]) -> engine.Submit:
    """Return one message with all of `slots`."""
    message = engine.Submit(epoch=epoch)
    for slot in slots:
        add_sequence(message, slot)
    return message


def connect_response(batch: Batch) -> wire.ConnectResponse:
    """Return one message with everything that a tick brought for one gateway."""
    return wire.ConnectResponse(
        handle=batch.handles,
        count=batch.counts,
        token=batch.tokens,
        placed=batch.placed,
        outcomes=batch.outcomes,
        cells=batch.cells,
    )
