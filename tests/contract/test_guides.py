"""Guides of the gateway's bodies, as the engine reads them: the largest that pass one pass both."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from gateway.bodies.completions import CompletionRequest, parse_completion_request
from gateway.bodies.schema_keywords import ENFORCED_FORMATS, UNENFORCED, enforceable
from replica.engine.grammar_source import grammar_source
from replica.engine.types import Grammar, GrammarKind, RefusedError
from sluice.errors import BadRequestError
from sluice.wire.engine.v1 import engine_pb2 as engine

KINDS = {
    engine.Grammar.KIND_JSON: GrammarKind.JSON,
    engine.Grammar.KIND_JSON_SCHEMA: GrammarKind.JSON_SCHEMA,
    engine.Grammar.KIND_REGEX: GrammarKind.REGEX,
    engine.Grammar.KIND_CHOICE: GrammarKind.CHOICE,
}
# What one string or property of the largest takes, without its quotes.
CHUNK = 4096


def parsed(**guide: object) -> CompletionRequest:
    return parse_completion_request(json.dumps({"model": "m", "prompt": "x"} | guide).encode())


def schema_format(schema: object) -> dict[str, Any]:
    named = {"name": "a", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range((levels - 1) // 2):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def wide(size: int) -> dict[str, Any]:
    """Return a schema of nearly so many bytes, in one enumeration."""
    texts = [f"{number:04}" + "x" * (CHUNK - 8) for number in range(size // CHUNK)]
    return {"enum": texts}


@pytest.mark.parametrize(
    "guide",
    [
        {"response_format": {"type": "json_object"}},
        schema_format({}),
        schema_format(nested(120)),
        schema_format(wide(65_000)),
        {"regex": "a" * 8_192},
        {"choice": ["a" * CHUNK]},
        {"choice": [f"{number:04}" + "x" * (CHUNK - 8) for number in range(15)]},
        {"choice": ['"', "\\", "a/b", "ü", "%json"]},
    ],
)
def test_the_engine_reads_every_guide_accepted_here(guide: dict[str, Any]) -> None:
    wanted = parsed(**guide).guide
    assert wanted is not None
    assert grammar_source(Grammar(KINDS[wanted.kind], wanted.text))


@pytest.mark.parametrize(
    ("guide", "grammar"),
    [
        (schema_format(wide(80_000)), Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wide(80_000)))),
        ({"regex": "a" * 8_193}, Grammar(GrammarKind.REGEX, "a" * 8_193)),
        ({"regex": ""}, Grammar(GrammarKind.REGEX, "")),
        ({"choice": []}, Grammar(GrammarKind.CHOICE, "[]")),
        ({"choice": [""]}, Grammar(GrammarKind.CHOICE, '[""]')),
        ({"choice": ["a\nb"]}, Grammar(GrammarKind.CHOICE, '["a\\nb"]')),
        ({"choice": ["a" * 5_000]}, Grammar(GrammarKind.CHOICE, json.dumps(["a" * 5_000]))),
    ],
)
def test_the_engine_would_refuse_every_guide_refused_here(
    guide: dict[str, Any], grammar: Grammar
) -> None:
    with pytest.raises(BadRequestError):
        parsed(**guide)
    with pytest.raises(RefusedError):
        grammar_source(grammar)


VALUES: dict[str, Any] = {
    **{keyword: {"type": "string"} for keyword in UNENFORCED},
    "uniqueItems": True,
    "minContains": 1,
    "maxContains": 2,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {},
    **dict.fromkeys(("$dynamicRef", "$dynamicAnchor", "$recursiveRef"), "#x"),
}


def is_known(schema: dict[str, Any]) -> bool:
    """Whether the engine's compiler enforces all of a schema."""
    source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not LLMatcher.validate_grammar_with_warnings(source, None)[0]


@pytest.mark.parametrize("keyword", sorted(UNENFORCED))
def test_keywords_are_left_out_because_the_engine_does_not_know_them(keyword: str) -> None:
    schema = {"type": ["object", "array"], keyword: VALUES[keyword]}
    assert not is_known(schema)
    kept, left_out = enforceable({"properties": {keyword: schema}})
    assert left_out == {keyword}
    assert is_known(kept)
    assert keyword in kept["properties"], "a property may have any name"
    strict = schema_format(schema)
    strict["response_format"]["json_schema"]["strict"] = True
    wanted, free = parsed(**strict).guide, parsed(**schema_format(schema)).guide
    assert wanted is not None
    assert free is not None
    assert keyword in wanted.text, "a strict one is the engine's to refuse"
    assert keyword not in free.text


@pytest.mark.parametrize("name", [*sorted(ENFORCED_FORMATS), "regex", "int32", "uri-template"])
def test_formats_that_the_engine_knows(name: str) -> None:
    assert is_known({"type": "string", "format": name}) == (name in ENFORCED_FORMATS)


def test_constants_are_no_schemas() -> None:
    schema = {"const": {"not": 1}, "enum": [{"if": 2}], "default": {"format": "x"}}
    assert enforceable(schema) == (schema, frozenset())
