"""What an answer must look like: one guide at most, within bounds, as the engine takes it."""

import json
from typing import Any

import pytest

from gateway.bodies.chat import parse_chat_request
from gateway.bodies.completions import parse_completion_request
from sluice.errors import BadRequestError, ErrorCode
from sluice.wire.engine.v1 import engine_pb2 as engine

Grammar = engine.Grammar
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def guide(**extra: object) -> Grammar | None:
    return parse_chat_request(json.dumps(CHAT | extra).encode()).guide


def schema_format(schema: object, **extra: object) -> dict[str, object]:
    inner = {"name": "answer", "schema": schema} | extra
    return {"type": "json_schema", "json_schema": inner}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar(kind=Grammar.KIND_JSON)),
        ({"regex": "a|b"}, Grammar(kind=Grammar.KIND_REGEX, text="a|b")),
        ({"choice": ["a", "ü"]}, Grammar(kind=Grammar.KIND_CHOICE, text='["a","ü"]')),
        (
            {"response_format": {"type": "text"}, "regex": "a"},
            Grammar(kind=Grammar.KIND_REGEX, text="a"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
            Grammar(kind=Grammar.KIND_JSON),
        ),
    ],
)
def test_the_engine_gets_the_guide(extra: dict[str, object], expected: Grammar | None) -> None:
    assert guide(**extra) == expected


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "text"}, "regex": "a"}, "regex"),
        ({"choice": ["a"]}, "choice"),
    ],
)
def test_where_a_guide_comes_from(extra: dict[str, object], param: str | None) -> None:
    request = parse_chat_request(json.dumps(CHAT | extra).encode())
    assert request.guide_param == param


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_enforced_in_the_order_of_its_fields(strict: bool | None) -> None:
    wanted = schema_format(SCHEMA, strict=strict, description="an answer")
    found = guide(response_format=wanted)
    assert found is not None
    assert found.kind == Grammar.KIND_JSON_SCHEMA
    assert list(json.loads(found.text)) == list(SCHEMA)
    assert json.loads(found.text) == SCHEMA


def test_references_may_go_round() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    schema = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    assert guide(response_format=schema_format(schema)) is not None


def test_completions_have_guides_too() -> None:
    request = parse_completion_request(b'{"model": "m", "prompt": "x", "choice": ["a"]}')
    assert request.guide == Grammar(kind=Grammar.KIND_CHOICE, text='["a"]')


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"regex": "a", "choice": ["b"]}, "choice"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": schema_format([])}, "response_format.json_schema.schema"),
        ({"response_format": schema_format(True)}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({}, name="a b")}, "response_format.json_schema.name"),
        ({"response_format": schema_format({}, what=1)}, "response_format.json_schema.what"),
        ({"response_format": schema_format(nested(120))}, "response_format.json_schema.schema"),
        ({"response_format": schema_format(nested(900))}, "response_format.json_schema.schema"),
        (
            {"response_format": schema_format({"description": "x" * 70_000})},
            "response_format.json_schema.schema",
        ),
        ({"regex": ""}, "regex"),
        ({"regex": "a" * 9_000}, "regex"),
        ({"regex": "ü" * 5_000}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice[1]"),
        ({"choice": ["a", "b\nc"]}, "choice[1]"),
        ({"choice": ["a" * 5_000]}, "choice[0]"),
        ({"choice": ["a" * 4_000] * 20}, "choice"),
        ({"choice": "ab"}, "choice"),
    ],
)
def test_invalid_guides_are_refused(extra: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        guide(**extra)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)


def test_formats_of_others() -> None:
    with pytest.raises(BadRequestError) as caught:
        guide(response_format={"type": "yaml" * 1000})
    error = caught.value
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "response_format")
    assert "'json_schema'" in error.message
    assert len(error.message) < 300
