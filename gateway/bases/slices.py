"""Tokenizes texts in slices of bounded work, so that other requests are served in between.

A text may be cut before a word, because a pre-tokenizer matches words from left to right. After the
cut, it matches the same words with or without the text before. See `gateway.bases.boundaries`.
"""

from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from tokenizers import Encoding, Tokenizer

from gateway.bases.boundaries import Boundaries
from gateway.bases.words import ascii_words

# Maximum number of UTF-8 bytes that are tokenized in one call. They need about 60 ms, and have at
# most one token per byte.
SLICE_BYTES = 64 << 10
# Number of characters of an ASCII slice whose words Python finds. They need about 1 ms, in which
# Python's other threads wait.
_WORDS_SLICE = 16 << 10

_Made = TypeVar("_Made")
# Work in steps, as a generator. After each step, it yields None, or a function with long work that
# has no pauses. The function's result is sent to the next step. The generator returns the result of
# all work.
Steps = Generator[Callable[[], Any] | None, Any, _Made]


class TooManyTokensError(ValueError):
    """The texts have more tokens than the caller accepts, so tokenizing was stopped."""


def finished(steps: "Steps[_Made]") -> _Made:
    """Run all steps without pauses, and return the result of the work."""
    made: object = None
    try:
        while True:
            work = steps.send(made)
            made = None if work is None else work()
    except StopIteration as end:
        return end.value


def encode_batch(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    tokenizing: Executor | None,
    *,
    add_special_tokens: bool,
) -> list[Encoding]:
    """Return the tokens of texts, computed in a thread of `tokenizing` unless it is None."""
    # The batch call releases the interpreter lock. Its fast variant omits offsets, which are not
    # needed.
    work = partial(tokenizer.encode_batch_fast, list(texts), add_special_tokens=add_special_tokens)
    return work() if tokenizing is None else tokenizing.submit(work).result()


class SlicingTokenizer:
    """Tokenizes texts of one base in slices.

    A text stays whole if the tokenizer's words depend on the text before them.

    Attributes:
        around: Tokens that the tokenizer adds before and after a text, or None if they vary.
    """

    def __init__(self, tokenizer: Tokenizer, *, slice_bytes: int = SLICE_BYTES) -> None:
        """Analyse the tokenizer.

        Args:
            tokenizer: Tokenizer of the base.
            slice_bytes: Maximum number of UTF-8 bytes of a slice.
        """
        self._tokenizer = tokenizer
        self._boundaries = Boundaries(tokenizer)
        self._words = ascii_words(tokenizer) if self._boundaries.exist else None
        self._slice_bytes = slice_bytes
        self.around = special_tokens_around(tokenizer)

    def encode(
        self,
        texts: Sequence[str],
        tokenizing: Executor | None,
        *,
        tokens_max: int = 0,
        total_max: int = 0,
    ) -> "Steps[list[array[int]]]":
        """Return the ids of texts, without the special tokens that the tokenizer would add.

        Args:
            texts: Texts, each of which is encoded independently.
            tokenizing: Threads that do the work, or None for the caller's thread.
            tokens_max: Number of tokens per text that the caller needs, or 0 for all. A text may
                have more ids in the result.
            total_max: Maximum number of tokens of all texts, or 0 for no bound. Of each text, at
                most `tokens_max` tokens are counted.

        Raises:
            TooManyTokensError: The texts have more than `total_max` tokens.
        """
        made: list[array[int]] = []
        total = 0
        for batch in _batches(texts, self._slice_bytes):
            if made:
                yield
            if len(batch) == 1 and len(batch[0].encode()) > self._slice_bytes:
                new = [(yield from self._encode_long(batch[0], tokenizing, tokens_max))]
            else:
                new = list(self._encode_batch(batch, tokenizing))
            made.extend(new)
            total += sum(min(len(ids), tokens_max or len(ids)) for ids in new)
            if total_max and total > total_max:
                raise TooManyTokensError(f"more than {total_max} tokens")
        return made

    def encode_whole(self, text: str, tokenizing: Executor | None) -> "Steps[array[int]]":
        """Return the ids of a text, including the special tokens that the tokenizer adds."""
        if self.around is None or len(text) * 4 <= self._slice_bytes:
            made = encode_batch(self._tokenizer, [text], tokenizing, add_special_tokens=True)
            return array("I", made[0].ids)
        before, behind = self.around
        (ids,) = yield from self.encode([text], tokenizing)
        return before + ids + behind

    def _encode_batch(
        self, texts: Sequence[str], tokenizing: Executor | None
    ) -> "Iterator[array[int]]":
        made = encode_batch(self._tokenizer, texts, tokenizing, add_special_tokens=False)
        return (array("I", encoding.ids) for encoding in made)

    def _encode_long(
        self, text: str, tokenizing: Executor | None, tokens_max: int
    ) -> "Steps[array[int]]":
        ids, start, size = array("I"), 0, self._slice_bytes
        if not self._boundaries.exist:
            return (yield partial(self._encoded, text))
        while not tokens_max or len(ids) <= tokens_max:
            if (found := self._words_from(text, start)) is not None:
                ids.extend(found[0])
                start += found[1]
                if start == len(text):
                    return ids
                yield
                continue
            part, is_rest = _beginning(text, start, size)
            work = partial(self._encoded_part, part, is_rest=is_rest)
            if size > self._slice_bytes:  # the part is a single word, which cannot be cut
                tokens, end = yield work
            else:
                tokens, end = work() if tokenizing is None else tokenizing.submit(work).result()
            ids.extend(tokens)
            if is_rest:
                return ids
            start += end
            size = self._slice_bytes if end else 2 * size
            yield
        return ids

    def _words_from(self, text: str, start: int) -> "tuple[array[int], int] | None":
        """Return the tokens of the next words and their length, or None for the library's work."""
        if self._words is None:
            return None
        part = text[start : start + min(_WORDS_SLICE, self._slice_bytes)]
        if start + len(part) < len(text):
            return self._words.first_words(part)
        ids = self._words.encode(part)
        return None if ids is None else (ids, len(part))

    def _encoded_part(self, part: str, *, is_rest: bool) -> "tuple[array[int], int]":
        """Return a part's tokens and their end. Unless `is_rest`, its last words are left out."""
        return (self._encoded(part), len(part)) if is_rest else self._boundaries.first_words(part)

    def _encoded(self, text: str) -> "array[int]":
        (ids,) = self._encode_batch([text], None)
        return ids


def _beginning(text: str, start: int, size_bytes: int) -> tuple[str, bool]:
    """Return at most `size_bytes` of a text from `start` on, and whether this reaches its end."""
    part = text[start : start + size_bytes]
    encoded = part.encode()
    if len(encoded) > size_bytes:
        part = encoded[:size_bytes].decode(errors="ignore")
    return part, start + len(part) == len(text)


def _batches(texts: Sequence[str], size_bytes: int) -> Iterator[list[str]]:
    """Yield the texts in order, in groups of at most `size_bytes` UTF-8 bytes."""
    batch: list[str] = []
    size = 0
    for text in texts:
        more = len(text) if text.isascii() else len(text.encode())
        if batch and size + more > size_bytes:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += more
    if batch:
        yield batch


def special_tokens_around(tokenizer: Tokenizer) -> "tuple[array[int], array[int]] | None":
    """Return the tokens that are added before and after any text, or None if they vary."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return array("I", full[:start]), array("I", full[start + len(bare) :])
    return None
