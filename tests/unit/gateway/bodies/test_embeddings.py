"""Embeddings: what may be sent, and what is said about the rest."""

import json

import pytest

from gateway.bodies.embeddings import EmbeddingRequest, parse_embedding_request
from sluice.errors import BadRequestError, ErrorCode


def parse(**fields: object) -> EmbeddingRequest:
    return parse_embedding_request(json.dumps({"model": "m", "input": "hi"} | fields).encode())


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a"] * 2048, ["a"] * 2048),
    ],
)
def test_inputs(given: object, inputs: object) -> None:
    assert parse(input=given).inputs == inputs


def test_how_much_of_a_text_is_kept() -> None:
    assert parse().truncation_tokens(512) == 0
    assert parse(truncate_prompt_tokens=7).truncation_tokens(512) == 7
    assert parse(truncate_prompt_tokens=-1).truncation_tokens(512) == 512


def test_options() -> None:
    request = parse(dimensions=64, encoding_format="base64", user="u")
    assert (request.dimensions, request.encoding_format) == (64, "base64")
    assert parse().encoding_format is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [1, 1.5]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [[1], ["a"]]}, "input[1][0]"),
        ({"input": {"text": "a"}}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"truncate": True}, "truncate"),
    ],
)
def test_invalid_bodies_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(**fields)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)


@pytest.mark.parametrize("missing", ["model", "input"])
def test_missing_fields_are_named(missing: str) -> None:
    body = {"model": "m", "input": "hi"}
    del body[missing]
    with pytest.raises(BadRequestError) as caught:
        parse_embedding_request(json.dumps(body).encode())
    assert caught.value.param == missing
    assert caught.value.message == f"Missing required parameter: '{missing}'."
