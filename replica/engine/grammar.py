"""Grammars: what may follow in a constrained answer. The only module that knows llguidance.

A grammar is text from a stranger, and the compiler neither watches the clock nor its stack: a chain
of a thousand references kills the process, a large `multipleOf` never ends. So the text is looked
at first. What is let through compiles in less than a second at worst (a schema of 64 KiB that is
one object with 2,000 optional properties), typically in one or two milliseconds.
"""

import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)

from replica.engine.types import Grammar, GrammarKind, RefusedError
from sluice.errors import ErrorCode

Words = npt.NDArray[np.int32]

_TEXT_BYTES_MAX = {
    GrammarKind.JSON: 0,
    GrammarKind.JSON_SCHEMA: 65_536,
    GrammarKind.CHOICE: 65_536,
    GrammarKind.REGEX: 8_192,  # a step of a long one takes 0.3 ms per KiB
    GrammarKind.EBNF: 16_384,
}
_STRING_CHARACTERS_MAX = 4_096  # of one string in a schema or a choice; as for a regex
# The compiler descends through references and rules on the stack. With 8 MiB it survives 3,000 to
# 4,000 levels of a schema, and chains of 2,000 rules.
_LEVELS_MAX = 1_000
_RULES_MAX = 500
# The parser gives up at about so many optional properties of one object, after a time that grows
# with the square: 150 ms.
_OPTIONAL_MAX = 500
_MULTIPLE_MAX = 10_000  # the automaton of a multiple has so many states; 40 ms
_DIRECTIVES = re.compile(r"%\s*(json|regex|lark|llguidance)")
_LARK_LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//.*|#.*')
_UNQUOTABLE = re.compile("[\x00-\x1f\ud800-\udfff]")
_COMPACT: Any = {"whitespace_flexible": False}  # a weak model would babble spaces
_PROBES = 3
_CACHE_ENTRIES, _CACHE_TEXT_BYTES = 256, 1 << 20  # a compiled grammar takes 60 KB to 30 MB
_MESSAGE_CHARACTERS = 300


