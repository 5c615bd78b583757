"""The speed of a cell's replicas at their full number of sequences. Pure."""

from collections.abc import Sequence
from statistics import median

from router.core.fleet.replica import ReplicaBook
from router.core.fleet.speed import Speed
from router.core.types.plan import ReplicaRole
from router.core.types.work import EngineSpeed


def median_speed(
    books: Sequence[ReplicaBook], *, sequence_tokens: float, tpot_s: float
) -> EngineSpeed | None:
    """Return the median speed of all replicas with enough measured steps, or None if there is none.

    Replicas that only prefill take few decode steps. If they have computed prompts, the speed of
    prompts is theirs, and the other replicas have the speed of decode.

    Args:
        books: Records of the attached replicas.
        sequence_tokens: Mean tokens per sequence in the KV cache.
        tpot_s: Objective of the mean time per output token, in seconds.
    """
    found: list[EngineSpeed] = []
    prefills: list[float] = []
    for book in books:
        limits, speed = book.limits, book.speed
        if book.role is ReplicaRole.PREFILL:
            if speed.settled_token_s:
                prefills.append(_prompt_token_s(speed))
            continue
        if limits is None or not speed.decode_cost.is_known:
            continue
        room = limits.kv_blocks * limits.block_tokens / max(1.0, sequence_tokens)
        sequences, output_s = speed.decode_cost.full(min(limits.sequences_max, room), tpot_s)
        steps = speed.decode_cost.steps
        found.append(EngineSpeed(_prompt_token_s(speed), output_s, sequences, steps))
    if not found:
        return None
    return EngineSpeed(
        median(prefills or [each.prompt_token_s for each in found]),
        median(each.output_token_s for each in found),
        int(median(each.sequences for each in found)),
        sum(each.steps for each in found),
    )


def _prompt_token_s(speed: Speed) -> float:
    """Return the seconds per prompt token in full steps, without the first steps of an engine."""
    token_s = speed.settled_token_s or speed.assumed_token_s
    return token_s + speed.decode_step_s / speed.budget
