"""Compiles grammars, and computes the tokens that may follow in a constrained answer.

Only this module and `replica.engine.grammar_source`, which reads the text of grammars, use
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
# Bounds of the cache. A compiled grammar needs 60 KB to 30 MB.
_CACHE_ENTRIES, _CACHE_TEXT_BYTES = 256, 1 << 20


class Matcher:
    """A compiled grammar, with the position in it that one sequence has reached."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int], text_mask: Words) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._text_mask = text_mask

    @property
    def text_mask(self) -> Words:
        """The mask of tokens that are text, plus the special tokens that the grammar names."""
        return self._text_mask

    @property
    def inner(self) -> LLMatcher:
        """The matcher of llguidance, which its executor requires."""
        return self._matcher

    def copy(self) -> "Matcher":
        """Return a copy at the same position of the grammar."""
        return Matcher(self._matcher.deep_copy(), self._eos_ids, self._text_mask)

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by emitted tokens. A token that the grammar excludes sets `error`.

        End tokens are skipped, because they are not text. The sequence may have ignored one, so
        further tokens may follow it.
        """
        text = [token for token in tokens if token not in self._eos_ids]
        if text and not self._matcher.is_error():
            self._matcher.consume_tokens(text)

    @property
    def error(self) -> str:
        """Reason why the sequence cannot continue, or empty if it can."""
        if not self._matcher.is_error():
            return ""
        return shortened(self._matcher.get_error()) or "a token does not follow from the grammar"


class GrammarCompiler:
    """Compiles each grammar once for one tokenizer, in any thread."""

    def __init__(
        self, tokenizer_json: Path, vocabulary: int, eos_ids: Iterable[int], *, threads: int = 1
    ) -> None:
        """Create a compiler, which reads the tokenizer when the first grammar is compiled.

        Args:
            tokenizer_json: The base's tokenizer.json.
            vocabulary: Number of columns of the logits, which may exceed the tokenizer's
                vocabulary.
            eos_ids: Ids that end an answer.
            threads: Number of threads that compute the masks of a step while the graph runs.
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
        # These masks have one bit per token. `eos_mask` has the tokens that end an answer.
        # `text_mask` has all tokens of the tokenizer except for special tokens.
        self.eos_mask = self.text_mask = np.zeros(0, np.int32)

    @property
    def cached(self) -> int:
        """The number of compiled grammars in the cache."""
        return len(self._cache)

    def check(self, grammar: Grammar) -> None:
        """Compile and cache a grammar before its sequence is added.

        Raises RefusedError if the grammar is not usable.
        """
        self._compiled(grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning of a grammar. Raises RefusedError like `check`."""
        matcher = self._compiled(grammar).deep_copy()
        return Matcher(matcher, self.eos_ids, self._text_mask(grammar))

    def fill(self, entries: Sequence[tuple[Matcher, int, list[int]]], rows: int) -> Words:
        """Return one bit per token that may follow. End tokens may follow only a complete text.

        Args:
            entries: Tuples (matcher, row, draft). Row number `row` receives the mask of the next
                token. The rows after it receive the masks after each token of the draft. After a
                draft token that the grammar excludes, every token is permitted.
            rows: Number of rows of the result, whose shape is (rows, words).
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
        """Read the tokenizer before the first grammar. Takes 0.1 s, or 1 s for 128k tokens."""
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
        # The first mask builds tables that all copies of a grammar share. If a grammar is too
        # ambiguous, it fails here or after a few more tokens.
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
    """Return a bit mask of shape (words,) in which the bits of `ids` are set."""
    bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    bits[np.array(list(ids), np.intp)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bits(masks: Words) -> npt.NDArray[np.uint8]:
    """Return one array element per bit of the last axis, in the order of the token ids."""
    return np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")


def _limits() -> LLParserLimits:
    # With these limits, a step of a hostile grammar takes about ten milliseconds, and its tables
    # have about 30 MB. The limits refuse `(a{1000}){1000}` after 0.3 s. Without them, its
    # compilation would take 4 s and create a million lexer states.
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
