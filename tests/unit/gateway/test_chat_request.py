"""Every parameter is honoured or refused by name; bad bodies are 400s that say what is wrong."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.bodies.chat import parse_chat_request
from sluice.errors import BadRequestError, ErrorCode, PlatformError

GOOD = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def parse(**extra: object):
    return parse_chat_request(json.dumps(GOOD | extra).encode())


def refused(**extra: object) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        parse(**extra)
    return caught.value


def test_the_smallest_request() -> None:
    request = parse()
    assert request.model == "m"
    assert request.stops == []
    assert request.output_tokens_max is None
    assert not request.include_usage


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 1},
        {"n": None},
        {"logprobs": False},
        {"logit_bias": {}},
        {"frequency_penalty": 0, "presence_penalty": 0.0},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "auto"},
        {"service_tier": "auto"},
        {"store": False},
        {"modalities": ["text"]},
        {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k"},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stop": "x"},
        {"stop": ["a", "b", "c", "d"]},
        {"temperature": 2, "top_p": 0, "top_k": -1, "seed": -1},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "42"},
            ]
        },
    ],
)  # fmt: skip
def test_what_is_taken(extra: dict[str, object]) -> None:
    parse(**extra)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"store": True}, "store"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_is_refused_by_name(extra: dict[str, object], param: str) -> None:
    error = refused(**extra)
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, param)
    assert param in error.message


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"made_up": 1}, "made_up"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"seed": 1.5}, "seed"),
        ({"metadata": {str(i): "x" for i in range(20)}}, "metadata"),
    ],
)
def test_what_is_invalid(extra: dict[str, object], param: str) -> None:
    error = refused(**extra)
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, param)
    assert param in error.message


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"\xff", b"[" * 5000, b'{"model": NaN}', b"1e999"]
)
def test_bodies_that_are_no_objects(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_chat_request(body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
names = st.sampled_from(
    ["model", "messages", "stop", "tools", "n", "seed", "stream_options", "metadata", "temperature"]
)


@given(st.dictionaries(names | st.text(max_size=5), json_values, max_size=4))
def test_any_object_is_taken_or_refused_as_a_client_error(extra: dict[str, object]) -> None:
    try:
        parse_chat_request(json.dumps(GOOD | extra).encode())
    except PlatformError as error:
        assert error.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [1] * 300_000}]},
        {"messages": [{"role": "user", "content": "", "tool_calls": [1] * 300_000}]},
        {"stop": [1] * 300_000},
        {"tools": [{"type": "function", "function": dict.fromkeys(map(str, range(100_000)), 1)}]},
        {"metadata": dict.fromkeys(map(str, range(100_000)), 1)},
    ],
    ids=["parts", "tool calls", "stops", "unknown fields", "metadata"],
)
def test_the_number_of_mistakes_in_a_body_does_not_matter(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    with pytest.raises(BadRequestError) as caught:
        parse_chat_request(json.dumps(body).encode())
    found = caught.value.__context__
    assert isinstance(found, ValidationError)
    assert found.error_count() <= 4
