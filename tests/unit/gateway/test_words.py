"""Words that Python finds in ASCII texts have the ids that the tokenizer's library gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from gateway.bases import words
from gateway.bases.slices import SlicingTokenizer, finished
from gateway.bases.words import AsciiWords, ascii_words
from tests.unit.gateway.test_slices import PROSE, SHIPPED, TOKENIZERS, with_words

SPLIT = ["shipped", "like llama", "like gpt-2"]
each = pytest.mark.parametrize("name", SPLIT)
FRAGMENTS = [
    *(
        "the",
        " stream",
        "  gate",
        "\n",
        " \n\n ",
        "1234567",
        " 12",
        "3.5",
        "!? ",
        "'s",
        "'LL",
        "\t",
    ),
    *("'S", " " * 40, "x" * 40, "\r\n", " = 3", '{"a":[1,-2]}', "\x0b", "\x0c", " \x1c", "\x1f "),
    *("don't", "WE'RE", "_", "\x00", "\x7f", "--", "\\", "``"),
]
ascii_texts = st.lists(
    st.sampled_from(FRAGMENTS) | st.text(st.characters(max_codepoint=127), max_size=6), max_size=60
).map("".join)


def of(tokenizer: Tokenizer) -> AsciiWords:
    made = ascii_words(tokenizer)
    assert made is not None
    return made


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture
def knows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is never asked for a whole text."""
    monkeypatch.setattr(words, "_UNKNOWN_MAX", 1.0)


@each
def test_an_ascii_text_has_the_librarys_ids(name: str, knows_all: None) -> None:
    made = of(TOKENIZERS[name])

    @settings(max_examples=50)
    @given(text=ascii_texts)
    def same(text: str) -> None:
        ids = made.encode(text)
        assert ids is not None
        assert list(ids) == ids_of(TOKENIZERS[name], text)

    same()


@each
def test_the_first_words_do_not_depend_on_the_text_after_them(name: str, knows_all: None) -> None:
    made, tokenizer = of(TOKENIZERS[name]), TOKENIZERS[name]

    @settings(max_examples=50)
    @given(
        text=ascii_texts.map(lambda it: it + "two streams, 12 gates\n" * 14),
        rest=ascii_texts | st.sampled_from(["é", "\u0301"]),
    )
    def same(text: str, rest: str) -> None:
        found = made.first_words(text)
        assert found is not None
        ids, end = found
        assert list(ids) + ids_of(tokenizer, text[end:] + rest) == ids_of(tokenizer, text + rest)

    same()


@each
def test_a_long_text_is_found_word_by_word(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[name]
    monkeypatch.setattr(words, "_LEARNED_MAX", 10_000)
    sliced = SlicingTokenizer(tokenizer)
    text = PROSE.replace("river", "stream") * 30
    finished(sliced.encode([text], None))
    monkeypatch.delattr(SlicingTokenizer, "_encoded_part")
    (ids,) = finished(sliced.encode([text], None))
    assert list(ids) == ids_of(tokenizer, text)


def test_other_texts_are_left_to_the_library() -> None:
    made = of(SHIPPED)
    assert made.encode("gates " * 50 + "é") is None
    assert made.encode("gates " * 50 + "<tool_call>") is None
    assert made.first_words("x" * 300) is None
    assert made.encode("all of these words are new") is None, "they are learned"
    assert made.encode("all of these words are new") is not None


@pytest.mark.parametrize("name", sorted(set(TOKENIZERS) - set(SPLIT)))
def test_tokenizers_of_other_kinds_are_left_to_the_library(name: str) -> None:
    assert ascii_words(TOKENIZERS[name]) is None


@pytest.mark.parametrize(
    "pattern",
    [r"\h+|.", r"(the)|\s", r"[a-z&&[^b]]+", r"[a-z&&b]", r"\p{Han}+|\s", r"a{2}+", "é|a", r"[\S]"],
)
def test_expressions_that_python_reads_otherwise_are_left_alone(pattern: str) -> None:
    assert ascii_words(with_words(pattern)) is None


def test_words_that_leave_gaps_are_left_to_the_library(knows_all: None) -> None:
    made = of(with_words(r"[a-z]+"))
    assert made.encode("gates") is not None
    assert made.encode("two gates") is None


def test_long_classes_and_possessive_repeats_are_read(knows_all: None) -> None:
    tokenizer = with_words(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lo}]+(?i:'s|'t)?|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+|[\p{L}]"
    )
    text = "The GATE'S of x's, 12345!\n\n  HTTPServer a/b \r\n end"
    ids = of(tokenizer).encode(text)
    assert ids is not None
    assert list(ids) == ids_of(tokenizer, text)


def test_remembered_words_are_bounded(monkeypatch: pytest.MonkeyPatch, knows_all: None) -> None:
    monkeypatch.setattr(words, "_WORDS_MAX", 50)
    made = of(SHIPPED)
    for number in range(0, 4000, 20):
        text = " ".join(chr(97 + (number + it) % 26) * 3 for it in range(20))
        assert list(made.encode(text) or ()) == ids_of(SHIPPED, text)
        assert len(made._ids) <= 50


def test_a_model_without_words_is_left_to_the_library() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    assert ascii_words(tokenizer) is None
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    assert ascii_words(tokenizer) is None
