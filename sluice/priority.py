"""Priorities of requests at a router, on one scale for all senders.

Every tier has several classes, one for ordinary requests, and lower classes for requests whose
callers lowered their priority. All classes of a tier are served before the tiers below.
"""

CLASSES = 4
TIER_PRIORITY_MAX = (1 << 32) // CLASSES - 1  # priorities have 32 bits on the wire


def queue_priority(tier_priority: int, below: int = 0) -> int:
    """Return a request's priority at a router. A higher priority is served first.

    Args:
        tier_priority: Priority of the caller's tier, capped at `TIER_PRIORITY_MAX`.
        below: Number of classes below the tier's ordinary requests, less than `CLASSES`.
    """
    assert 0 <= below < CLASSES, below
    return min(tier_priority, TIER_PRIORITY_MAX) * CLASSES + CLASSES - 1 - below
