"""The deadline of the first token with which admission counts, by the tier of a request. Pure."""

DEADLINE_MS_MAX = 600_000  # the longest deadline that a request may have


def admission_ms(tier_deadline_ms: int, *, is_preemptible: bool) -> int:
    """Return the milliseconds of expected wait with which a tier's request is admitted.

    Batch work without a deadline may wait for the longest deadline that a request may have. Zero
    is the router's default.

    Args:
        tier_deadline_ms: The tier's `ttft_deadline_ms`, or 0 without one.
        is_preemptible: Whether the tier is one of batch work.
    """
    return tier_deadline_ms or (DEADLINE_MS_MAX if is_preemptible else 0)
