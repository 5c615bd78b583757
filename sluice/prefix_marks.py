"""Marks of prompts, by which routers report to gateways which prefixes a cell has cached. Pure.

A mark is a part of a block's hash. Because hashes are chained, the mark at some depth (a number of
leading blocks) identifies all blocks up to that depth. So only a few depths of a prompt need a
mark. Routers and gateways share these functions.
"""

from collections.abc import Sequence

DEPTH_MIN = 4  # least depth with a mark, in blocks, because fewer cached blocks save too little
_MARK_MASK = 0xFFFFFFFF
_EXACT_BITS = 5  # every depth up to 32 blocks may have a mark, and 16 depths per octave beyond


def mark_at(hashes: Sequence[int], depth: int) -> int:
    """Return the mark of a prompt's first `depth` blocks.

    Args:
        hashes: First eight bytes of the hash of each block, as integers.
        depth: Number of leading blocks, from 1 to the length of `hashes`.
    """
    return hashes[depth - 1] & _MARK_MASK


def step_at(depth: int) -> int:
    """Return the distance between the depths that may have marks, for depths just below `depth`."""
    return 1 << max(0, (depth - 1).bit_length() - _EXACT_BITS)


def floored(depth: int) -> int:
    """Return the greatest depth up to `depth` that may have a mark, or 0 below `DEPTH_MIN`."""
    if depth < DEPTH_MIN:
        return 0
    return depth - depth % step_at(depth)


def following(depth: int) -> int:
    """Return the next greater depth that may have a mark."""
    return max(DEPTH_MIN, depth + step_at(depth + 1))


def rungs(blocks: int) -> list[int]:
    """Return the powers of two at which every prompt of `blocks` blocks has marks."""
    return [1 << power for power in range(2, blocks.bit_length())]


def marks_of(hashes: Sequence[int], cached: int = 0) -> list[int]:
    """Return the marks of a computed prompt at its `rungs`, its end and the end of its cached part.

    Args:
        hashes: First eight bytes of the hash of each block, as integers.
        cached: Number of leading blocks that were already cached, probably a shared prefix.
    """
    blocks = len(hashes)
    depths = {*rungs(blocks), floored(blocks), floored(min(cached, blocks))} - {0}
    return [hashes[depth - 1] & _MARK_MASK for depth in sorted(depths)]
