"""Compiled grammars: the tokens that may follow in a constrained answer.

The only module besides `replica.engine.grammar_source`, which reads their text, that uses
llguidance.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from replica.engine.grammar_source import (
    grammar_source,
    located,
    named_tokens,
    refused,
    shortened,
)
from replica.engine.spelling import spelled
from replica.engine.types import Grammar

Words = npt.NDArray[np.int32]

_PROBES = 3
_CACHE_ENTRIES, _CACHE_TEXT_BYTES = 256, 1 << 20  # a compiled grammar takes 60 KB to 30 MB


class Matcher:
    """A grammar with the position of one sequence in it."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int], text_mask: Words) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._text_mask = text_mask

    @property
    def text_mask(self) -> Words:
        """The mask of tokens that are text, or special tokens that the grammar itself names."""
        return self._text_mask

    @property
    def inner(self) -> LLMatcher:
        """The matcher of llguidance, for the executor."""
        return self._matcher

    def copy(self) -> "Matcher":
        """Return a copy at the same position."""
        return Matcher(self._matcher.deep_copy(), self._eos_ids, self._text_mask)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens; an impossible one leaves an `error`.

        An end token is no text: where it did not end the sequence, it may come again.
        """
        text = [token for token in tokens if token not in self._eos_ids]
        if text and not self._matcher.is_error():
            self._matcher.consume_tokens(text)

    @property
    def error(self) -> str:
        """Reason why it cannot go on; empty while it can."""
        if not self._matcher.is_error():
            return ""
        return shortened(self._matcher.get_error()) or "a token does not follow from the grammar"


class GrammarCompiler:
    """Compiles each grammar once for one tokenizer; may be used from any thread."""

    def __init__(
        self, tokenizer_json: Path, vocabulary: int, eos_ids: Iterable[int], *, threads: int = 1
    ) -> None:
        """Prepare to compile; the tokenizer is read at the first grammar.

        Args:
            tokenizer_json: The base's tokenizer.json.
            vocabulary: Columns of the logits; may be more than the tokenizer has.
            eos_ids: Ids that end an answer.
            threads: Threads for the masks of a step, which are filled while the graph runs.
        """
        self._path = tokenizer_json
        self.vocabulary = vocabulary
        self.eos_ids = frozenset(eos_ids)
        self._threads = threads
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._cache: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._cache_text_bytes = 0
        # One bit per token: ends an answer; is text, and not special or beyond the tokenizer.
        self.eos_mask = self.text_mask = np.zeros(0, np.int32)

    @property
    def cached(self) -> int:
        """The number of cached compiled grammars."""
        return len(self._cache)

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar before the sequence begins; RefusedError."""
        self._compiled(grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning; RefusedError, see `check`."""
        matcher = self._compiled(grammar).deep_copy()
        return Matcher(matcher, self.eos_ids, self._text_mask(grammar))

    def fill(self, entries: Sequence[tuple[Matcher, int, list[int]]], rows: int) -> Words:
        """Return the tokens that may follow, one bit each; ends where the text may be complete.

        Args:
            entries: (matcher, row, draft): `row` is what may follow now, the rows behind it what
                may follow each token of the draft; behind an impossible token, everything may.
            rows: Number of rows; the result has the shape (rows, words).
        """
        size = self._load().vocab_size
        assert self._executor is not None
        masks = np.full((rows, -(-size // 32)), -1, np.int32)
        plain = [(matcher.inner, row) for matcher, row, draft in entries if not draft]
        if plain:
            fill_next_token_bitmask_par(self._executor, plain, masks)
        drafted = [(matcher.inner, row, draft) for matcher, row, draft in entries if draft]
        if drafted:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, masks)
        return np.ascontiguousarray(masks[:, : len(self.eos_mask)])

    def load(self) -> None:
        """Read the tokenizer now and not at the first grammar: 0.1 s, or 1 s with 128k tokens."""
        self._load()

    def _load(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = tokenizer = _read_tokenizer(
                    self._path, self.vocabulary, self.eos_ids
                )
                self._executor = LLExecutor(self._threads)
                is_text = [
                    token < tokenizer.vocab_size
                    and not tokenizer.is_special_token(token)
                    and token not in self.eos_ids
                    for token in range(self.vocabulary)
                ]
                self.text_mask = bit_mask(np.flatnonzero(is_text), self.vocabulary)
                self.eos_mask = bit_mask(self.eos_ids, self.vocabulary)
            return self._tokenizer

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
                return found
        compiled = self._compile(grammar)
        with self._lock:
            if grammar not in self._cache:
                self._cache[grammar] = compiled
                self._cache_text_bytes += len(grammar.text)
            while len(self._cache) > _CACHE_ENTRIES or self._cache_text_bytes > _CACHE_TEXT_BYTES:
                dropped, _ = self._cache.popitem(last=False)
                self._cache_text_bytes -= len(dropped.text)
        return compiled

    def _text_mask(self, grammar: Grammar) -> Words:
        named = [token for token in named_tokens(grammar) if token < self.vocabulary]
        named = [token for token in named if token not in self.eos_ids]
        return self.text_mask | bit_mask(named, self.vocabulary) if named else self.text_mask

    def _compile(self, grammar: Grammar) -> LLMatcher:
        source = grammar_source(grammar)
        compiled = LLMatcher(self._load(), source, log_level=0, limits=_limits())
        text_mask = self._text_mask(grammar)
        # The first mask builds tables that the copies share. Too ambiguous a grammar fails there or
        # a little further on.
        mask = np.frombuffer(compiled.compute_bitmask(), np.int32)
        probe = compiled.deep_copy()
        for _ in range(_PROBES):
            possible = np.flatnonzero(_bits(mask[: len(text_mask)] & text_mask))
            if not len(possible) or probe.is_error():
                break
            probe.consume_token(int(possible[0]))
            mask = np.frombuffer(probe.compute_bitmask(), np.int32)
        error = probe.get_error()
        if error.startswith("NoExtension"):
            raise refused(grammar, "nothing matches it")
        if error:
            raise refused(grammar, located(grammar, error))
        return compiled


def bit_mask(ids: Iterable[int] | npt.NDArray[np.intp], vocabulary: int) -> Words:
    """Return a mask, shape (words,), in which the bits of `ids` are set."""
    bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    bits[np.array(list(ids), np.intp)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bits(masks: Words) -> npt.NDArray[np.uint8]:
    """Return one element per bit of the last axis, in the order of the tokens."""
    return np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")


def _limits() -> LLParserLimits:
    # A step of a hostile grammar stays at some ten milliseconds, its tables at some 30 MB, and
    # `(a{1000}){1000}` is refused after 0.3 s: with a million for its expressions it took 4 s.
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=10_000,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


def _read_tokenizer(path: Path, vocabulary: int, eos_ids: frozenset[int]) -> LLTokenizer:
    text = spelled(path.read_text(encoding="utf-8"), eos_ids)
    tokenizer = LLTokenizer(text, eos_token=sorted(eos_ids))
    if tokenizer.vocab_size >= vocabulary:
        return tokenizer
    return LLTokenizer(text, n_vocab=vocabulary, eos_token=sorted(eos_ids))
