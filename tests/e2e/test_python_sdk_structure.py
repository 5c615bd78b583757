"""The official Python SDK on the real engine: JSON, guides and tools, by the SDK's own helpers."""

import json
import re
from typing import Literal

import openai
import pytest
from openai.types.chat import ParsedChatCompletion
from pydantic import BaseModel, ConfigDict, Field

pytestmark = pytest.mark.real

MODEL = "sluice-tiny"


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


class get_weather(BaseModel):  # noqa: N801 - the class names the function
    """Get the weather of a city"""

    city: str


class get_time(BaseModel):  # noqa: N801 - the class names the function
    """Get the local time of a city"""

    city: str


class get_current_weather(BaseModel):  # noqa: N801 - the class names the function
    """Get the weather of a city"""

    city: Literal["Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def plain_tool(function: type[BaseModel]) -> dict:
    """Return a tool whose schema the model is only told of, not held to."""
    tool = openai.pydantic_function_tool(function)
    tool["function"].pop("strict")
    return tool


WEATHER = openai.pydantic_function_tool(get_weather)
TIME = openai.pydantic_function_tool(get_time)
PERSON = user("Return JSON with name and age. Anna is 30 years old.")
# Nothing in it asks for JSON, so that only a grammar can bring it about.
GREETING = user("Hello!")
PARIS = user("What is the weather in Paris?")


@pytest.fixture
def client(real_client) -> openai.OpenAI:
    return real_client


def asked(client: openai.OpenAI, messages: list, **options) -> ParsedChatCompletion:
    """Return an answer that came whole, once the same was streamed with the same result."""
    options = {"model": MODEL, "messages": messages, "temperature": 0, **options}
    whole = client.chat.completions.parse(**options)
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        assembled = stream.get_final_completion()
    assert said(assembled) == said(whole)
    return whole


def said(answer: ParsedChatCompletion) -> tuple:
    choice = answer.choices[0]
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    return choice.finish_reason, choice.message.content or "", choice.message.parsed, calls


def called(answer: ParsedChatCompletion) -> list[BaseModel]:
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert len({call.id for call in calls}) == len(calls)
    return [call.function.parsed_arguments for call in calls]


def test_a_pydantic_model_comes_back_as_itself(client) -> None:
    answer = asked(client, PERSON, response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Anna", age=30)


def test_a_strict_schema_holds_for_any_question(client) -> None:
    answer = asked(client, GREETING, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_json_object_is_an_object(client) -> None:
    answer = asked(client, PERSON, response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content) == {"name": "Anna", "age": 30}


@pytest.mark.parametrize("n", [1, 3])
def test_every_answer_follows_the_schema(client, n: int) -> None:
    schema = {"name": "person", "strict": True, "schema": Person.model_json_schema()}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=GREETING,
        n=n,
        temperature=1,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    for choice in answer.choices:
        Person.model_validate_json(choice.message.content)


def test_a_regular_expression_guides(client) -> None:
    answer = asked(client, GREETING, extra_body={"regex": "[0-9]{3}-[a-f]{2}"})
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer.choices[0].message.content)


def test_an_answer_is_one_of_the_choices(client) -> None:
    answer = asked(client, user("What is 3 + 4?"), extra_body={"choice": ["thirteen", "seven"]})
    assert answer.choices[0].message.content in ("thirteen", "seven")


@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "loose"])
def test_the_model_calls_a_tool_by_itself(client, is_strict: bool) -> None:
    tool = WEATHER if is_strict else plain_tool(get_weather)
    options = {"model": MODEL, "messages": PARIS, "temperature": 0, "tools": [tool]}
    (call,) = client.chat.completions.create(**options).choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_with_tools_at_hand_it_still_talks(client) -> None:
    answer = asked(client, user("Who are you?"), tools=[WEATHER, TIME])
    assert "Sluice Tiny" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert not answer.choices[0].message.tool_calls


def test_a_call_that_is_required_is_made(client) -> None:
    (call,) = called(asked(client, GREETING, tools=[WEATHER, TIME], tool_choice="required"))
    assert isinstance(call, get_weather | get_time)


def test_a_call_of_the_named_function_is_made(client) -> None:
    choice = {"type": "function", "function": {"name": "get_time"}}
    (call,) = called(asked(client, PARIS, tools=[WEATHER, TIME], tool_choice=choice))
    assert call == get_time(city="Paris")


def test_tools_beside_a_format_give_a_call_or_an_answer_in_the_format(client) -> None:
    together = {"tools": [WEATHER, TIME], "response_format": Person}
    assert called(asked(client, PARIS, **together)) == [get_weather(city="Paris")]
    told = asked(client, GREETING, **together).choices[0].message
    assert bool(told.tool_calls) != isinstance(told.parsed, Person), "one of both, as it likes"
    told = asked(client, PERSON, tool_choice="none", **together).choices[0].message
    assert told.parsed == Person(name="Anna", age=30)
    (call,) = called(asked(client, GREETING, tool_choice="required", **together))
    assert isinstance(call, get_weather | get_time)


def test_only_the_allowed_tools_are_called(client) -> None:
    allowed = {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": "get_time"}}],
    }
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    (call,) = called(asked(client, PARIS, tools=[WEATHER, TIME], tool_choice=choice))
    assert call == get_time(city="Paris")


def test_no_tool_is_called_when_none_may_be(client) -> None:
    answer = asked(client, PARIS, tools=[WEATHER], tool_choice="none")
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_one_call_at_most_without_parallel_calls(client, choice: str) -> None:
    answer = asked(
        client, PARIS, tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False
    )
    assert called(answer) == [get_weather(city="Paris")]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_tool_has_the_names_and_values_of_its_schema(client, choice: str) -> None:
    tool = openai.pydantic_function_tool(get_current_weather)
    (call,) = called(asked(client, PARIS, tools=[tool], tool_choice=choice))
    assert isinstance(call, get_current_weather)
    assert call.city == "Paris"


def test_several_answers_with_calls_of_their_own(client) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=PARIS, temperature=0, n=2, tools=[WEATHER], tool_choice="required"
    ) as stream:
        answer = stream.get_final_completion()
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert [call.function.parsed_arguments for call in calls] == [get_weather(city="Paris")] * 2
    assert calls[0].id != calls[1].id


def test_the_events_of_the_sdk_follow_a_call_as_it_is_written(client) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=PARIS, temperature=0, tools=[WEATHER], tool_choice="required"
    ) as stream:
        events = list(stream)
    deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    (done,) = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert len(deltas) > 1
    assert "".join(delta.arguments_delta for delta in deltas) == done.arguments
    assert done.name == "get_weather"
    assert done.parsed_arguments == get_weather(city="Paris")
