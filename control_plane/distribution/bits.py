"""Sets of small numbers (chunks, groups of chunks, nodes), stored as the bits of one integer."""

from collections.abc import Iterator


def members(mask: int) -> Iterator[int]:
    """Return the numbers of the set bits, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def first_from(mask: int, offset: int) -> int:
    """Return the lowest set bit at `offset` or above, or else the lowest set bit.

    `mask` must not be 0.
    """
    assert mask > 0
    above = mask >> offset
    if above:
        return offset + (above & -above).bit_length() - 1
    return (mask & -mask).bit_length() - 1


def every(step: int, count: int) -> int:
    """Return a mask of `count` bits, `step` apart, from bit 0 on."""
    mask, have = 1, 1
    while have < count:
        mask |= mask << (step * have)
        have *= 2
    return mask & ((1 << (step * (count - 1) + 1)) - 1)


def starts_of_runs(mask: int, length: int) -> int:
    """Return the bits at which a run of `length` set bits begins."""
    have = 1
    while have < length:
        step = min(have, length - have)
        mask &= mask >> step
        have += step
    return mask
