"""Tokenizes ASCII texts word by word, faster than the tokenizer's own library if words are known.

Most of the library's time is spent on finding words by a regular expression for Unicode. In an
ASCII text, Python's `re` finds the same words with a translated expression. The ids of usual words
are remembered, and the library encodes the others.
"""

import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

from tokenizers import Tokenizer, pre_tokenizers

# Number of characters at the end of a text whose words may change with the text that follows.
_MARGIN_CHARACTERS = 256
_WORDS_MAX = 1 << 15
_WORD_MAX = 24  # characters of the longest word that is remembered
# A text with a larger share of unknown words is left to the library. So many of them are learned.
_UNKNOWN_MAX = 1 / 8
_LEARNED_MAX = 256
_BYTE_LEVEL = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the library's
)
_SPACES = r" \t\n\r\x0b\x0c"
# ASCII characters of classes of Unicode, as they are written between brackets.
_CLASSES = {
    r"\p{L}": "A-Za-z",
    r"\p{Lu}": "A-Z",
    r"\p{Ll}": "a-z",
    r"\p{N}": "0-9",
    r"\p{Nd}": "0-9",
    r"\d": "0-9",
    r"\s": _SPACES,
}
_NO_ASCII = frozenset({r"\p{Lt}", r"\p{Lm}", r"\p{Lo}", r"\p{M}", r"\p{Mn}"})
# Elements that both libraries read alike, if the text is ASCII.
_ELEMENT = re.compile(
    r"\\p\{\w+\}|\\[dsSrnt]|\\[^\w]|\(\?(?:[:=!]|i:)|[()|]|\[\^?|\]|[?*+]\+?|\{\d+(?:,\d*)?\}(?!\+)"
    r"|[ \w'\"<>=!@#%&,;:/~`_-]"
)
_IDENTICAL = frozenset({"NFC", "NFD", "NFKC", "NFKD"})  # normalizers that leave ASCII as it is


class AsciiWords:
    """Tokenizes ASCII texts of one tokenizer. Safe for concurrent threads.

    Words are remembered for all owners of prompts, as the library does it.
    """

    def __init__(
        self, find: "re.Pattern[str]", added: "re.Pattern[str] | None", bare: Tokenizer
    ) -> None:
        """Store what `ascii_words` has found out about a tokenizer."""
        self._find, self._added, self._bare = find.findall, added, bare
        self._ids: dict[str, bytes] = {}

    def encode(self, text: str) -> "array[int] | None":
        """Return the ids of a text, or None if the library must encode the text."""
        words = self._words(text)
        return None if words is None else self._ids_of(words)

    def first_words(self, part: str) -> "tuple[array[int], int] | None":
        """Return the ids of a text's first words, and the index of the character after them.

        The last words are left out, because further text may change them. The result is None if the
        library must encode the text.

        Args:
            part: A text that begins at a boundary and continues beyond its end.
        """
        words = self._words(part)
        if words is None:
            return None
        end = len(part)
        while words and end > len(part) - _MARGIN_CHARACTERS:
            end -= len(words.pop())
        ids = self._ids_of(words) if words else None
        return None if ids is None else (ids, end)

    def _words(self, text: str) -> list[str] | None:
        if not text.isascii() or (self._added is not None and self._added.search(text)):
            return None
        words = self._find(text)
        return words if sum(map(len, words)) == len(text) else None

    def _ids_of(self, words: Sequence[str]) -> "array[int] | None":
        found = list(map(self._ids.get, words))
        if None in found:
            unknown = {word for word, ids in zip(words, found, strict=True) if ids is None}
            if len(unknown) > _UNKNOWN_MAX * len(words):
                self._learn(list(islice(unknown, _LEARNED_MAX)))
                return None
            new = self._learn(list(unknown))
            found = [new[it] if ids is None else ids for it, ids in zip(words, found, strict=True)]
        return array("I", b"".join(cast("list[bytes]", found)))

    def _learn(self, words: list[str]) -> dict[str, bytes]:
        """Return the ids of words as bytes, and remember those of short words."""
        made = self._bare.encode_batch_fast(words, add_special_tokens=False)
        new = {it: array("I", ids.ids).tobytes() for it, ids in zip(words, made, strict=True)}
        if len(self._ids) + len(new) > _WORDS_MAX:
            self._ids = {}
        self._ids |= {word: ids for word, ids in new.items() if len(word) <= _WORD_MAX}
        return new


def ascii_words(tokenizer: Tokenizer) -> AsciiWords | None:
    """Return the words of a tokenizer, or None if it is of another kind."""
    described = json.loads(tokenizer.to_str())
    pattern = _pattern(described)
    model = described["model"]
    if (
        not (pattern and pattern.isascii())
        or "&&" in pattern
        or model["type"] != "BPE"
        or model.get("dropout")
    ):
        return None
    if described.get("truncation") or not _keeps_ascii(described.get("normalizer")):
        return None
    find = _translated(pattern)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if find is None or any(len(text) >= _MARGIN_CHARACTERS for text in added):
        return None
    bare = Tokenizer(tokenizer.model)  # both tokenizers share the model
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = "|".join(map(re.escape, filter(str.isascii, added)))
    return AsciiWords(find, re.compile(texts) if texts else None, bare)


def _pattern(described: Mapping[str, Any]) -> str | None:
    """Return the expression of a tokenizer whose words are encoded as bytes."""
    stage = described.get("pre_tokenizer") or {}
    stages = stage["pretokenizers"] if stage.get("type") == "Sequence" else [stage]
    *splits, last = stages
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if not splits:
        return _BYTE_LEVEL if last.get("use_regex", True) else None
    split = splits[0]
    is_usual = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    if len(splits) > 1 or not is_usual or last.get("use_regex", True):
        return None
    return split["pattern"].get("Regex")


def _keeps_ascii(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_ascii, normalizer["normalizers"]))
    return normalizer["type"] in _IDENTICAL


def _translated(pattern: str) -> "re.Pattern[str] | None":
    """Return an expression of Python with the same matches in ASCII texts, or None."""
    try:
        return re.compile("".join(_elements(pattern)), re.ASCII)
    except (re.error, ValueError):
        return None


def _elements(pattern: str) -> Iterator[str]:
    """Yield the translated elements of an expression.

    Raises:
        ValueError: An element is unknown, or means something else in Python.
    """
    at, is_class = 0, False
    while at < len(pattern):
        found = _ELEMENT.match(pattern, at)
        if found is None or (is_class and found[0].startswith("[")):
            raise ValueError(f"unknown element at {at} of {pattern}")
        element, at = found[0], found.end()
        if element == "(":
            raise ValueError("a group that captures")
        if element in _NO_ASCII and is_class:
            continue
        if element.startswith(r"\p") and element not in _CLASSES:
            raise ValueError(f"unknown class {element}")
        if element == r"\S":
            if is_class:
                raise ValueError("a complement between brackets")
            yield f"[^{_SPACES}]"
        elif element in _CLASSES:
            yield _CLASSES[element] if is_class else f"[{_CLASSES[element]}]"
        else:
            yield element
        is_class = element.startswith("[") or (is_class and element != "]")
