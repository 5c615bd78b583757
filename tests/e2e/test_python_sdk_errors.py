"""Refusals as the exceptions of the official Python SDK, with what a caller needs to go on."""

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

pytestmark = pytest.mark.real

MODEL = "sluice-tiny"
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "get_time"}}


def with_key(client: openai.OpenAI, key: str, **options) -> openai.OpenAI:
    """Return a client with a key that was made now, once the gateway knows it."""
    other = client.with_options(api_key=key, **options)
    for _ in range(1000):
        try:
            other.models.list()
        except openai.AuthenticationError:
            time.sleep(0.05)
        else:
            return other
    pytest.fail("the gateway never knew the key")


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("temperature", {"temperature": 3}),
        ("n", {"n": 99}),
        ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
        ("logit_bias", {"logit_bias": {"999999": 1}}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("max_completion_tokens", {"max_tokens": openai.omit, "max_completion_tokens": 0}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "x"}}}),
        ("tools", {"tools": [TOOL, TOOL]}),
        ("web_search_options", {"web_search_options": {}}),
        ("no_such_thing", {"extra_body": {"no_such_thing": 1}}),
        ("regex", {"extra_body": {"regex": "(never closed"}}),
        (
            "response_format",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "no type"}},
                }
            },
        ),
        (
            "response_format",  # of which the grammar's compiler would die, and the engine with it
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)},
                    },
                }
            },
        ),
        (
            "tools",
            {
                "tools": [
                    {
                        **TOOL,
                        "function": {
                            "name": "x",
                            "parameters": {"properties": {"a": {"type": "no type"}}},
                        },
                    }
                ],
                "tool_choice": "required",
            },
        ),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_invalid_parameters_are_named(real_client, param: str, options: dict, is_stream) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        real_client.chat.completions.create(**{**ASK, **options}, stream=is_stream)
    error = caught.value
    assert error.param == param
    assert error.type == "invalid_request_error"
    assert error.code in ("invalid_request", "unsupported_parameter")
    assert "replica" not in error.message
    assert error.request_id


def test_a_missing_model_is_not_found(real_client) -> None:
    for call in (
        lambda: real_client.models.retrieve("none"),
        lambda: real_client.chat.completions.create(**{**ASK, "model": "none"}),
        lambda: real_client.completions.create(model="none", prompt="a"),
        lambda: real_client.embeddings.create(model="none", input="a"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found"


def test_a_model_that_a_key_may_not_use_is_as_good_as_missing(real_stack, real_client) -> None:
    key = real_stack.new_key("e2e-one-model", models=["sluice-tiny-pirate"])
    client = with_key(real_client, key)
    assert [model.id for model in client.models.list()] == ["sluice-tiny-pirate"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**ASK)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**ASK, "model": "none"})
    assert caught.value.body == {
        **missing.value.body,
        "message": missing.value.body["message"].replace("'none'", f"'{MODEL}'"),
    }


def test_a_key_is_for_its_scopes_alone(real_stack, real_client) -> None:
    key = real_stack.new_key("e2e-scopes", scopes=["models", "completions"])
    client = with_key(real_client, key)
    assert client.completions.create(model=MODEL, prompt="The", max_tokens=1).choices
    with pytest.raises(openai.PermissionDeniedError) as caught:
        client.chat.completions.create(**ASK)
    assert caught.value.code == "permission_denied"


def test_a_caller_over_a_limit_gets_the_retry_time_and_the_sdk_keeps_it(
    real_stack, real_client
) -> None:
    key = real_stack.new_key("e2e-limits", tier={"rpm": 30})  # one more every two seconds
    client = with_key(real_client, key)

    def ask_until_refused() -> None:
        for _ in range(200):
            client.chat.completions.create(**ASK)

    with pytest.raises(openai.RateLimitError) as caught:
        ask_until_refused()
    headers = caught.value.response.headers
    assert caught.value.code == "rate_limit_requests"
    assert headers["x-ratelimit-limit-requests"] == "30"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert int(headers["retry-after"]) >= 1

    patient = client.with_options(max_retries=5).chat.completions.with_raw_response
    answers = [patient.create(**ASK) for _ in range(4)]
    assert sum(answer.retries_taken for answer in answers) >= 1


def test_a_caller_with_too_many_open_requests_is_refused_until_one_ends(
    real_stack, real_client
) -> None:
    key = real_stack.new_key("e2e-concurrency", tier={"requests_max": 1})
    client = with_key(real_client, key)
    endless = {**ASK, "max_tokens": 3000, "stream": True, "extra_body": {"ignore_eos": True}}
    patient = client.with_options(max_retries=5)
    with patient.chat.completions.create(**endless) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**ASK)
    assert caught.value.code == "rate_limit_concurrency"
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert patient.chat.completions.create(**ASK).choices


def test_a_deadline_that_cannot_be_met_is_refused_with_the_time_to_come_again(real_client) -> None:
    def ask(number: int) -> openai.InternalServerError | None:
        messages = [{"role": "user", "content": f"{number} " + "river and gate " * 500}]
        impatient = {"messages": messages, "extra_body": {"deadline_ms": 1}}
        try:
            real_client.chat.completions.create(**{**ASK, **impatient})
        except openai.InternalServerError as error:
            return error
        return None

    with ThreadPoolExecutor(16) as pool:
        refused = [error for error in pool.map(ask, range(16)) if error is not None]
    assert refused
    for error in refused:
        assert error.status_code == 503
        assert error.code in ("deadline_exceeded", "overloaded")
        assert int(error.response.headers["retry-after"]) >= 1


def test_a_wrong_key_is_no_key(real_client) -> None:
    client = real_client.with_options(api_key="sk-sluice-wrong")
    with pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(**ASK)
    assert caught.value.code == "invalid_api_key"
