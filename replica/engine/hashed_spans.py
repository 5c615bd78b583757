"""Remembers the block hashes of prompts, so that a conversation's history is not hashed again.

The hash of a block takes a microsecond, which for 60,000 tokens adds up to 2 ms in each turn. A
digest of a thousand tokens takes as long as two blocks. So hashes are remembered by span, a run of
`SPAN_BLOCKS` blocks. The key of a span is a digest of the chain's root and of all ids up to the
span's end. So no hash is taken from another tenant or adapter, nor trusted from another process.
"""

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from sluice.hashing import BLOCK_TOKENS, block_hashes

if TYPE_CHECKING:
    from array import array

SPAN_BLOCKS = 32
_SPAN_TOKENS = SPAN_BLOCKS * BLOCK_TOKENS


class HashedSpans:
    """The spans of the latest prompts, with together at most as many hashes as the pool blocks."""

    def __init__(self, blocks: int) -> None:
        """Remember the hashes of at most `blocks` blocks."""
        self._count_max = blocks // SPAN_BLOCKS
        # The least recently used span is the first.
        self._spans: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._spans)

    def extend(self, hashes: list[bytes], tokens: "array[int]", root: bytes, count: int) -> None:
        """Append the hashes of further blocks to those of the first blocks of a prompt.

        Args:
            hashes: Hashes of the first blocks of `tokens`, or empty.
            tokens: Token ids.
            root: Root of the chain, from `cache_root`.
            count: Number of full blocks of `tokens` that need a hash.
        """
        if not hashes and count >= SPAN_BLOCKS:
            self._add_spans(hashes, tokens, root, count)
        if len(hashes) < count:
            hashes[:] = block_hashes(tokens, root, count, hashes)

    def _add_spans(
        self, hashes: list[bytes], tokens: "array[int]", root: bytes, count: int
    ) -> None:
        so_far = hashlib.sha256(root, usedforsecurity=False)
        for end in range(_SPAN_TOKENS, count * BLOCK_TOKENS + 1, _SPAN_TOKENS):
            ids = tokens[end - _SPAN_TOKENS : end]
            so_far.update(ids)
            key = so_far.digest()
            span = self._spans.get(key)
            if span is None:
                span = block_hashes(ids, hashes[-1] if hashes else root, SPAN_BLOCKS)
                self._keep(key, span)
            else:
                self._spans.move_to_end(key)
            hashes += span

    def _keep(self, key: bytes, span: list[bytes]) -> None:
        self._spans[key] = span
        while len(self._spans) > max(1, self._count_max):
            self._spans.popitem(last=False)
