from array import array
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from replica.engine import hashed_spans
from replica.engine.hashed_spans import SPAN_BLOCKS, HashedSpans
from sluice.hashing import BLOCK_TOKENS, block_hashes

PIECE = 500  # tokens, about half of a span
ROOTS = st.sampled_from([b"a" * 16, b"b" * 16])


@given(
    st.lists(
        st.tuples(ROOTS, st.lists(st.integers(0, 2), max_size=9), st.integers(0, 80)), max_size=6
    )
)
def test_remembered_hashes_equal_computed_ones(
    prompts: list[tuple[bytes, list[int], int]],
) -> None:
    spans = HashedSpans(3 * SPAN_BLOCKS)
    for root, pieces, known in prompts:
        ids = array("I", [piece * 7_000_000 + n for piece in pieces for n in range(PIECE)])
        count = len(ids) // BLOCK_TOKENS
        hashes = block_hashes(ids, root, count)
        extended = hashes[:known]
        spans.extend(extended, ids, root, count)
        spans.extend(extended, ids, root, count // 2)
        assert extended == hashes
        assert len(spans) <= 3


def test_a_further_turn_hashes_only_its_new_blocks() -> None:
    spans, root = HashedSpans(10_000), b"r" * 16
    ids = array("I", range(20 * SPAN_BLOCKS * BLOCK_TOKENS + 5))
    spans.extend([], ids, root, len(ids) // BLOCK_TOKENS)
    ids.extend(range(70))
    hashed: list[int] = []

    def counted(tokens: "array[int]", root: bytes, count: int, known=()) -> list[bytes]:
        hashed.append(count - len(known))
        return block_hashes(tokens, root, count, known)

    count = len(ids) // BLOCK_TOKENS
    with patch.object(hashed_spans, "block_hashes", counted):
        spans.extend([], ids, root, count)
        assert sum(hashed) == 2
        spans.extend([], ids, b"o" * 16, count)
        assert sum(hashed) == 2 + count, "another tenant shares nothing"
