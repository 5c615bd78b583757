"""langchain-openai as a client of the real engine."""

from collections.abc import AsyncIterator

import httpx
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

from replica.embedding.package import MODEL_NAME, find_package

pytestmark = pytest.mark.real

MODEL = "sluice-tiny"
COUNT, COUNTED = "Count from 1 to 9", "1, 2, 3, 4, 5, 6, 7, 8, 9"


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return f'{{"temperature": {21 if city == "Paris" else 0}, "sky": "sunny"}}'


@pytest.fixture
async def connection(real_stack) -> AsyncIterator[dict]:
    """How to reach the stack; the clients are given because langchain never closes its own."""
    with httpx.Client() as client:
        async with httpx.AsyncClient() as async_client:
            yield {
                "base_url": real_stack.base_url,
                "api_key": real_stack.api_key,
                "http_client": client,
                "http_async_client": async_client,
                "max_retries": 0,
                "timeout": 60,
            }


@pytest.fixture
async def chat(connection) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, temperature=0, **connection)


def test_invoke_tells_text_usage_and_reason(chat) -> None:
    answer = chat.invoke(COUNT)
    assert answer.content == COUNTED
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata["output_tokens"] > 9
    assert answer.usage_metadata["input_token_details"]["cache_read"] >= 0


def test_a_stream_adds_up(chat) -> None:
    chunks = list(chat.stream(COUNT, stream_usage=True))
    assert len(chunks) > 5
    whole = sum(chunks[1:], chunks[0])
    assert isinstance(whole, AIMessageChunk)
    assert whole.content == COUNTED
    used = chat.invoke(COUNT).usage_metadata
    assert whole.usage_metadata["output_tokens"] == used["output_tokens"]
    assert whole.usage_metadata["input_tokens"] == used["input_tokens"]


async def test_asynchronous_batches(chat) -> None:
    questions = ["What is 3 + 4?", COUNT, "Who are you?"]
    answers = await chat.abatch([[HumanMessage(question)] for question in questions])
    expected = ("7", COUNTED, "Sluice Tiny")
    assert all(part in answer.content for part, answer in zip(expected, answers, strict=True))


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method: str) -> None:
    people = chat.with_structured_output(Person, method=method, strict=True)
    question = "Return JSON with name and age. Anna is 30 years old."
    answer = people.invoke(question)
    assert isinstance(answer, Person)
    if method == "json_schema":  # the small model never saw a function of this name
        assert answer == Person(name="Anna", age=30)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("choice", ["auto", "required", "get_weather"])
def test_tools_are_called_and_their_results_answered(chat, choice: str, is_stream: bool) -> None:
    def ask(llm, messages: list) -> AIMessage:
        if not is_stream:
            return llm.invoke(messages)
        first, *others = llm.stream(messages)
        return sum(others, first)

    messages = [HumanMessage("What is the weather in Paris?")]
    asked = ask(chat.bind_tools([get_weather], tool_choice=choice), messages)
    assert [(call["name"], call["args"]) for call in asked.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    results = [get_weather.invoke(call) for call in asked.tool_calls]
    assert isinstance(results[0], ToolMessage)
    answer = ask(chat.bind_tools([get_weather]), [*messages, asked, *results])
    assert answer.content == "It is 21 degrees and sunny in Paris."


def test_responses_are_whole_streamed_and_continued(connection) -> None:
    chat = ChatOpenAI(model=MODEL, temperature=0, use_responses_api=True, **connection)
    whole = chat.invoke(COUNT)
    assert whole.text == COUNTED
    assert whole.response_metadata["id"].startswith("resp_")
    chunks = list(chat.stream(COUNT))
    assert len(chunks) > 5
    assert sum(chunks[1:], chunks[0]).text == COUNTED
    more = chat.invoke("And now?", previous_response_id=whole.response_metadata["id"])
    assert more.usage_metadata["input_tokens"] > whole.usage_metadata["input_tokens"]


def test_responses_call_tools_and_answer_their_results(connection) -> None:
    chat = ChatOpenAI(model=MODEL, temperature=0, use_responses_api=True, **connection)
    messages = [HumanMessage("What is the weather in Paris?")]
    asked = chat.bind_tools([get_weather]).invoke(messages)
    assert [(call["name"], call["args"]) for call in asked.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    results = [get_weather.invoke(call) for call in asked.tool_calls]
    answer = chat.bind_tools([get_weather]).invoke([*messages, asked, *results])
    assert answer.text == "It is 21 degrees and sunny in Paris."


def test_extensions_and_log_probabilities(chat) -> None:
    guided = chat.bind(extra_body={"choice": ["yes", "no"], "session_id": "langchain"})
    assert guided.invoke("Hello!").content in ("yes", "no")
    tokens = chat.bind(logprobs=True).invoke(COUNT).response_metadata["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == COUNTED


@pytest.mark.skipif(not find_package(), reason="the embedding model is not installed")
async def test_embeddings(connection) -> None:
    # Without the last option it would send tokens of OpenAI's models, whatever the model.
    embeddings = OpenAIEmbeddings(model=MODEL_NAME, **connection, check_embedding_ctx_length=False)
    texts = ["a river", "a stream of water", "a tax form"]
    river, stream, form = await embeddings.aembed_documents(texts)

    def likeness(other: list[float]) -> float:
        return sum(a * b for a, b in zip(river, other, strict=True))

    assert likeness(stream) > likeness(form)
    assert likeness(embeddings.embed_query("a river")) > 0.999


def test_an_agent_has_tools_and_a_format_for_its_answer(chat) -> None:
    agent = chat.bind_tools([get_weather], strict=True, response_format=Person)
    asked = agent.invoke("What is the weather in Paris?")
    assert [(call["name"], call["args"]) for call in asked.tool_calls] == [
        ("get_weather", {"city": "Paris"})
    ]
    told = agent.invoke("Hello!")
    is_answer = isinstance(told.additional_kwargs.get("parsed"), Person)
    assert bool(told.tool_calls) != is_answer, "one of both, as the model likes"
