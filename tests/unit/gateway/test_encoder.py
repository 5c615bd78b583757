"""What is kept of prompts changes how long they take, never their ids."""

import gc
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.bases.encoder import IDLE_S, PromptEncoder, cuts_of
from gateway.bases.slices import finished

SHIPPED = Tokenizer.from_file(str(Path(__file__).parents[3] / "model_repo/default/tokenizer.json"))
WORDS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "user\n",
    "a b",
    " ",
    "é",
    "<|",
    "im_end|>",
]


def plain(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[int]:
    encoded = tokenizer.encode_batch_fast(list(pieces), add_special_tokens=False)
    return [token for encoding in encoded for token in encoding.ids]


prompts = st.lists(
    st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=12).map("".join),
    min_size=1,
    max_size=3,
)


@given(st.lists(prompts, min_size=1, max_size=4), st.sampled_from([0, 600, 20_000]))
def test_ids_equal_the_ids_of_the_tokenizer(rounds, bytes_max: int) -> None:
    encoder = PromptEncoder(SHIPPED, bytes_max)
    for pieces in rounds + rounds:
        assert list(finished(encoder.encode(pieces, b"o"))) == plain(SHIPPED, pieces)
        assert encoder.held_bytes <= bytes_max


class Counting:
    """The shipped tokenizer, that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode_batch_fast(self, texts, *, add_special_tokens: bool):
        self.asked += texts
        return SHIPPED.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str):
        return getattr(SHIPPED, name)


def test_a_turn_costs_its_new_text() -> None:
    tokenizer = Counting()
    encoder = PromptEncoder(tokenizer)  # type: ignore[arg-type]
    first = "<|im_start|>user\nhello there<|im_end|>\n<|im_start|>assistant\n"
    finished(encoder.encode([first], b"o"))
    tokenizer.asked.clear()
    finished(encoder.encode([first + "hi<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n"], b"o"))
    assert tokenizer.asked == ["assistant\nhi", "user\nand now?"]


@pytest.mark.parametrize("words", [0, 8, 200])
def test_the_cached_segments_take_no_more_memory_than_their_bound(words: int) -> None:
    bytes_max = 1 << 20
    encoder = PromptEncoder(SHIPPED, bytes_max)
    texts = [f"<|im_start|>{number} {'word ' * words}" for number in range(12_000 // (1 + words))]
    finished(encoder.encode(["<|im_start|>warm"], b"o"))
    gc.collect()
    tracemalloc.start()
    for text in texts:
        finished(encoder.encode([text], b"o"))
    gc.collect()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del texts
    assert 0.5 * encoder.held_bytes < taken < 1.1 * bytes_max


def test_segments_that_no_prompt_has_used_for_an_hour_are_dropped() -> None:
    now_s = 0.0
    encoder = PromptEncoder(SHIPPED, clock=lambda: now_s)
    finished(encoder.encode(["<|im_start|>user\na secret<|im_end|>\nhello"], b"o"))
    now_s = IDLE_S - 1
    finished(encoder.encode(["<|im_end|>\nhello"], b"o"))
    both = encoder.held_bytes
    encoder.forget_idle()
    assert encoder.held_bytes == both
    now_s = IDLE_S
    encoder.forget_idle()
    assert 0 < encoder.held_bytes < both
    now_s = 2 * IDLE_S
    encoder.forget_idle()
    assert encoder.held_bytes == 0


def test_no_tenant_profits_from_texts_of_others() -> None:
    tokenizer = Counting()
    encoder = PromptEncoder(tokenizer)  # type: ignore[arg-type]
    for owner in (b"one", b"two"):
        finished(encoder.encode(["<|im_start|>user\na secret"], owner))
    assert tokenizer.asked == ["user\na secret"] * 2


def make(pre=None, normalizer=None, added: Sequence[AddedToken] = ()) -> Tokenizer:
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "▁"]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return tokenizer


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, **({"normalized": False} | flags))


@pytest.mark.parametrize(
    ("tokenizer", "cuts"),
    [
        (make(added=[special("<a>"), special("<b>")]), {"<a>", "<b>"}),
        (make(added=[special("<a>", rstrip=True), special("<b>", lstrip=True)]), set()),
        (make(added=[special("<a>"), AddedToken("x<a>", normalized=False)]), set()),
        (make(added=[special("<a>"), AddedToken("<a>b", normalized=False)]), set()),
        (make(added=[special("<a>"), AddedToken("x<", normalized=False)]), set()),
        (make(pre_tokenizers.Metaspace(), added=[special("<a>")]), set()),
        (make(pre_tokenizers.ByteLevel(add_prefix_space=True), added=[special("<a>")]), set()),
        (make(normalizer=normalizers.Prepend("▁"), added=[special("<a>")]), set()),
        (make(normalizer=normalizers.NFC(), added=[special("<a>")]), {"<a>"}),
    ],
)
def test_a_text_is_cut_only_where_that_changes_nothing(
    tokenizer: Tokenizer, cuts: set[str]
) -> None:
    assert set(cuts_of(tokenizer)) == cuts
    encoder = PromptEncoder(tokenizer)
    for text in ("<a>x <b>y", "x<a>b", " <a> <a>", "x<", "<a>x<a>b"):
        assert list(finished(encoder.encode([text], b"o"))) == plain(tokenizer, [text])
        assert list(finished(encoder.encode([text], b"o"))) == plain(tokenizer, [text])
