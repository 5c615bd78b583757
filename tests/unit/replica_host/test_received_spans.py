from array import array
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.host import received_spans
from replica.host.received_spans import ReceivedPrompt, ReceivedSpans, UnknownSpanError
from router.sent_spans import SentSpans
from sluice.hashing import BLOCK_TOKENS, block_hashes, chained_hashes
from sluice.prompt_spans import SPAN_BLOCKS, SPAN_TOKENS

PIECE = 500  # tokens, about half of a span
A, B = b"a" * 16, b"b" * 16


def prompt_of(pieces: list[int]) -> "array[int]":
    return array("I", [piece * 7_000_000 + n for piece in pieces for n in range(PIECE)])


def send(sent: SentSpans, spans: ReceivedSpans, ids: "array[int]", root: bytes) -> ReceivedPrompt:
    """Send a prompt as a router does, without its known part."""
    known = sent.send(chained_hashes(ids, root))
    tokens = len(known) * SPAN_TOKENS
    return spans.read(ids[tokens:], root, known[-1] if known else b"", tokens)


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B]), st.lists(st.integers(0, 2), max_size=9)), max_size=8
    )
)
def test_prompts_arrive_whole_or_are_requested_again(prompts: list[tuple[bytes, list[int]]]):
    spans, sent = ReceivedSpans(4 * SPAN_BLOCKS), SentSpans(12 * SPAN_BLOCKS)
    for root, pieces in prompts:
        ids = prompt_of(pieces)
        try:
            prompt = send(sent, spans, ids, root)
        except UnknownSpanError:
            sent.clear()
            prompt = send(sent, spans, ids, root)
        assert prompt == (ids, block_hashes(ids, root, len(ids) // BLOCK_TOKENS))
        assert len(spans) <= 4


def test_a_further_turn_sends_and_hashes_only_its_new_blocks():
    spans, sent = ReceivedSpans(10_000), SentSpans(10_000)
    ids = array("I", range(20 * SPAN_TOKENS + 5))
    send(sent, spans, ids, A)
    ids.extend(range(70))
    assert len(sent.send(chained_hashes(ids, A))) == 20
    hashed: list[int] = []

    def counted(tokens: "array[int]", root: bytes, count: int, known=()) -> list[bytes]:
        hashed.append(count - len(known))
        return block_hashes(tokens, root, count, known)

    with patch.object(received_spans, "block_hashes", counted):
        assert send(sent, spans, ids, A).ids == ids
        assert hashed == [2]


def test_a_name_is_of_one_root_and_one_length():
    spans = ReceivedSpans(10_000)
    ids = array("I", range(3 * SPAN_TOKENS))
    names = SentSpans(10_000)
    names.send(chained_hashes(ids, A))
    known = names.send(chained_hashes(ids, A))
    spans.read(ids, A, b"", 0)
    rest = array("I", [1])
    assert spans.read(rest, A, known[1], 2 * SPAN_TOKENS).ids == ids[: 2 * SPAN_TOKENS] + rest
    for root, name, tokens in (
        (B, known[1], 2 * SPAN_TOKENS),  # another tenant
        (A, known[1], 1 * SPAN_TOKENS),
        (A, known[1], 3 * SPAN_TOKENS),
        (A, b"", SPAN_TOKENS),
        (A, b"x" * 16, SPAN_TOKENS),
        (A, known[1][:8], 2 * SPAN_TOKENS),
    ):
        with pytest.raises(UnknownSpanError):
            spans.read(rest, root, name, tokens)


def test_the_beginning_of_a_long_prompt_outlasts_its_end():
    spans = ReceivedSpans(4 * SPAN_BLOCKS)
    long, other = array("I", range(4 * SPAN_TOKENS)), array("I", range(9, 9 + SPAN_TOKENS))
    names = SentSpans(10_000)
    names.send(chained_hashes(long, A))
    known = names.send(chained_hashes(long, A))
    spans.read(long, A, b"", 0)
    spans.read(other, A, b"", 0)
    nothing = array("I")
    assert spans.read(nothing, A, known[2], 3 * SPAN_TOKENS).ids == long[: 3 * SPAN_TOKENS]
    with pytest.raises(UnknownSpanError):
        spans.read(nothing, A, known[3], 4 * SPAN_TOKENS)
