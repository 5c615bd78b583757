"""Tests the spaces in constrained JSON."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from replica.engine.grammar_source import grammar_source
from replica.engine.types import Grammar, GrammarKind

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize(
    "grammar",
    [Grammar(GrammarKind.JSON), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))],
    ids=["json", "schema"],
)
@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ('{"name": "Anna", "age": 30}', True),
        ('{"name":"Anna","age":30}', True),
        ('{"name":  "Anna", "age": 30}', False),
        ('{ "name": "Anna", "age": 30}', False),
    ],
    ids=["as models learn it", "compact", "two spaces", "space in front"],
)
def test_json_has_spaces_only_where_models_learn_to_write_them(
    grammar: Grammar, text: str, is_taken: bool
) -> None:
    matcher = LLMatcher(LLTokenizer("byte"), grammar_source(grammar))
    taken = matcher.try_consume_tokens(list(text.encode()))
    assert (taken == len(text) and matcher.is_accepting()) == is_taken


@pytest.mark.parametrize(
    "options", [{"unknown": 1}, {"whitespace_pattern": "~"}, {"lenient": True}], ids=str
)
def test_how_json_is_written_is_not_for_a_schema_to_say(options: dict[str, object]) -> None:
    unknown = {"not": {"type": "null"}} if "lenient" in options else {}
    text = json.dumps(SCHEMA | unknown | {"x-guidance": options})
    source = grammar_source(Grammar(GrammarKind.JSON_SCHEMA, text))
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0)
    assert matcher.is_error() == bool(unknown)
    if not unknown:
        assert matcher.try_consume_tokens(list(b"{~")) == 1
