"""Finds positions at which a text can be cut without changing its tokens.

A pre-tokenizer splits a text into words. Unless it looks behind, it recognizes the same words after
a word's beginning, with or without the text before. So a text can be cut before a word. The words
are a result of tokenizing the text.
"""

import json
import re
import unicodedata
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

# Number of characters after a cut that the tokenizer must read, because they may change where the
# words before the cut end.
_MARGIN_CHARACTERS = 256
# Number of tokens of a usual word, by which the search for a word's beginning steps back.
_WORD_TOKENS = 64
# Matches parts of a regular expression whose matches depend on the text before them.
_LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[bBAGzZ]|(?<![\[\\])[\^$]")
# Normalizers that change only single characters, or a character together with its accents.
_LOCAL = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"})
# Vowels and final consonants of Hangul, which normalizers may compose with the character before.
_JAMO = ((0x1160, 0x11FF), (0xD7B0, 0xD7FF))


class _Cuts(Enum):
    """The words of a tokenizer before which a text may be cut."""

    NOWHERE = 0
    BLANKS = 1
    WORDS = 2


class Boundaries:
    """Finds boundaries for one tokenizer. Safe for concurrent threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Analyse a tokenizer, which must not change afterwards."""
        described = json.loads(tokenizer.to_str())
        self._cuts = _cuts(described)
        self._bare = _bare(tokenizer) if self.exist else tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._alone = tuple(token.content for token in added if token.single_word)

    @property
    def exist(self) -> bool:
        """Whether texts of this tokenizer can be cut at all."""
        return self._cuts is not _Cuts.NOWHERE

    def first_words(self, part: str) -> "tuple[array[int], int]":
        """Return the tokens of a text's first words, and the index of the character after them.

        The last words are left out, because further text may change them. The index is 0 if the
        text cannot be cut.

        Args:
            part: A text that begins at a boundary and continues beyond its end.
        """
        (encoding,) = self._bare.encode_batch([part], add_special_tokens=False)
        for index in _word_starts(encoding, len(part) - _MARGIN_CHARACTERS):
            start, end = _start(encoding, index), _end(encoding, index - 1)
            if self._cuts is _Cuts.BLANKS and end < start:
                # Blanks belong to no word. The last blank before a word stays with that word.
                start -= 1
            if end <= start and self._is_cut(part, start):
                return array("I", encoding.ids[:index]), start
        return array("I"), 0

    def _is_cut(self, part: str, start: int) -> bool:
        if not _begins_alone(part[start]) or part.startswith(self._alone, start):
            return False
        if self._cuts is _Cuts.WORDS:
            return True
        return part[start] == " " and not part[start - 1].isspace()


def _word_starts(encoding: Encoding, start_max: int) -> Iterator[int]:
    """Yield the index of each word's first token, except the first word's, in reverse order.

    Args:
        encoding: Tokens of a text.
        start_max: Highest index of a character at which a word may start.
    """
    places, word_of = range(len(encoding)), partial(_word, encoding)
    index = bisect_right(places, start_max, key=lambda it: _start(encoding, it)) - 1
    while index > 0:
        word = word_of(index)
        near = max(0, index - _WORD_TOKENS)
        first = bisect_left(places, word, near if word_of(near) != word else 0, index, key=word_of)
        if first > 0:
            yield first
        index = first - 1


def _word(encoding: Encoding, index: int) -> int:
    word = encoding.token_to_word(index)
    assert word is not None, "every token stands for text"
    return word


def _start(encoding: Encoding, index: int) -> int:
    span = encoding.token_to_chars(index)
    assert span is not None, "every token stands for text"
    return span[0]


def _end(encoding: Encoding, index: int) -> int:
    span = encoding.token_to_chars(index)
    assert span is not None, "every token stands for text"
    return span[1]


def _begins_alone(character: str) -> bool:
    """Return whether no normalizer combines a character with the preceding character."""
    code = ord(character)
    if any(first <= code <= last for first, last in _JAMO):
        return False
    first = unicodedata.normalize("NFKD", character)[0]
    return not unicodedata.category(first).startswith("M")


def _bare(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer without its post-processor, which may report inexact offsets."""
    if tokenizer.post_processor is None:
        return tokenizer
    bare = Tokenizer(tokenizer.model)  # both tokenizers share the model
    bare.normalizer, bare.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    added = tokenizer.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (bare.add_special_tokens if token.special else bare.add_tokens)([token])
    if _added_texts(bare.get_added_tokens_decoder()) == _added_texts(added):
        return bare
    described = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps(described | {"post_processor": None}))


def _added_texts(added: Mapping[int, AddedToken]) -> dict[int, str]:
    return {number: repr(token) for number, token in added.items()}


def _cuts(described: Mapping[str, Any]) -> _Cuts:
    """Return the words before which this tokenizer's texts may be cut."""
    stages = _flat(described.get("pre_tokenizer"), "pretokenizers")
    normalizers = _flat(described.get("normalizer"), "normalizers")
    is_local = all(it["type"] in _LOCAL for it in normalizers)
    splitting = [it for it in stages if _splits(it)]
    if described.get("truncation") or not is_local or not splitting:
        return _Cuts.NOWHERE
    found = min((_cuts_of(it) for it in stages), key=lambda it: it.value)
    # A second stage could split the words of the first stage, so only one stage may split.
    is_one = len(splitting) == 1 and splitting[0] is stages[0]
    return found if is_one or found is _Cuts.NOWHERE else _Cuts.BLANKS


def _flat(stage: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    if stage is None:
        return []
    if stage["type"] != "Sequence":
        return [stage]
    return [it for part in stage[parts] for it in _flat(part, parts)]


def _splits(stage: Mapping[str, Any]) -> bool:
    return stage["type"] != "ByteLevel" or bool(stage.get("use_regex", True))


def _cuts_of(stage: Mapping[str, Any]) -> _Cuts:
    """Return the words that one stage recognizes regardless of the text before them."""
    kind = stage["type"]
    if stage.get("behavior", "Isolated") != "Isolated":
        return _Cuts.NOWHERE
    if kind == "Split":
        pattern = stage["pattern"].get("Regex", "")
        return _Cuts.NOWHERE if _LOOKS_BACK.search(pattern) else _Cuts.WORDS
    if kind == "ByteLevel":  # this stage may insert a space before the first word
        return _Cuts.BLANKS if stage.get("add_prefix_space") else _Cuts.WORDS
    if kind == "Metaspace":  # this stage may insert a space as well
        return _Cuts.BLANKS if stage.get("split", True) else _Cuts.NOWHERE
    if kind in {"Digits", "BertPreTokenizer", "Whitespace", "WhitespaceSplit"}:
        return _Cuts.WORDS
    return _Cuts.NOWHERE
