"""Tokenizes texts in slices of bounded work, so that other requests get turns in between.

A text may be cut at the beginning of a word. A pre-tokenizer matches from left to right, so from
there on it finds the same words with or without the text before.
"""

import json
import re
from array import array
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

# Characters that are tokenized in one go, which takes some 30 ms.
SLICE_CHARACTERS = 64 << 10
# Characters at a slice's end that a cut stays away from: text behind the slice may change them.
_MARGIN_CHARACTERS = 256
# Parts of a regular expression that look at text before a match.
_LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[bBAGzZ]|(?<![\[\\])[\^$]")
_BYTE_LEVEL_SPACE = "Ġ"

_Made = TypeVar("_Made")
# Work that pauses at each yield; its value is what comes of it.
Steps = Generator[None, None, _Made]


def finished(steps: "Steps[_Made]") -> _Made:
    """Do all steps at once, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def encode_batch(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    tokenizing: Executor | None,
    *,
    add_special_tokens: bool,
) -> list[Encoding]:
    """Return the tokens of texts; made in a thread of `tokenizing`, if there is one."""
    # The batch call lets go of the interpreter lock; the fast one computes no offsets.
    work = partial(tokenizer.encode_batch_fast, list(texts), add_special_tokens=add_special_tokens)
    return work() if tokenizing is None else tokenizing.submit(work).result()


class SlicingTokenizer:
    """Tokenizes texts of one base in slices.

    A text stays whole where the tokenizer's words depend on the text before them.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, is_independent: bool, characters: int = SLICE_CHARACTERS
    ) -> None:
        """Prepare.

        Args:
            tokenizer: Tokenizer of the base.
            is_independent: Whether no stage of the tokenizer adds anything to the beginning of a
                text.
            characters: Characters of a slice.
        """
        self._tokenizer = tokenizer
        self._can_slice = is_independent and not _looks_back(tokenizer)
        self._characters = characters
        self._around = special_tokens_around(tokenizer)

    def encode(
        self, texts: Sequence[str], tokenizing: Executor | None
    ) -> "Steps[list[array[int]]]":
        """Return the ids of texts, each without the tokens that the tokenizer adds to a text.

        Args:
            texts: Each is encoded by itself.
            tokenizing: Threads that do the work; None: the caller's thread.
        """
        made: list[array[int]] = []
        for batch in _batches(texts, self._characters):
            if made:
                yield
            if len(batch) == 1 and len(batch[0]) > self._characters and self._can_slice:
                made.append((yield from self._encode_long(batch[0], tokenizing)))
            else:
                made.extend(self._encode_batch(batch, tokenizing))
        return made

    def encode_whole(self, text: str, tokenizing: Executor | None) -> "Steps[array[int]]":
        """Return the ids of a text with the tokens that the tokenizer adds to a text."""
        if len(text) <= self._characters or not self._can_slice or self._around is None:
            made = encode_batch(self._tokenizer, [text], tokenizing, add_special_tokens=True)
            return array("I", made[0].ids)
        before, behind = self._around
        (ids,) = yield from self.encode([text], tokenizing)
        return before + ids + behind

    def _encode_batch(
        self, texts: Sequence[str], tokenizing: Executor | None
    ) -> "Iterator[array[int]]":
        made = encode_batch(self._tokenizer, texts, tokenizing, add_special_tokens=False)
        return (array("I", encoding.ids) for encoding in made)

    def _encode_long(self, text: str, tokenizing: Executor | None) -> "Steps[array[int]]":
        ids, start, characters = array("I"), 0, self._characters
        while len(text) - start > characters:
            part = text[start : start + characters]
            work = partial(self._first_words, part)
            tokens, end = work() if tokenizing is None else tokenizing.submit(work).result()
            if end:
                ids.extend(tokens)
                start, characters = start + end, self._characters
            else:
                characters *= 2  # one word of this length, or none that begins with a space
            yield
        for rest in self._encode_batch([text[start:]], tokenizing):
            ids.extend(rest)
        return ids

    def _first_words(self, part: str) -> tuple[list[int], int]:
        """Return the tokens of all words but the last, and that one's index; 0: there is none."""
        (encoding,) = self._tokenizer.encode_batch([part], add_special_tokens=False)
        ids, cut_max = encoding.ids, len(part) - _MARGIN_CHARACTERS
        for index in range(len(ids) - 1, 0, -1):
            if encoding.token_to_word(index) == encoding.token_to_word(index - 1):
                continue
            span = encoding.token_to_chars(index)
            cut = -1 if span is None else self._cut(part, span[0], ids[index])
            if 0 < cut <= cut_max:
                return ids[:index], cut
        return [], 0

    def _cut(self, part: str, start: int, token: int) -> int:
        """Return the index of a word with a space in front; offsets may leave the space out."""
        if part[start : start + 1] != " ":
            name = self._tokenizer.id_to_token(token) or ""
            if not name.startswith(_BYTE_LEVEL_SPACE) or part[start - 1] != " ":
                return -1
            start -= 1
        return -1 if start < 1 or part[start - 1].isspace() else start


def _batches(texts: Sequence[str], characters: int) -> Iterator[list[str]]:
    """Yield texts in order, in groups of at most so many characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > characters:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _looks_back(tokenizer: Tokenizer) -> bool:
    """Return whether a word may depend on text before it."""
    stages = [json.loads(tokenizer.to_str()).get("pre_tokenizer")]
    while stages:
        stage = stages.pop()
        if stage is None:
            continue
        stages += stage.get("pretokenizers", ())
        pattern = (stage.get("pattern") or {}).get("Regex", "")
        if _LOOKS_BACK.search(pattern) or stage.get("behavior", "Isolated") != "Isolated":
            return True
    return False


def special_tokens_around(tokenizer: Tokenizer) -> "tuple[array[int], array[int]] | None":
    """Return the tokens before and behind a text; None: the tokenizer has no such fixed form."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return array("I", full[:start]), array("I", full[start + len(bare) :])
    return None
