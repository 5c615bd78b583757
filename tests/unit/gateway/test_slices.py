"""A text has the same tokens, whether it is tokenized at once or in slices."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from gateway.bases.slices import SlicingTokenizer, TooManyTokensError, finished

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


def stages(*parts: object, normalizer: object = None) -> Tokenizer:
    """The shipped tokenizer with other stages in front of its model."""
    tokenizer = Tokenizer.from_str(SHIPPED.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([AddedToken("river", single_word=True), AddedToken("<m>", lstrip=True)])
    return tokenizer


def like_bert() -> Tokenizer:
    """Words of letters, without the blanks between them; accents and case are dropped."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokens = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(["the river gates 漢字 1 2 3 , e x " * 3, "漢字か"], trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in tokens[1:]]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    return tokenizer


def like_xlm() -> Tokenizer:
    """Words between blanks, each with a mark in front."""
    marked = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marked])
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator(["the river gate 1 2 3 , " * 3], trainer)
    return tokenizer


LIKE_LLAMA = with_words(DIGITS_IN_THREES)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
TOKENIZERS = {
    "shipped": SHIPPED,
    "like llama": LIKE_LLAMA,
    "like gpt-2": stages(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "with a prefix": stages(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "composed": stages(
        pre_tokenizers.Split(Regex(DIGITS_IN_THREES), "isolated"),
        BYTES,
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    ),
    "in two stages": stages(
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
        pre_tokenizers.Split(Regex(r" ?\p{L}+|\s+|[^\s\p{L}]{1,5}"), "isolated"),
        BYTES,
    ),
    "like bert": like_bert(),
    "like xlm": like_xlm(),
}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=list(TOKENIZERS))
SHORT = ["the", " river", "  gate", "\n", " \n\n ", "1234567", " 12", "3.5", "!? ", "é", "e\u0301"]
LONG = ["漢字", "'s", "\t", " ", "x" * 700, "7" * 400, " " * 300, "<|im_end|>"]
SCRIPTS = [
    *(
        "水を、飲む。",
        "한국어는 ",
        "\u1112\u1161\u11ab",
        "ｶﾞ",
        "สวัสดีครับ",
        "नमस्ते ",
        "مرحبا، ",
        "İSTANBUL ",
    ),
    *("👩\u200d👧", "1,2;3.5\n", '{"a":[1,-2]}', "<m>", " river", "\u0301", "\r\n", "\u00a0", "ﬁ"),
]
words = st.sampled_from(SHORT + LONG + SCRIPTS) | st.text(max_size=8)
texts = st.lists(st.tuples(words, st.integers(1, 12)), min_size=1, max_size=12).map(
    lambda parts: "".join(word * times for word, times in parts)
)


@each_tokenizer
@given(several=st.lists(texts, max_size=3))
def test_slices_change_no_token(tokenizer: Tokenizer, several: list[str]) -> None:
    sliced = SlicingTokenizer(tokenizer, slice_bytes=SLICE)
    made = finished(sliced.encode(several, None))
    whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in several]
    assert [list(ids) for ids in made] == whole
    for text in several:
        assert list(finished(sliced.encode_whole(text, None))) == tokenizer.encode(text).ids


def steps(tokenizer: Tokenizer, text: str) -> int:
    """Return the number of pauses; work aside is no pause."""
    made = SlicingTokenizer(tokenizer, slice_bytes=SLICE).encode([text], None)
    pauses, done = 0, None
    try:
        while True:
            work = made.send(done)
            pauses += work is None
            done = None if work is None else work()
    except StopIteration:
        return pauses


PROSE = "the river, and 12 gates of it\n" * 200


@each_tokenizer
def test_a_long_text_pauses_after_every_slice(tokenizer: Tokenizer) -> None:
    assert steps(tokenizer, PROSE) >= len(PROSE) // SLICE


WITHOUT_SPACES = {
    "chinese": "河水流过闸门。然后分开。" * 300,
    "csv": "12,3.5,abc\n" * 800,
    "json": '{"a":[1,-2,"x"]},' * 500,
}


@pytest.mark.parametrize("text", WITHOUT_SPACES.values(), ids=list(WITHOUT_SPACES))
@pytest.mark.parametrize("name", ["shipped", "like llama", "like gpt-2", "like bert"])
def test_a_long_text_without_spaces_pauses_as_often(name: str, text: str) -> None:
    assert steps(TOKENIZERS[name], text) >= len(text.encode()) // SLICE


def test_a_word_too_long_for_a_slice_is_work_aside() -> None:
    made = SlicingTokenizer(SHIPPED, slice_bytes=SLICE).encode(["x" * 5000], None)
    works = [made.send(None)]
    while callable(works[-1]) or len(works) == 1:
        works.append(made.send(works[-1]() if callable(works[-1]) else None))
    assert callable(works[1])


def test_a_text_ends_soon_behind_the_tokens_that_its_reader_takes() -> None:
    sliced = SlicingTokenizer(SHIPPED, slice_bytes=SLICE)
    whole = SHIPPED.encode(PROSE, add_special_tokens=False).ids
    (ids,) = finished(sliced.encode([PROSE], None, tokens_max=300))
    assert 300 < len(ids) <= 300 + SLICE
    assert list(ids) == whole[: len(ids)]


def test_texts_of_more_tokens_than_wanted_are_not_all_tokenized() -> None:
    sliced = SlicingTokenizer(SHIPPED, slice_bytes=SLICE)
    texts = iter(["a gate " * 50] * 1000)
    with pytest.raises(TooManyTokensError, match="more than 1000 tokens"):
        finished(sliced.encode(texts, None, total_max=1000))
    assert sum(1 for _ in texts) > 980
    few = ["a gate " * 50] * 20
    assert len(finished(sliced.encode(few, None, tokens_max=10, total_max=200))) == 20


@pytest.mark.parametrize("pattern", [r"(?<=a)b|.", r"\bthe\b|\w+|\W+", r"^the|\w+|\W+"])
def test_words_that_depend_on_text_before_them_stay_whole(pattern: str) -> None:
    assert steps(with_words(pattern), PROSE) == 0


def test_a_text_stays_whole_under_a_tokenizer_that_marks_every_beginning() -> None:
    tokenizer = stages(BYTES, normalizer=normalizers.Prepend("x"))
    assert steps(tokenizer, PROSE) == 0


def test_short_texts_are_tokenized_together_up_to_a_slice() -> None:
    sliced = SlicingTokenizer(SHIPPED, slice_bytes=SLICE)
    assert sum(1 for _ in sliced.encode(["a" * 100] * 12, None)) == 1


def test_a_tokenizer_of_one_word_has_no_place_to_cut() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    assert json.loads(tokenizer.to_str())["pre_tokenizer"] is None
    sliced = SlicingTokenizer(tokenizer, slice_bytes=SLICE)
    assert list(finished(sliced.encode(["a" * 3000], None))[0]) == [0] * 3000
