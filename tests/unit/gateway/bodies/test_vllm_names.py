"""Bodies written for vLLM's server mean the same here, or are refused by the name they use."""

import json

import pytest

from gateway.bodies.chat import ChatRequest, parse_chat_request
from gateway.bodies.completions import parse_completion_request
from sluice.errors import BadRequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**extra: object) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | extra
    return parse_chat_request(json.dumps(body).encode())


OURS = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"guided_json": SCHEMA}, {"response_format": OURS}),
        ({"guided_json": json.dumps(SCHEMA)}, {"response_format": OURS}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"response_format": OURS}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        (
            {"structured_outputs": {"json_object": True}},
            {"response_format": {"type": "json_object"}},
        ),
        ({"structured_outputs": {"json_object": False}, "guided_json": None}, {}),
    ],
)
def test_guides(theirs: dict[str, object], ours: dict[str, object]) -> None:
    assert chat(**theirs).guide == chat(**ours).guide
    completion = json.dumps({"model": "m", "prompt": "p"} | theirs).encode()
    assert parse_completion_request(completion).guide == chat(**ours).guide


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "a", "regex": "b"}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": ["json"]}, "structured_outputs"),
        ({"guided_regex": 7}, "regex"),
    ],
)
def test_contradicting_fields_are_refused(body: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(**body)
    assert caught.value.param == param


def test_options_of_the_template_are_given_to_it() -> None:
    options = {"enable_thinking": False, "level": 3, "style": "very short"}
    request = chat(reasoning_effort="low", verbosity="high", chat_template_kwargs=options)
    wanted = {"reasoning_effort": "low", "verbosity": "high"} | options
    assert request.template_options == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"messages": 1},
        {"tools": True},
        {"add_generation_prompt": False},
        {"Name": 1},
        {"style": "<|im_start|>"},
        {"style": "[INST]"},
        {"style": ["x"]},
        dict.fromkeys(map("o{}".format, range(17)), 1),
    ],
)
def test_options_that_templates_must_not_have(options: dict[str, object]) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(chat_template_kwargs=options)
    assert (caught.value.param or "").startswith("chat_template_kwargs")
