"""How many replicas may be out for their answers or their health at once; pure."""


def room(total: int, out: int) -> int:
    """Return how many more of `total` replicas may be taken out: at most a third is out.

    When more seem ill, it is the measure that is wrong, or the load. One or two replicas are
    always left alone. Negative: so many are out beyond the third.
    """
    return total // 3 - out
