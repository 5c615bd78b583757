"""The spans by which a router names the part of a prompt that an engine has received before.

A span is a run of `SPAN_BLOCKS` full blocks, counted from the beginning of a prompt. Its name is
the hash of its last block (see `sluice.hashing`), which covers the root and all ids up to there. So
a name cannot be guessed, and never names ids of another tenant or adapter.
"""

from typing import Final

from sluice.hashing import BLOCK_TOKENS, HASH_BYTES
from sluice.token_ids import ID_BYTES

PROMPT_SPANS: Final = "prompt_spans"  # feature of engines that read `Sequence.known_span`
SPAN_BLOCKS: Final = 32
SPAN_TOKENS: Final = SPAN_BLOCKS * BLOCK_TOKENS
SPAN_BYTES: Final = SPAN_TOKENS * ID_BYTES  # of the ids of a span
SPAN_HASHES_BYTES: Final = SPAN_BLOCKS * HASH_BYTES  # of the hashes of a span


def span_names(hashes: bytes) -> list[bytes]:
    """Return the names of the full spans of a prompt, by its concatenated block hashes."""
    ends = range(SPAN_HASHES_BYTES, len(hashes) + 1, SPAN_HASHES_BYTES)
    return [hashes[end - HASH_BYTES : end] for end in ends]
