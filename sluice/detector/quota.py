"""Bounds the replicas that may be out of service for wrong answers or bad health. Pure."""


def room(total: int, out: int) -> int:
    """Return how many more replicas may be removed from service, if `out` of `total` already are.

    At most a third of the replicas, rounded down, may be out of service. If more replicas fail at
    once, the cause is probably the measurement or the load. A negative result is the excess.
    """
    return total // 3 - out
