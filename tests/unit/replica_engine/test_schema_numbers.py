"""Numbers of a schema: the compiler holds them in 64 bits, and dies of some at their end."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from replica.engine.grammar_source import grammar_source
from replica.engine.types import Grammar, GrammarKind, RefusedError

TOP = 2**63


def sources(schema: dict[str, Any]) -> list[Grammar]:
    """Return grammars with a schema: as it is, within another one, in a rule."""
    inner = {"type": "object", "properties": {"a": {"anyOf": [schema, {"type": "null"}]}}}
    return [
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(inner)),
        Grammar(GrammarKind.EBNF, f"start: %json {json.dumps(schema)}"),
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -TOP, "maximum": -TOP},  # these four overflow its stack
        {"type": "integer", "minimum": -TOP - 1, "maximum": -TOP + 1},
        {"type": "integer", "exclusiveMinimum": -1e19, "maximum": 1 - TOP},
        {"type": ["integer", "null"], "minimum": -1e300, "exclusiveMaximum": -1e300},
        {"type": "integer", "minimum": 2**64 + 1},  # the others would become another number
        {"type": "integer", "exclusiveMinimum": 1e19},
        {"type": "integer", "minimum": 2**53 + 1},
        {"type": "integer", "maximum": 2**53 + 3},
        {"const": 2**53 + 1},
        {"const": {"id": [-(2**60)]}},
        {"enum": ["a", 1234567890123456789]},
        {"enum": [float(2**64 + 1)]},  # an integer that somebody read as a float
    ],
    ids=json.dumps,
)
def test_a_number_that_would_not_be_kept_is_refused(schema: dict[str, Any]) -> None:
    for grammar in sources(schema):
        with pytest.raises(RefusedError, match="not kept exactly") as caught:
            grammar_source(grammar)
        assert (caught.value.code, caught.value.param) == ("invalid_request", "grammar")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 2**53, "maximum": 2**53}, str(2**53)),
        ({"type": "integer", "minimum": 1 - 2**53, "maximum": 1 - 2**53}, str(1 - 2**53)),
        ({"type": "integer", "minimum": 0, "maximum": TOP - 1}, str(TOP - 1)),  # as generators do
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, str(TOP - 1)),
        ({"type": "number", "minimum": 0.1, "maximum": 0.1}, "0.1"),
        ({"const": 2**53}, str(2**53)),
        ({"enum": [True, 1.5, -7]}, "-7"),
        ({"type": "integer", "default": 2**70, "examples": [2**70]}, "3"),
    ],
    ids=str,
)
def test_others_are_kept(schema: dict[str, Any], text: str) -> None:
    tokenizer = LLTokenizer("byte")
    for grammar in sources(schema)[::2]:
        matcher = LLMatcher(tokenizer, grammar_source(grammar))
        assert matcher.consume_tokens(tokenizer.tokenize_str(text)), matcher.get_error()
        assert matcher.is_accepting()
