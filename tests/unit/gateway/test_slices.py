"""A text has the same tokens, whether it is tokenized at once or in slices."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from gateway.bases.slices import SlicingTokenizer, finished

SHIPPED = Tokenizer.from_file(str(Path(__file__).parents[3] / "model_repo/default/tokenizer.json"))
DIGITS_IN_THREES = (
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SLICE = 600


def with_words(pattern: str) -> Tokenizer:
    """The shipped tokenizer, but cut into other words; its offsets leave spaces out."""
    tokenizer = Tokenizer.from_str(SHIPPED.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ends = [("<|endoftext|>", SHIPPED.token_to_id("<|endoftext|>"))]
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=ends),
        ]
    )
    return tokenizer


LIKE_LLAMA = with_words(DIGITS_IN_THREES)
SHORT = ["the", " river", "  gate", "\n", " \n\n ", "1234567", " 12", "3.5", "!? ", "é", "e\u0301"]
LONG = ["漢字", "'s", "\t", " ", "x" * 700, "7" * 400, " " * 300, "<|im_end|>"]
words = st.sampled_from(SHORT + LONG) | st.text(max_size=8)
texts = st.lists(st.tuples(words, st.integers(1, 40)), min_size=1, max_size=20).map(
    lambda parts: "".join(word * times for word, times in parts)
)


@pytest.mark.parametrize("tokenizer", [SHIPPED, LIKE_LLAMA], ids=["shipped", "like llama"])
@given(several=st.lists(texts, max_size=3))
def test_slices_change_no_token(tokenizer: Tokenizer, several: list[str]) -> None:
    sliced = SlicingTokenizer(tokenizer, is_independent=True, characters=SLICE)
    made = finished(sliced.encode(several, None))
    whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in several]
    assert [list(ids) for ids in made] == whole
    for text in several:
        assert list(finished(sliced.encode_whole(text, None))) == tokenizer.encode(text).ids


def steps(tokenizer: Tokenizer, text: str, *, is_independent: bool = True) -> int:
    sliced = SlicingTokenizer(tokenizer, is_independent=is_independent, characters=SLICE)
    return sum(1 for _ in sliced.encode([text], None))


PROSE = "the river, and 12 gates of it\n" * 200


@pytest.mark.parametrize("tokenizer", [SHIPPED, LIKE_LLAMA], ids=["shipped", "like llama"])
def test_a_long_text_pauses_after_every_slice(tokenizer: Tokenizer) -> None:
    assert steps(tokenizer, PROSE) >= len(PROSE) // SLICE


@pytest.mark.parametrize("pattern", [r"(?<=a)b|.", r"\bthe\b|\w+|\W+", r"^the|\w+|\W+"])
def test_words_that_depend_on_text_before_them_stay_whole(pattern: str) -> None:
    assert steps(with_words(pattern), PROSE) == 0


def test_a_text_that_a_tokenizer_prefixes_stays_whole() -> None:
    assert steps(SHIPPED, PROSE, is_independent=False) == 0


def test_short_texts_are_tokenized_together_up_to_a_slice() -> None:
    sliced = SlicingTokenizer(SHIPPED, is_independent=True, characters=SLICE)
    assert sum(1 for _ in sliced.encode(["a" * 100] * 12, None)) == 1


def test_a_tokenizer_of_one_word_has_no_place_to_cut() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    assert json.loads(tokenizer.to_str())["pre_tokenizer"] is None
    sliced = SlicingTokenizer(tokenizer, is_independent=True, characters=SLICE)
    assert list(finished(sliced.encode(["a" * 3000], None))[0]) == [0] * 3000
