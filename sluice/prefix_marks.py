"""Marks of prompts, by which gateways hear which blocks a cell caches; pure.

A mark is a part of the hash of a prompt's block. Hashes are chained, so a mark at a depth stands
for all blocks before it, and few depths of a prompt need one. Depths are numbers of leading blocks.
Routers and gateways share these functions.
"""

from collections.abc import Sequence

DEPTH_MIN = 4  # blocks; to find fewer saves less than a millisecond of a GPU for each
_MARK_MASK = 0xFFFFFFFF
_EXACT_BITS = 5  # up to 32 blocks every depth may have a mark, beyond that 16 in each octave


def mark_at(hashes: Sequence[int], depth: int) -> int:
    """Return the mark of a prompt's first `depth` blocks.

    Args:
        hashes: First eight bytes of the hash of each block, as integers.
        depth: At least 1, at most all.
    """
    return hashes[depth - 1] & _MARK_MASK


def step_at(depth: int) -> int:
    """Return the distance of the depths with marks, as it is up to a depth."""
    return 1 << max(0, (depth - 1).bit_length() - _EXACT_BITS)


def floored(depth: int) -> int:
    """Return the deepest depth up to this one that may have a mark; 0: it is too small."""
    if depth < DEPTH_MIN:
        return 0
    return depth - depth % step_at(depth)


def following(depth: int) -> int:
    """Return the next depth that may have a mark."""
    return max(DEPTH_MIN, depth + step_at(depth + 1))


def rungs(blocks: int) -> list[int]:
    """Return the depths that have marks in every prompt of a length: the powers of two."""
    return [1 << power for power in range(2, blocks.bit_length())]


def marks_of(hashes: Sequence[int], cached: int = 0) -> list[int]:
    """Return the marks of a prompt that is computed: of its rungs, its end and its cached part.

    Args:
        hashes: See `mark_at`.
        cached: Leading blocks that were cached before, as those that several prompts share.
    """
    blocks = len(hashes)
    depths = {*rungs(blocks), floored(blocks), floored(min(cached, blocks))} - {0}
    return [hashes[depth - 1] & _MARK_MASK for depth in sorted(depths)]
