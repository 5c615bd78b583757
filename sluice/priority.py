"""Priorities of requests at a router: one scale for all senders.

Every tier is served in classes: its ordinary requests, and below them those that callers have
lowered themselves. All of a tier's classes come before the tiers below.
"""

CLASSES = 4
TIER_PRIORITY_MAX = (1 << 32) // CLASSES - 1  # priorities have 32 bits on the wire


def queue_priority(tier_priority: int, below: int = 0) -> int:
    """Return the priority at a router; higher goes first.

    Args:
        tier_priority: Priority of the caller's tier; above `TIER_PRIORITY_MAX` it counts as that.
        below: Classes below the tier's ordinary requests, less than `CLASSES`.
    """
    assert 0 <= below < CLASSES, below
    return min(tier_priority, TIER_PRIORITY_MAX) * CLASSES + CLASSES - 1 - below
