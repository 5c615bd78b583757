"""From an engine's columns to the gateways' columns: the work that is done for every token."""

from router.core.model import Slot, Stats
from router.core.replica_book import ReplicaBook
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire


def file_tokens(book: ReplicaBook, frame: engine.StepFrame, stats: Stats, now: float) -> None:
    """Append a frame's tokens to the batches of the gateways that want them.

    Raises:
        ValueError: The columns of the frame do not agree; nothing of it was filed.
    """
    slots = book.slots
    tokens, counts = list(frame.token), list(frame.count)
    if len(frame.sequence) != len(counts) or sum(counts) != len(tokens):
        raise ValueError("the columns of a frame do not agree")
    start = known = 0
    for sequence, number in zip(frame.sequence, counts, strict=True):
        stop = start + number
        slot = slots.get(sequence)
        if slot is None:
            start = stop
            continue
        if not slot.emitted:
            _first_token(book, slot, stats, now)
        slot.emitted += number
        slot.tenant.counter += slot.charge * number
        known += number
        if slot.is_open:
            batch = slot.gateway.batch
            batch.handles.append(slot.handle)
            batch.counts.append(number)
            if number == 1:
                batch.tokens.append(tokens[start])
            else:
                batch.tokens += tokens[start:stop]
        start = stop
    book.emit(known)
    stats.tokens += known
    stats.stray_tokens += start - known


def place(slot: Slot, engine_queue_us: int, cached_tokens: int, stats: Stats) -> None:
    """Tell the gateway where its request runs, once per placement."""
    if slot.is_placed:
        return
    slot.is_placed = True
    queue_s = slot.dispatched_at - slot.request.arrived_at
    stats.queue_s.append(queue_s)
    slot.gateway.batch.placed.append(
        wire.Placed(
            handle=slot.handle,
            replica_id=slot.replica_id,
            queue_us=int(queue_s * 1e6),
            engine_queue_us=engine_queue_us,
            cached_tokens=cached_tokens,
        )
    )


def _first_token(book: ReplicaBook, slot: Slot, stats: Stats, now: float) -> None:
    book.prefilled(slot)
    if slot.is_open:
        place(slot, 0, 0, stats)
        stats.ttft_s.append(now - slot.request.arrived_at)
