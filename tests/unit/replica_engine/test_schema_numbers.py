"""Tests that a schema's numbers are compiled exactly, tightened, or refused."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from replica.engine.grammar_numbers import nearest_bound
from replica.engine.grammar_source import grammar_source
from replica.engine.types import Grammar, GrammarKind, RefusedError

TOP = 2**63
KEPT = TOP - 2**10
TOKENIZER = LLTokenizer("byte")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def sources(schema: dict[str, Any]) -> list[Grammar]:
    """Return grammars with a schema: alone, within another schema, and in a rule."""
    inner = {"type": "object", "properties": {"a": {"anyOf": [schema, {"type": "null"}]}}}
    return [
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(inner)),
        Grammar(GrammarKind.EBNF, f"start: %json {json.dumps(schema)}"),
    ]


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar_source(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(TOKENIZER.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        # with a lower bound, the first two would overflow the compiler's stack
        {"type": "integer", "maximum": -TOP},
        {"type": ["integer", "null"], "minimum": -1e300, "exclusiveMaximum": -1e300},
        {"const": -TOP},  # these four would also overflow the stack
        {"type": "integer", "const": -(10**20)},
        {"type": "integer", "enum": [-1e300]},
        {"$ref": "#/properties", "properties": {"const": {"a": -TOP}}},
        {"type": "integer", "minimum": 2**64 + 1},  # the numbers below would become other numbers
        {"type": "integer", "exclusiveMinimum": 1e19},
        {"type": "integer", "exclusiveMinimum": KEPT},
        {"minimum": 1e300},
        {"const": 2**53 + 1},
        {"const": {"id": [-(2**60) - 1]}},
        {"const": {"const": {"minimum": 2**60 + 1}}},
        {"enum": ["a", 1234567890123456789]},
        {"type": "integer", "enum": [10**20]},
        *(
            {"$ref": "#/properties", "properties": {"const": {"type": kind, "minimum": -(2**63)}}}
            for kind in ("string", None, {"type": "string"})
        ),
    ],
    ids=json.dumps,
)
def test_a_number_that_would_not_be_kept_is_refused(schema: dict[str, Any]) -> None:
    for grammar in sources(schema):
        with pytest.raises(RefusedError, match="not kept exactly") as caught:
            grammar_source(grammar)
        assert (caught.value.code, caught.value.param) == ("invalid_request", "grammar")


def test_a_refused_number_is_not_quoted_in_full() -> None:
    for number in (10**4000, -(10**4000)):
        with pytest.raises(RefusedError, match=r"kept exactly: -?10000") as caught:
            grammar_source(sources({"const": number})[0])
        assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "integer", "minimum": 2**53, "maximum": 2**53}, 2**53, 2**53 + 1),
        ({"type": "integer", "minimum": 1 - 2**53, "maximum": 1 - 2**53}, 1 - 2**53, -(2**53)),
        ({"type": "integer", "minimum": 0, "maximum": KEPT}, KEPT, KEPT + 1),
        ({"type": "integer", "minimum": -KEPT, "maximum": 0}, -KEPT, -KEPT - 1),
        # the usual range in generated schemas
        ({"type": "integer", "minimum": -TOP, "maximum": TOP - 1}, KEPT, TOP),
        ({"type": "integer", "minimum": float(-KEPT), "maximum": float(-KEPT)}, -KEPT, 1 - KEPT),
        ({"minimum": float(2**53 - 1)}, 2**53 - 1, 2**53 - 2),
        ({"type": "integer", "minimum": -TOP}, -KEPT, -TOP - 1),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, KEPT, 2**64),
        ({"type": "integer", "maximum": 9999999999999999}, 10**16 - 2, 10**16),
        ({"type": "integer", "maximum": 10**18 - 1}, 10**18 - 128, 10**18),
        ({"type": "integer", "maximum": 2**62 - 1}, 2**62 - 512, 2**62),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": KEPT}, 2**53 + 2, 2**53 + 1),
        ({"type": "integer", "maximum": 2**60}, 2**60, 2**60 + 1),
        ({"type": "integer", "exclusiveMinimum": 2**53, "maximum": 10**17}, 2**53 + 4, 2**53),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, -(2**53) - 4, -(2**53)),
        ({"minimum": -(2**53) - 4, "exclusiveMinimum": True}, -(2**53), -(2**53) - 4),
        ({"type": "number", "minimum": 0.1, "maximum": 0.1}, 0.1, 0.2),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, 0.001, 0),
        ({"type": "number", "exclusiveMinimum": 20000, "maximum": 20000.5}, 20000.25, 20000),
        ({"type": "number", "exclusiveMaximum": -5, "minimum": -5.5}, -5.001, -5),
        ({"type": "number", "exclusiveMinimum": -5, "exclusiveMaximum": 1}, 0.9, 1),
        ({"minimum": 10, "exclusiveMinimum": True, "maximum": 10.5}, 10.001, 10),
        ({"allOf": [{"exclusiveMinimum": 0}, {"type": "integer", "maximum": 1}]}, 1, 0),
        ({"type": "number", "minimum": -1e300, "maximum": 1e300}, 0.5, 2e300),
        ({"type": "number", "maximum": 2**60}, 2**60 - 256, 2**60 + 1),
        ({"properties": {"enum": {"maximum": TOP}}}, {"enum": 5}, {"enum": TOP + 1}),
        ({"$ref": "#/$defs/const", "$defs": {"const": {"maximum": TOP}}}, 5, TOP + 1),
        ({"type": ["string", "null"], "minimum": 2**64}, "a", 1),
        ({"const": 2**53}, 2**53, 2**53 + 1),
        ({"const": 10**16}, 10**16, 10**16 + 1),
        ({"const": float(-KEPT)}, -KEPT, -KEPT - 1),
        ({"const": [{"a": 2**60}]}, [{"a": 2**60}], [{"a": 2**60 + 1}]),
        ({"enum": [True, 1.5, -7, 1e17]}, 10**17, 10**17 + 1),
        ({"type": "integer", "default": 2**70, "examples": [2**70]}, 3, 0.5),
    ],
    ids=str,
)
def test_others_are_kept_or_tightened(schema: dict[str, Any], inside: Any, outside: Any) -> None:
    for grammar in sources(schema)[::2]:
        assert accepts(grammar, json.dumps(inside, separators=(",", ":")))
        assert not accepts(grammar, json.dumps(outside, separators=(",", ":")))


@given(
    value=st.integers(2**53, 2**65) | st.floats(2**53, allow_infinity=False),
    lower=st.booleans(),
    side=st.sampled_from((1, -1)),
    is_open=st.booleans(),
    is_whole=st.booleans(),
)
def test_a_kept_bound_lies_a_little_inside(
    value: float, lower: bool, side: int, is_open: bool, is_whole: bool
) -> None:
    value = -value if lower else value
    kept = nearest_bound(value, side, is_open=is_open, is_whole=is_whole)
    if kept is None:
        assert value * side >= KEPT - 2**11
        return
    assert kept == float(kept)
    assert abs(kept) <= KEPT
    assert kept * side > value * side if is_open else kept * side >= value * side
    assert abs(value) > KEPT or abs(kept - value) <= 2**11


NUMBERS = (
    st.sampled_from([2**53, 2**60, 10**16, 10**18, KEPT, TOP, 10**20, 10**400])
    .flatmap(lambda at: st.integers(at - 3, at + 3))
    .flatmap(lambda at: st.sampled_from([at, -at]))
    | st.integers(-12, 12)
    | st.sampled_from([-1e300, -0.5, 0.25, 3.0, 1e17, 1e300, 1e-7, -0.0])
)
NUMERIC = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["integer", "number", ["integer", "null"]]),
        "multipleOf": st.sampled_from([1, 2, 3, 0.5]),
        "enum": st.lists(NUMBERS, min_size=1, max_size=3),
        "const": NUMBERS,
        **dict.fromkeys(BOUNDS, NUMBERS),
    },
)


@given(parts=st.lists(NUMERIC, min_size=1, max_size=2), others=st.lists(NUMBERS, max_size=6))
def test_nothing_is_let_through_that_the_schema_excludes(
    parts: list[dict[str, Any]], others: list[float]
) -> None:
    schema = parts[0] if len(parts) == 1 else {"allOf": parts}
    try:
        source = grammar_source(sources(schema)[0])
    except RefusedError:
        return
    start = LLMatcher(TOKENIZER, source, log_level=0)
    if start.is_error():  # the grammar excludes every text
        return
    validator = Draft202012Validator(schema)
    named = [it for part in parts for key in (*BOUNDS, "const") for it in [part.get(key, 0)]]
    for number in {*others, *named, *(it + step for it in named for step in (-1, 1) if it == it)}:
        text = json.dumps(number)
        if "e" in text or text.endswith(".0"):
            continue
        matcher = start.deep_copy()
        if matcher.consume_tokens(TOKENIZER.tokenize_str(text)) and matcher.is_accepting():
            try:
                is_valid = validator.is_valid(number)
            except OverflowError:  # the validator converts long integers to floats
                continue
            assert is_valid, (schema, number)


def test_each_part_of_nested_constants_is_looked_at_once() -> None:
    def calls(levels: int) -> int:
        text = '{"enum":' * levels + json.dumps([1] * 2_000) + "}" * levels
        count = 0

        def profile(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(profile)
        try:
            grammar_source(Grammar(GrammarKind.JSON_SCHEMA, text))
        finally:
            sys.setprofile(None)
        return count

    assert calls(100) < 2 * calls(10)
