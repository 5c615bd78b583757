"""Bounds the replicas that may be out of service for wrong answers or bad health. Pure."""


def room(total: int, out: int) -> int:
    """Return how many more of `total` replicas may be taken out of service: a third at most.

    When more replicas fail at once, the measure or the load is at fault. Of one or two replicas
    none is taken out. A negative number is the excess over the third.
    """
    return total // 3 - out
