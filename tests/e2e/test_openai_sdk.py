"""What an application developer sees, through the official SDK, on the whole stack."""

import httpx
import openai
import pytest

pytestmark = pytest.mark.real

MODEL = "sluice-tiny"
MESSAGES = [{"role": "user", "content": "Tell me a story about a river and a gate."}]
TOOL = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def client(stack):
    with openai.OpenAI(
        base_url=stack.base_url, api_key=stack.api_key, max_retries=0, timeout=60
    ) as client:
        yield client


def test_a_plain_completion_has_text_usage_and_a_reason(client) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.completion_tokens <= 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_brings_the_same_text_in_pieces_and_the_usage_when_asked(client) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    plain = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({c.id for c in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens == 24
    assert len(text) > 0
    assert sum(1 for c in chunks if c.choices and c.choices[0].delta.content) > 1


def test_models_lists_the_default_model(client) -> None:
    assert MODEL in {model.id for model in client.models.list()}
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_wrong_key_is_401(stack) -> None:
    client = openai.OpenAI(base_url=stack.base_url, api_key="sk-sluice-wrong", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.code == "invalid_api_key"


def test_an_unknown_model_is_404(client) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


def test_a_prompt_over_the_context_is_400_with_the_numbers(client) -> None:
    messages = [{"role": "user", "content": "river and gate " * 4000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages)
    assert caught.value.code == "context_length_exceeded"
    assert "4096" in caught.value.message


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{not json", 400),
        (b"[1, 2]", 400),
        (b'{"model": "sluice-tiny"}', 400),
        (b'{"model": "sluice-tiny", "messages": []}', 400),
        (b'{"a":' * 2000 + b"1" + b"}" * 2000, 400),
        (b'{"model": "sluice-tiny", "x": "' + b"y" * (5 << 20) + b'"}', 413),
    ],
    ids=["malformed", "no object", "no messages", "empty messages", "deep", "oversized"],
)
def test_bad_bodies_get_the_openai_envelope(stack, body: bytes, status: int) -> None:
    response = httpx.post(
        f"{stack.base_url}/chat/completions",
        content=body,
        headers={"authorization": f"Bearer {stack.api_key}", "content-type": "application/json"},
        timeout=60,
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]


def test_a_parameter_that_is_not_served_is_named_not_dropped(client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, web_search_options={})
    assert caught.value.param == "web_search_options"
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("presence_penalty", {"presence_penalty": 1}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("min_tokens", {"extra_body": {"min_tokens": 2}}),
        ("logprobs", {"logprobs": True}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("tools", {"tools": [TOOL], "tool_choice": "required"}),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_parameters_unsupported_by_this_engine_are_named(
    client, param: str, options: dict, is_stream
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=3, stream=is_stream, **options
        )
    assert (caught.value.code, caught.value.param) == ("engine_refused", param)


def test_a_stop_string_ends_the_text_before_it(client) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    cut = client.chat.completions.create(**options, stop=stop)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == whole[: whole.index(stop)]


async def test_many_streams_at_once_all_end(stack) -> None:
    client = openai.AsyncOpenAI(base_url=stack.base_url, api_key=stack.api_key, max_retries=0)

    async def one(index: int) -> int:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Count to {index}."}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
        return usage.completion_tokens

    import asyncio

    async with client:
        counts = await asyncio.gather(*(one(i) for i in range(64)))
    assert counts == [20] * 64
