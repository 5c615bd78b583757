"""What the conformance suite of Open Responses asks for over HTTP, on the whole stack."""

import time
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from gateway.endpoints.response_answers import ResponseObject
from tests.support.response_shapes import events_of

pytestmark = pytest.mark.real

MODEL = "sluice-tiny"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def said(role: str, text: str, **more: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text, **more}


CASES: dict[str, dict[str, Any]] = {
    "a text": {"input": [said("user", "Say hello.")]},
    "a system prompt": {"input": [said("system", "Be brief."), said("user", "Say hello.")]},
    "several turns": {
        "input": [
            said("user", "My name is Ada."),
            said("assistant", "Hello Ada!", phase="final_answer"),
            said("user", "What is my name?"),
        ]
    },
    "a function": {
        "input": [said("user", "What is the weather in Paris?")],
        "tools": [WEATHER],
        "tool_choice": "required",
    },
}


@pytest.fixture
def http(real_stack):
    headers = {"authorization": f"Bearer {real_stack.api_key}"}
    with httpx.Client(base_url=real_stack.base_url, headers=headers, timeout=120) as client:
        yield client


@pytest.mark.parametrize("case", CASES)
def test_a_response_and_its_stream(http, case: str) -> None:
    body = {"model": MODEL, "temperature": 0, "max_output_tokens": 64} | CASES[case]
    whole = http.post("/responses", json=body)
    assert whole.status_code == 200, whole.text
    ResponseObject.model_validate(whole.json())
    events = events_of(http.post("/responses", json=body | {"stream": True}).text)
    kinds = [item["type"] for item in whole.json()["output"]]
    assert [item["type"] for item in events[-1]["response"]["output"]] == kinds
    assert ("function_call" if "tools" in body else "message") in kinds


def test_an_image_is_refused_by_name(http) -> None:
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    body = {"model": MODEL, "input": [{"role": "user", "content": [part]}]}
    error = http.post("/responses", json=body)
    assert (error.status_code, error.json()["error"]["param"]) == (400, "input[0].content[0]")


def test_a_chain_through_the_whole_stack(http, real_client: openai.OpenAI) -> None:
    deadline = time.monotonic() + 60
    while True:  # a gateway that has just started asks whether responses can be kept
        first = real_client.responses.create(model=MODEL, input="My name is Ada.", temperature=0)
        if first.store or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert first.store
    second = real_client.responses.create(
        model=MODEL, input="And now?", previous_response_id=first.id, temperature=0
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    assert real_client.responses.retrieve(second.id).output_text == second.output_text
    real_client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        real_client.responses.retrieve(first.id)


def test_a_schema_is_kept_to(real_client: openai.OpenAI) -> None:
    parsed = real_client.responses.parse(
        model=MODEL,
        input="Return JSON with name and age. Anna is 30 years old.",
        text_format=Person,
        temperature=0,
    )
    assert isinstance(parsed.output_parsed, Person)
