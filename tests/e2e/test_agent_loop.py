"""An agent: the model asks for tools, gets what they return, and answers; several times over."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

pytestmark = pytest.mark.real

MODEL = "sluice-tiny"
ROUNDS_MAX = 4
WEATHER = {
    "Paris": {"temperature": 21, "sky": "sunny"},
    "Rome": {"temperature": 33, "sky": "windy"},
    "Oslo": {"temperature": -5, "sky": "cloudy"},
}


def get_weather(city: str) -> dict:
    return WEATHER[city]


def get_time(city: str) -> dict:
    return {"time": {"Paris": "12:30", "Rome": "12:31", "Oslo": "09:05"}[city]}


FUNCTIONS = {function.__name__: function for function in (get_weather, get_time)}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    for name, description in (
        ("get_weather", "Get the weather of a city"),
        ("get_time", "Get the local time of a city"),
    )
]


class Agent:
    """A chat with tools; `calls` are those that the model has made."""

    def __init__(self, client: openai.OpenAI, *, is_stream: bool) -> None:
        self._client = client
        self._is_stream = is_stream
        self._messages: list = []
        self.calls: list[tuple[str, dict]] = []
        self.cached_tokens = 0

    def ask(self, question: str) -> str:
        """Return the answer, after as many rounds of calls as it takes."""
        self._messages.append({"role": "user", "content": question})
        for _ in range(ROUNDS_MAX):
            message = self._next()
            self._messages.append(message)  # as the SDK has it, unused fields and all
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments)
                self.calls.append((call.function.name, arguments))
                result = json.dumps(FUNCTIONS[call.function.name](**arguments))
                self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        pytest.fail(f"no answer: {self._messages}")

    def _next(self) -> ChatCompletionMessage:
        options = {
            "model": MODEL,
            "messages": self._messages,
            "tools": TOOLS,
            "temperature": 0,
            "max_tokens": 200,
            "extra_body": {"session_id": "agent"},
        }
        if self._is_stream:
            options["stream_options"] = {"include_usage": True}
            with self._client.chat.completions.stream(**options) as stream:
                answer = stream.get_final_completion()
        else:
            answer = self._client.chat.completions.create(**options)
        self.cached_tokens += answer.usage.prompt_tokens_details.cached_tokens
        return answer.choices[0].message


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_calls_its_tools_and_reports_their_results(real_client, is_stream) -> None:
    agent = Agent(real_client, is_stream=is_stream)
    assert agent.ask("What is the weather in Paris?") == "It is 21 degrees and sunny in Paris."
    assert agent.ask("What time is it in Oslo?") == "It is 09:05 in Oslo."
    assert agent.ask("What is the weather in Rome?") == "It is 33 degrees and windy in Rome."
    assert agent.calls == [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {"city": "Oslo"}),
        ("get_weather", {"city": "Rome"}),
    ]
    assert agent.cached_tokens > 0


def test_agents_at_once_do_not_mix(real_client) -> None:
    def run(number: int) -> tuple:
        agent = Agent(real_client, is_stream=number % 2 == 0)
        city = list(WEATHER)[number % len(WEATHER)]
        return city, agent.ask(f"What is the weather in {city}?"), agent.calls

    with ThreadPoolExecutor(12) as pool:
        for city, answer, calls in pool.map(run, range(24)):
            weather = WEATHER[city]
            assert (
                answer == f"It is {weather['temperature']} degrees and {weather['sky']} in {city}."
            )
            assert calls == [("get_weather", {"city": city})]
