"""Prompts that begin alike are hashed once, and always come to the same."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from gateway.bases.spans import IDLE_S, SPAN_TOKENS, PromptSpans
from sluice.hashing import chained_hashes

PIECE = 1000


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"a" * 16, b"b" * 16]), st.lists(st.integers(0, 3), max_size=14)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_cached_spans_equal_computed_ones(prompts: list[tuple[bytes, list[int]]]) -> None:
    spans = PromptSpans(bytes_max=7_000)  # two or three are kept
    for root, pieces in prompts:
        ids = array("I", [piece * 7_000_000 + n for piece in pieces for n in range(PIECE)])
        assert spans.hashed(ids, root) == chained_hashes(ids, root)
        assert spans.held_bytes <= 7_000


def test_a_longer_prompt_works_out_its_end_alone() -> None:
    spans, ids = PromptSpans(), array("I", range(3 * SPAN_TOKENS + 70))
    spans.hashed(ids[: 2 * SPAN_TOKENS + 5], b"r" * 16)
    held = spans.held_bytes
    assert held > 0
    assert spans.hashed(ids, b"r" * 16) == chained_hashes(ids, b"r" * 16)
    assert held < spans.held_bytes <= 2 * held
    again = spans.held_bytes
    spans.hashed(ids, b"r" * 16)
    assert spans.held_bytes == again
    spans.hashed(ids, b"o" * 16)
    assert spans.held_bytes > again, "another root knows nothing of it"


def test_a_span_is_dropped_an_hour_after_its_last_use() -> None:
    now_s = [0.0]
    spans = PromptSpans(clock=lambda: now_s[0])
    first, second = (array("I", range(n, n + SPAN_TOKENS)) for n in (0, 1))
    spans.hashed(first, b"r" * 16)
    spans.hashed(second, b"r" * 16)
    held = spans.held_bytes
    now_s[0] = IDLE_S - 1
    spans.hashed(first, b"r" * 16)
    now_s[0] = IDLE_S
    spans.forget_idle()
    assert spans.held_bytes == held // 2
    now_s[0] = 2 * IDLE_S
    spans.forget_idle()
    assert spans.held_bytes == 0
