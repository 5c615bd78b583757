"""LiteLLM as a client of the real engine."""

import asyncio
import json
import os
from collections.abc import Iterator
from types import ModuleType

import pytest

from replica.embedding.package import MODEL_NAME, find_package

pytestmark = [
    pytest.mark.real,
    # Its own classes, read in a way that pydantic is about to give up.
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince211"),
]

COUNT, COUNTED = "Count from 1 to 9", "1, 2, 3, 4, 5, 6, 7, 8, 9"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Its synchronous calls look for a loop, too; without one they would leave one open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(scope="module")
def litellm(loop) -> ModuleType:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or its import fetches one
    import litellm

    litellm.telemetry = False
    return litellm


@pytest.fixture(scope="module")
def options(real_stack) -> dict:
    return {
        "model": "openai/sluice-tiny",
        "api_base": real_stack.base_url,
        "api_key": real_stack.api_key,
        "temperature": 0,
        "max_retries": 0,
        "timeout": 60,
    }


def test_a_completion(litellm, options) -> None:
    answer = litellm.completion(**options, messages=user(COUNT))
    assert answer.choices[0].message.content == COUNTED
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream(litellm, options) -> None:
    chunks = list(
        litellm.completion(
            **options, messages=user(COUNT), stream=True, stream_options={"include_usage": True}
        )
    )
    assert len(chunks) > 5
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == COUNTED
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == COUNTED
    assert whole.usage.completion_tokens > 9


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_and_its_result(litellm, options, choice: str, is_stream: bool) -> None:
    def ask(messages: list, **more) -> object:
        answer = litellm.completion(**options, messages=messages, stream=is_stream, **more)
        whole = litellm.stream_chunk_builder(list(answer)) if is_stream else answer
        return whole.choices[0].message

    messages = user("What is the weather in Paris?")
    asked = ask(messages, tools=[TOOL], tool_choice=choice)
    (call,) = asked.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = '{"temperature": 21, "sky": "sunny"}'
    messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert ask(messages, tools=[TOOL]).content == "It is 21 degrees and sunny in Paris."


def test_a_schema_and_an_extension(litellm, options) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    question = user("Return JSON with name and age. Anna is 30 years old.")
    answer = litellm.completion(**options, messages=question, response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"name": "Anna", "age": 30}
    guided = litellm.completion(
        **options, messages=user("Hello!"), extra_body={"regex": "[0-9]{3}"}
    )
    assert guided.choices[0].message.content.isdecimal()


def test_a_text_completion(litellm, options) -> None:
    asked = {**options, "model": "text-completion-openai/sluice-tiny"}
    answer = litellm.text_completion(**asked, prompt="The river", max_tokens=8, echo=True)
    assert answer.choices[0].text.startswith("The river ")


def test_asynchronous_answers(litellm, options, loop) -> None:
    answer = loop.run_until_complete(litellm.acompletion(**options, messages=user(COUNT)))
    assert answer.choices[0].message.content == COUNTED


def test_refusals_are_exceptions_of_litellm(litellm, options) -> None:
    with pytest.raises(litellm.BadRequestError, match="'n'"):
        litellm.completion(**options, messages=user(COUNT), n=99)
    with pytest.raises(litellm.NotFoundError, match="none"):
        litellm.completion(**{**options, "model": "openai/none"}, messages=user(COUNT))
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**options, "api_key": "sk-sluice-wrong"}, messages=user(COUNT))


@pytest.mark.skipif(not find_package(), reason="the embedding model is not installed")
def test_embeddings(litellm, options) -> None:
    asked = {name: options[name] for name in ("api_base", "api_key", "timeout", "max_retries")}
    found = litellm.embedding(model=f"openai/{MODEL_NAME}", input=["a river", "a gate"], **asked)
    assert [len(entry["embedding"]) for entry in found.data] == [384, 384]
