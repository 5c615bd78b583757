"""Completions: four forms of a prompt, and what only this endpoint has."""

import json

import pytest

from gateway.bodies.completions import CompletionRequest, parse_completion_request
from sluice.errors import BadRequestError, ErrorCode


def parse(prompt: object = "hi", **extra: object) -> CompletionRequest:
    return parse_completion_request(json.dumps({"model": "m", "prompt": prompt} | extra).encode())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts(prompt: object, prompts: object) -> None:
    assert parse(prompt).prompts == prompts


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 60, "n": 2}, "n"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_invalid_bodies_are_refused(extra: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(**extra)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, param)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"echo": True, "logprobs": 0, "stream": True}, "stream"),
        ({"echo": True, "max_tokens": 0, "stream": True}, "stream"),
        ({"echo": True, "prompt": [1], "stream": True}, "echo"),
    ],
)
def test_unsupported_fields_are_refused_by_name(extra: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(**extra)
    assert (caught.value.code, caught.value.param) == (ErrorCode.UNSUPPORTED_PARAMETER, param)


def test_valid_fields_are_accepted() -> None:
    request = parse(n=2, best_of=2, echo=True, suffix=None, logprobs=None, max_tokens=3)
    assert (request.choices, request.echo, request.output_tokens_max) == (2, True, 3)
    assert parse(echo=False, logprobs=0).alternatives == 0
    assert parse(logprobs=5).alternatives == 5
    assert parse().alternatives is None
    assert parse().output_tokens_max == 16


def test_ids_beyond_the_vocabulary() -> None:
    request = parse([[1], [2, 99]])
    request.check_vocabulary(100)
    with pytest.raises(BadRequestError) as caught:
        request.check_vocabulary(99)
    assert caught.value.param == "prompt[1]"
    with pytest.raises(BadRequestError) as caught:
        parse([99]).check_vocabulary(99)
    assert caught.value.param == "prompt"


def test_no_tokens_are_asked_for_with_an_echo_alone() -> None:
    with pytest.raises(BadRequestError) as caught:
        parse(max_tokens=0)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "max_tokens")
    request = parse(max_tokens=0, echo=True, logprobs=1, prompt=[1, 2])
    assert (request.output_tokens_max, request.is_echo_alone) == (1, True)
    assert request.echoed_alternatives == 1
