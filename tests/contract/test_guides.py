"""Guides of the gateway's bodies, as the engine reads them: the largest that pass one pass both."""

import json
from typing import Any

import pytest

from gateway.bodies.completions import CompletionRequest, parse_completion_request
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
def test_what_passes_here_the_engine_reads(guide: dict[str, Any]) -> None:
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
def test_what_is_refused_here_the_engine_would_refuse(
    guide: dict[str, Any], grammar: Grammar
) -> None:
    with pytest.raises(BadRequestError):
        parsed(**guide)
    with pytest.raises(RefusedError):
        grammar_source(grammar)
