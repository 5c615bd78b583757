"""The speed of a cell's replicas at their full number of sequences. Pure."""

from collections.abc import Sequence
from statistics import median

from router.core.fleet.replica import ReplicaBook
from router.core.types.work import EngineSpeed


def usual_speed(
    books: Sequence[ReplicaBook], *, sequence_tokens: float, tpot_s: float
) -> EngineSpeed | None:
    """Return the median speed of all replicas with enough measured steps, or None if there is none.

    Args:
        books: Records of the attached replicas.
        sequence_tokens: Mean tokens per sequence in the KV cache.
        tpot_s: Objective of the mean time per output token, in seconds.
    """
    found: list[EngineSpeed] = []
    for book in books:
        limits, speed = book.limits, book.speed
        if limits is None or not speed.decode_cost.is_known:
            continue
        room = limits.kv_blocks * limits.block_tokens / max(1.0, sequence_tokens)
        sequences, output_s = speed.decode_cost.full(min(limits.sequences_max, room), tpot_s)
        prompt_s = speed.token_mean_s + speed.decode_step_s / speed.budget
        found.append(EngineSpeed(prompt_s, output_s, sequences, speed.decode_cost.steps))
    if not found:
        return None
    return EngineSpeed(
        median(each.prompt_token_s for each in found),
        median(each.output_token_s for each in found),
        int(median(each.sequences for each in found)),
        sum(each.steps for each in found),
    )