class Matcher:
    """A grammar and how much of it one sequence has written."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids

    @property
    def inner(self) -> LLMatcher:
        """For the executor."""
        return self._matcher

    def advance(self, tokens: Sequence[int]) -> None:
        """Take emitted tokens; one that cannot follow leaves an `error`.

        An end is no text: where it did not end the sequence, it may come again.
        """
        text = [token for token in tokens if token not in self._eos_ids]
        if text and not self._matcher.is_error():
            self._matcher.consume_tokens(text)

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""
        if not self._matcher.is_error():
            return ""
        return _shortened(self._matcher.get_error()) or "a token does not follow from the grammar"


class GrammarCompiler:
    """Compiles each grammar once for one tokenizer; may be used from any thread."""

    def __init__(
        self, tokenizer_json: Path, vocabulary: int, eos_ids: Iterable[int], *, threads: int = 1
    ) -> None:
        """Prepare to compile; the tokenizer is read at the first grammar.

        Args:
            tokenizer_json: The base's tokenizer.json.
            vocabulary: Columns of the logits; may be more than the tokenizer has.
            eos_ids: They end an answer.
            threads: For the masks of a step, which are filled while the graph runs.
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
        """Compiled grammars that are kept."""
        return len(self._cache)

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar, so that it is there when the sequence begins; RefusedError if not."""
        self._compiled(grammar)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the beginning; RefusedError as for `check`."""
        return Matcher(self._compiled(grammar).deep_copy(), self.eos_ids)

    def fill(self, entries: Sequence[tuple[Matcher, int, list[int]]], rows: int) -> Words:
        """Return what may follow, one bit per token; an end where the text may be complete.

        Args:
            entries: (matcher, row, draft): `row` is what may follow now, the rows behind it what
                may follow each token of the draft; behind an impossible token, everything may.
            rows: In all; the result has the shape (rows, words).
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
        """Read the tokenizer now and not at the first grammar: 0.1 s, or 0.8 s with 128k tokens."""
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

    def _compile(self, grammar: Grammar) -> LLMatcher:
        source = _source(grammar)
        compiled = LLMatcher(self._load(), source, log_level=0, limits=_limits())
        # The first mask builds tables that the copies share. What is too ambiguous shows there or
        # a little further on.
        mask = np.frombuffer(compiled.compute_bitmask(), np.int32)
        probe = compiled.deep_copy()
        for _ in range(_PROBES):
            possible = np.flatnonzero(_bits(mask[: len(self.text_mask)] & self.text_mask))
            if not len(possible) or probe.is_error():
                break
            probe.consume_token(int(possible[0]))
            mask = np.frombuffer(probe.compute_bitmask(), np.int32)
        error = probe.get_error()
        if error.startswith("NoExtension"):
            raise _refused(grammar, "nothing matches it")
        if error:
            raise _refused(grammar, _shortened(error))
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
    # A step of one hostile grammar stays at a few milliseconds, its tables at some 30 MB.
    return LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=10_000,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


def _read_tokenizer(path: Path, vocabulary: int, eos_ids: frozenset[int]) -> LLTokenizer:
    text = path.read_text(encoding="utf-8")
    tokenizer = LLTokenizer(text, eos_token=sorted(eos_ids))
    if tokenizer.vocab_size >= vocabulary:
        return tokenizer
    return LLTokenizer(text, n_vocab=vocabulary, eos_token=sorted(eos_ids))


def _source(grammar: Grammar) -> str:
    """Return the grammar as llguidance takes it; RefusedError when it is not safe to compile."""
    kind, text = grammar.kind, grammar.text
    size, allowed = len(text.encode("utf-8", "replace")), _TEXT_BYTES_MAX[kind]
    if not text and kind is not GrammarKind.JSON:
        raise _refused(grammar, "it is empty")
    if size > allowed:
        raise _refused(grammar, f"it has {size} bytes; at most {allowed}")
    if kind is GrammarKind.JSON:
        return LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=_COMPACT)
    if kind is GrammarKind.REGEX:
        # Digits, letters and spaces of ASCII; nobody who writes \\d wants Devanagari.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, use_ascii='dws')}/")
    if kind is GrammarKind.EBNF:
        _check_lark(grammar)
        return LLMatcher.grammar_from_lark(text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(grammar, f"it is not JSON: {error}") from None
    if kind is GrammarKind.CHOICE:
        return LLMatcher.grammar_from_lark(_choice(grammar, document))
    if not isinstance(document, dict):
        raise _refused(grammar, "a schema is a JSON object")
    _check_schema(grammar, document)
    # Not the text itself: of two equal keys, what was checked is what is compiled.
    return LLMatcher.grammar_from_json_schema(json.dumps(document), overrides=_COMPACT)


def _choice(grammar: Grammar, document: Any) -> str:
    """Return a grammar of one terminal that is exactly one of the strings."""
    if not isinstance(document, list) or not document:
        raise _refused(grammar, "it must be a JSON array of at least one string")
    for choice in document:
        if not isinstance(choice, str) or not 0 < len(choice) <= _STRING_CHARACTERS_MAX:
            raise _refused(
                grammar, f"each choice must be a string of 1 to {_STRING_CHARACTERS_MAX} characters"
            )
        if _UNQUOTABLE.search(choice):
            raise _refused(grammar, "a choice has a control character or half a surrogate pair")
    # Quoted as in JSON: Lark's strings have the same escapes.
    return "start: CHOICE\nCHOICE: " + " | ".join(
        json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(document)
    )


def _check_lark(grammar: Grammar) -> None:
    bare = _LARK_LITERALS.sub("", grammar.text)
    if "<" in bare:
        raise _refused(grammar, "special tokens (<...>) cannot be written by an answer")
    if _DIRECTIVES.search(grammar.text):
        raise _refused(grammar, "%json, %regex, %lark and %llguidance are not supported")
    # Every rule has a colon behind its name.
    if grammar.text.count(":") > _RULES_MAX:
        raise _refused(grammar, f"it has more than {_RULES_MAX} rules (colons)")


def _check_schema(grammar: Grammar, document: dict[str, Any]) -> None:
    """Bound what the compiler does on its stack and with its automata."""
    depth = squares = 0
    multiples: list[Fraction] = []
    references: set[str] = set()
    level: list[Any] = [document]
    while level:
        depth += 1
        below: list[Any] = []
        for node in level:
            if isinstance(node, str) and len(node) > _STRING_CHARACTERS_MAX:
                raise _refused(
                    grammar, f"a string has more than {_STRING_CHARACTERS_MAX} characters"
                )
            if isinstance(node, dict):
                below += (*node.keys(), *node.values())
                references.update(r for r in (node.get("$ref"),) if isinstance(r, str))
                multiples += _number(node.get("multipleOf"))
                squares += _optional(node) ** 2
            elif isinstance(node, list):
                below += node
        level = below
    if squares > _OPTIONAL_MAX**2:
        raise _refused(
            grammar, f"it has more than {_OPTIONAL_MAX} optional properties; require or remove some"
        )
    if _common_multiple(multiples) > _MULTIPLE_MAX:
        raise _refused(
            grammar,
            f"all its multipleOf, as whole numbers, have a common multiple above {_MULTIPLE_MAX}",
        )
    if depth * (1 + len(references)) > _LEVELS_MAX:
        raise _refused(
            grammar,
            f"{depth} levels and {len(references)} different $ref may nest too deeply; levels times"
            f" references may be {_LEVELS_MAX}",
        )


def _optional(schema: dict[str, Any]) -> int:
    """Return how many properties an object may have or not."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return 0
    return len(properties.keys() - _strings(required))


def _strings(value: Any) -> set[str]:
    return {item for item in value if isinstance(item, str)} if isinstance(value, list) else set()


def _number(value: Any) -> list[Fraction]:
    """Return the exact value of what is written there; nothing if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return []
    return [Fraction(str(value))]


def _common_multiple(values: list[Fraction]) -> int:
    """Return the least one after a shift of the decimal point that makes all of them whole."""
    for places in range(20):
        shifted = [value * 10**places for value in values]
        if all(value.denominator == 1 for value in shifted):
            return math.lcm(*(value.numerator for value in shifted))
    return _MULTIPLE_MAX + 1


def _shortened(message: str) -> str:
    first = message.split("\n<", 1)[0].strip()
    return first[:_MESSAGE_CHARACTERS]


def _refused(grammar: Grammar, reason: str) -> RefusedError:
    return RefusedError(
        ErrorCode.INVALID_REQUEST, f"the grammar ({grammar.kind.value}) cannot be used: {reason}"
    )
