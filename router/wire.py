"""From the core's plain data to the messages that are sent."""

from router.core.model import Batch, Slot
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire


def sequence(slot: Slot) -> engine.Sequence:
    """Return what the engine is told about a dispatch."""
    submit = slot.request.submit
    assert submit is not None, "a dispatch is converted before its request can end"
    message = engine.Sequence(
        id=slot.sequence,
        prompt=submit.prompt,
        output_tokens_max=slot.output_max,
        stop_token_ids=submit.stop_token_ids,
        cache_root=submit.cache_root,
        adapter_digest=submit.adapter_digest,
        priority=submit.tier_priority,
        ignore_eos=submit.ignore_eos,
    )
    sampling = message.sampling
    sampling.temperature = submit.temperature
    sampling.top_p = submit.top_p
    sampling.top_k = submit.top_k
    if submit.HasField("seed"):
        sampling.seed = submit.seed
    return message


def submit_request(epoch: int, slots: list[Slot]) -> engine.HostRequest:
    """Return one message with all dispatches of a tick to one replica."""
    sequences = [sequence(slot) for slot in slots]
    return engine.HostRequest(submit=engine.Submit(epoch=epoch, sequences=sequences))


def cancel_request(epoch: int, sequences: list[int]) -> engine.HostRequest:
    """Return one message with all cancels of a tick to one replica."""
    return engine.HostRequest(cancel=engine.Cancel(epoch=epoch, sequences=sequences))


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
