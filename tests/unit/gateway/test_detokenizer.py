"""Increments of a detokenizer add up to the full decode, and never hold part of a character."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.text.detokenizer import json_fragment, token_table


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    for piece in ("Ġthe", "Ġgate", "ä½", "½ł", "é", "ðŁ", "ĺĢ"):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("naïve")])
    return tokenizer


def metaspace() -> Tokenizer:
    words = ["▁the", "▁gate", "way", "▁", "é", "你", "!", "<unk>"]
    tokenizer = Tokenizer(
        models.WordLevel(vocab={word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def byte_fallback(*more: decoders.Decoder) -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"▁a": 256, "b": 257, "<unk>": 258, "▁": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    )
    return tokenizer


BYTE_LEVEL, METASPACE, FALLBACK = byte_level(), metaspace(), byte_fallback()
LLAMA_2 = byte_fallback(decoders.Strip(" ", 1, 0))
BYTE_TABLE, META_TABLE, FALLBACK_TABLE = map(token_table, (BYTE_LEVEL, METASPACE, FALLBACK))


def increments(table, ids, cuts) -> list[str]:
    stream, found, start = table.stream(), [], 0
    for end in [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]:
        found.append(stream.push(ids[start:end]))
        start = end
    return [*found, stream.flush()]


def ids_of(table, extra: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(table.fragments) - 1 + extra), max_size=40)


cuts = st.lists(st.integers(1, 39), max_size=40, unique=True)


@settings(max_examples=500)
@given(ids=ids_of(BYTE_TABLE), cuts=cuts)
def test_byte_level_increments_add_up(ids: list[int], cuts: list[int]) -> None:
    pieces = increments(BYTE_TABLE, ids, cuts)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    for piece in pieces:
        piece.encode()  # a lone surrogate would raise


@settings(max_examples=300)
@given(text=st.text(max_size=30), cuts=cuts)
def test_valid_text_never_shows_a_replacement_character(text: str, cuts: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    shown = ""
    for piece in increments(BYTE_TABLE, ids, cuts):
        shown += piece
        assert BYTE_LEVEL.decode(ids).startswith(shown)
    assert shown == BYTE_LEVEL.decode(ids)


@given(ids=ids_of(META_TABLE), cuts=cuts)
def test_other_decoders_add_up(ids: list[int], cuts: list[int]) -> None:
    assert "".join(increments(META_TABLE, ids, cuts)) == METASPACE.decode(ids)


@given(text=st.text(max_size=20), cuts=cuts)
@example(text="\x80\x80\U00010000\U00010000\x80", cuts=[1, 3, 5, 6, 7, 9, 10, 11, 13])
def test_byte_fallback_adds_up_for_valid_text(text: str, cuts: list[int]) -> None:
    ids = list(text.encode())
    assert "".join(increments(FALLBACK_TABLE, ids, cuts)) == FALLBACK.decode(ids)


PIECES = ["▁a", "b", "▁", *(tuple(character.encode()) for character in " \n\x80é你😀")]


@pytest.mark.parametrize("tokenizer", [FALLBACK, LLAMA_2], ids=["kept", "stripped"])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_bytes_of_tokens_equal_the_bytes_of_their_text(tokenizer: Tokenizer, pieces) -> None:
    ids = [
        i for it in pieces for i in ((tokenizer.token_to_id(it),) if isinstance(it, str) else it)
    ]
    table = token_table(tokenizer)
    data = [table.bytes_of(token, is_first=not index) for index, token in enumerate(ids)]
    assert b"".join(data) == tokenizer.decode(ids).encode()


def test_bytes_of_words_behind_others_have_their_space() -> None:
    assert META_TABLE.bytes_of(0) == b" the"
    assert META_TABLE.bytes_of(0, is_first=True) == b"the"
    assert META_TABLE.bytes_of(2) == b"way"


class _Counted:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decodes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.decodes += 1
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def test_bytes_of_a_token_are_decoded_once() -> None:
    special = METASPACE.get_vocab_size() - 1
    tokenizer = _Counted(METASPACE)
    table = replace(META_TABLE, tokenizer=tokenizer)
    wanted = [META_TABLE.bytes_of(token) for token in range(special + 1)]
    for _ in range(3):
        assert [table.bytes_of(token) for token in range(special + 1)] == wanted
        assert table.bytes_of(0, is_first=True) == b"the"
        shown = table.showing([special])
        assert [shown.bytes_of(token) for token in (0, 2)] == [b" the", b"way"]
        assert shown.bytes_of(special) == b"<|end|>"
        assert table.bytes_of(special) == b"<|end|>"
    assert tokenizer.decodes == 2 * special + 3 * (1 + 6)


@pytest.mark.parametrize("token", range(len(BYTE_TABLE.fragments)))
def test_fragments_are_the_token_alone(token: int) -> None:
    fragment = BYTE_TABLE.fragments[token]
    text = BYTE_LEVEL.decode([token])
    if fragment is None:
        assert "\ufffd" in text
    else:
        assert json.loads(b'"' + fragment + b'"') == text


def test_special_and_end_tokens_are_hidden() -> None:
    table = token_table(BYTE_LEVEL, end_ids=[5], ids_min=400)
    special = BYTE_LEVEL.token_to_id("<|end|>")
    assert table.fragments[special] == table.fragments[5] == b""
    assert len(table.fragments) == 400
    assert table.stream().push([special, 5, 399]) == ""


@given(st.text())
def test_json_fragments_are_valid(text: str) -> None:
    assert json.loads(b'"' + json_fragment(text) + b'"') == text
