"""Tokenize and detokenize: a text or a chat, and ids."""

import json

import pytest

from gateway.bodies.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    parse_detokenize_request,
    parse_tokenize_request,
)
from sluice.errors import BadRequestError

CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def tokenize(**fields: object) -> TokenizeRequest:
    return parse_tokenize_request(json.dumps({"model": "m"} | fields).encode())


def detokenize(tokens: object) -> DetokenizeRequest:
    return parse_detokenize_request(json.dumps({"model": "m", "tokens": tokens}).encode())


def test_a_text_or_a_chat() -> None:
    assert tokenize(prompt="").prompt == ""
    assert tokenize(prompt="a", add_special_tokens=False).add_special_tokens is False
    chat = tokenize(messages=CHAT, tools=TOOLS)
    assert chat.messages is not None
    assert [tool.function.name for tool in chat.shown_tools] == ["f"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": CHAT}, "prompt"),
        ({"prompt": "a", "tools": TOOLS}, "tools"),
        ({"prompt": ["a"]}, "prompt"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "temperature": 1}, "temperature"),
    ],
)
def test_invalid_bodies_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        tokenize(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("tokens", "param"),
    [([], "tokens"), ([1, "a"], "tokens[1]"), ("a", "tokens"), ([1, -1], "tokens[1]")],
)
def test_ids_that_are_none(tokens: object, param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        detokenize(tokens)
    assert caught.value.param == param


def test_ids_beyond_the_vocabulary() -> None:
    request = detokenize([3, 99])
    request.check_vocabulary(100)
    with pytest.raises(BadRequestError) as caught:
        request.check_vocabulary(99)
    assert caught.value.param == "tokens"
