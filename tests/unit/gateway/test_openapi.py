"""The description of the API is valid OpenAPI, says what bodies take, and what errors look like."""

import json
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator

from gateway.bodies.chat import parse_chat_request
from gateway.endpoints.openapi import document
from gateway.server.errors import HttpError, body_of, error_body
from sluice.errors import ErrorCode

DOCUMENT = document()


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", **DOCUMENT})


def test_it_is_openapi_and_can_be_written() -> None:
    from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

    OPENAPI_31_VALIDATOR.validate(DOCUMENT)
    assert json.loads(orjson.dumps(DOCUMENT)) == DOCUMENT
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "embeddings"])
def test_headers_name_the_model_and_release_of_an_answer(path: str) -> None:
    headers = DOCUMENT["paths"][f"/v1/{path}"]["post"]["responses"]["200"]["headers"]
    assert headers.keys() >= {"x-sluice-model", "x-sluice-release"}


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_every_reference_exists() -> None:
    names = {reference.rpartition("/")[2] for reference in references(DOCUMENT["paths"])}
    assert names <= DOCUMENT["components"]["schemas"].keys()


def test_every_code_of_a_generation_is_told_with_its_status() -> None:
    answers = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]
    told = " ".join(answer["description"] for answer in answers.values())
    untold = {ErrorCode.CLIENT_CLOSED, ErrorCode.SLOW_READER}
    untold |= {code for code in ErrorCode if code.policy.status in (409, 412, 422)}
    for code in ErrorCode:
        assert (f"`{code}`" in told) != (code in untold)
    for status in ("429", "503"):
        assert "Retry-After" in answers[status]["headers"]


def test_a_callers_mistake_is_its_own_error_under_any_status() -> None:
    for status in (400, 431, 505):
        body = json.loads(body_of(HttpError(status, "no")))
        assert body["error"]["type"] == "invalid_request_error"
    body = json.loads(error_body(ErrorCode.INTERNAL, "no"))
    assert body["error"]["type"] == "server_error"


def test_the_error_envelope() -> None:
    body = error_body(ErrorCode.INVALID_REQUEST, "no", param="n")
    validator("ErrorEnvelope").validate(json.loads(body))


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"n": 2, "stop": ["a"], "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 3},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
        {"store": False, "modalities": ["text"], "functions": []},
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ],
)
def test_every_accepted_field_is_described(extra: dict[str, object]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | extra
    parse_chat_request(json.dumps(body).encode())
    validator("ChatRequest").validate(body)


@pytest.mark.parametrize("given", ["", ["a", ""]])
def test_an_empty_text_to_embed_is_not_described(given: object) -> None:
    assert not validator("EmbeddingRequest").is_valid({"model": "m", "input": given})
    validator("CompletionRequest").validate({"model": "m", "prompt": given})


@pytest.mark.parametrize(
    "extra",
    [{"made_up": 1}, {"n": 9}, {"verbosity": "x"}, {"messages": []}, {"tool_choice": "maybe"}],
)
def test_no_refused_field_is_described(extra: dict[str, object]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | extra
    assert not validator("ChatRequest").is_valid(body)
