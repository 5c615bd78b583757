"""From an engine's columns to the gateways' columns: the work that is done for every token."""

from math import isfinite
from typing import cast

from router.core import logprobs
from router.core.fleet.replica import ReplicaBook
from router.core.types.model import Gateway, Slot, Stats, wire_us
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire


def file_frame(book: ReplicaBook, frame: engine.StepFrame, stats: Stats, now: float) -> None:
    """File a frame's tokens, with their log probabilities where they were asked for.

    Raises:
        ValueError: The columns of the frame do not agree; nothing of it was filed.
    """
    has_logprobs = frame.HasField("logprobs")
    if has_logprobs:
        logprobs.check(frame)
    if frame.sequence or frame.token:
        file_tokens(book, frame, stats, now)
    if has_logprobs:
        logprobs.file(book, frame.logprobs)


def file_tokens(book: ReplicaBook, frame: engine.StepFrame, stats: Stats, now: float) -> None:
    """Append a frame's tokens to the batches of the gateways that want them.

    Raises:
        ValueError: The columns of the frame do not agree; nothing of it was filed.
    """
    # Slices are lists made in C; iterating over a column costs three times as much.
    sequences, counts, tokens = frame.sequence[:], frame.count[:], frame.token[:]
    if len(sequences) != len(counts) or sum(counts) != len(tokens):
        raise ValueError("the columns of a frame do not agree")
    slots = list(map(book.slots.get, sequences))
    if None in slots or counts.count(1) != len(counts):
        known = _book_rows(book, slots, counts, stats, now)
        _file_rows(slots, counts, tokens)
    else:
        rows = cast("list[Slot]", slots)
        known = len(rows)
        gateway = _book_one_each(book, rows, stats, now)
        if gateway is None:
            _file_one_each(rows, tokens)
        else:
            batch = gateway.batch
            batch.handles += [slot.handle for slot in rows]
            batch.counts += counts
            batch.tokens += tokens
    book.emitted += known
    stats.tokens += known
    stats.stray_tokens += len(tokens) - known


def _book_one_each(
    book: ReplicaBook, slots: list[Slot], stats: Stats, now: float
) -> Gateway | None:
    """Book one token of each slot; return the gateway that wants all of them and keeps none.

    Neighbours are mostly of one tenant, so its counter is written once for all of them.
    """
    gateway = slots[0].gateway
    is_uniform = True
    tenant = slots[0].tenant
    counter, first = tenant.counter, 0
    for row, slot in enumerate(slots):
        emitted = slot.emitted
        if not emitted:
            first_token(book, slot, stats, now)
        slot.emitted = emitted = emitted + 1
        if emitted > slot.output_booked:
            book.outgrow(slot)
        if slot.tenant is not tenant:
            tenant.counter = counter
            tenant.tier.served += 2 * (row - first)
            tenant, first = slot.tenant, row
            counter = tenant.counter
        counter += slot.charge
        if slot.gateway is not gateway or slot.output is not None or not slot.is_open:
            is_uniform = False
    tenant.counter = counter
    tenant.tier.served += 2 * (len(slots) - first)
    return gateway if is_uniform else None


def _book_rows(
    book: ReplicaBook, slots: list[Slot | None], counts: list[int], stats: Stats, now: float
) -> int:
    """Book any number of tokens of each slot that is known; return how many these are."""
    known = 0
    for slot, number in zip(slots, counts, strict=True):
        if slot is None:
            continue
        if not slot.emitted and number:
            first_token(book, slot, stats, now)
        emitted = slot.emitted = slot.emitted + number
        if emitted > slot.output_booked:
            book.outgrow(slot)
        tenant = slot.tenant
        tenant.counter += slot.charge * number
        tenant.tier.served += 2 * number
        known += number
    return known


def _file_one_each(slots: list[Slot], tokens: list[int]) -> None:
    """Append one token of each slot to the batch of its own gateway, if it is wanted."""
    for slot, token in zip(slots, tokens, strict=True):
        if slot.is_open:
            batch = slot.gateway.batch
            batch.handles.append(slot.handle)
            batch.counts.append(1)
            batch.tokens.append(token)
            if slot.output is not None:
                slot.output.append(token)


def _file_rows(slots: list[Slot | None], counts: list[int], tokens: list[int]) -> None:
    """Append each row to the batch of its own gateway, if it is wanted."""
    start = 0
    for slot, number in zip(slots, counts, strict=True):
        stop = start + number
        if slot is not None and slot.is_open:
            batch = slot.gateway.batch
            batch.handles.append(slot.handle)
            batch.counts.append(number)
            batch.tokens += tokens[start:stop]
            if slot.output is not None:
                slot.output += tokens[start:stop]
        start = stop


def file_missed(
    book: ReplicaBook, slot: Slot, entry: engine.Resumed, stats: Stats, now: float
) -> None:
    """File what a resumed sequence has brought while nobody listened; `entry` has all of it.

    Raises:
        ValueError: The engine knows of fewer tokens than it had told, or contradicts itself.
    """
    known = slot.emitted
    missed = entry.output[known:]
    if len(entry.output) < known:
        raise ValueError("a resumed sequence is shorter than what was told of it")
    if missed:
        frame = engine.StepFrame(sequence=[slot.sequence], count=[len(missed)], token=missed)
        if entry.HasField("logprobs"):
            frame.logprobs.CopyFrom(logprobs.missed(entry, known))
        file_frame(book, frame, stats, now)


def place(slot: Slot, engine_queue_us: int, stats: Stats, load_us: int = 0) -> None:
    """Tell the gateway where its request runs, once per placement."""
    if slot.is_placed:
        return
    slot.is_placed = True
    queue_s = slot.dispatched_at - slot.request.arrived_at
    stats.queue_s.append(queue_s)
    stats.prompt_tokens += slot.prompt_tokens
    stats.cached_tokens += slot.cached_tokens
    placed = wire.Placed(handle=slot.handle, replica_id=slot.replica_id, queue_us=wire_us(queue_s))
    # Most have none of these, and to set nothing costs as much as to set something.
    if engine_queue_us:
        placed.engine_queue_us = engine_queue_us
    if load_us:
        placed.load_us = load_us
    if slot.cached_tokens:
        placed.cached_tokens = slot.cached_tokens
    if slot.decision is not None:
        placed.decision.CopyFrom(slot.decision)
    request = slot.request
    if request.untold is not None:
        placed.before.extend(request.untold)
        request.untold = None
    slot.gateway.batch.placed.append(placed)


def first_token(book: ReplicaBook, slot: Slot, stats: Stats, now: float) -> None:
    """Book the end of a prefill."""
    book.prefilled(slot)
    slot.first_at = now
    if slot.is_open:
        place(slot, 0, stats)
        if not slot.output:
            request = slot.request
            waited_s = now - request.arrived_at
            stats.ttft_s.append(waited_s)
            predicted_s = waited_s
            if request.prediction is not None:
                predicted_s = request.prediction.ttft_s()
                request.prediction.first_token(waited_s)
                request.prediction = None
            # Where nobody served at the time there was nothing to predict from.
            stats.ttft_predicted_s += predicted_s if isfinite(predicted_s) else waited_s
