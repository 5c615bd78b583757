"""Tasks with tools: call the right one with the right arguments, and read what it returned.

A third of the tools is put together from parts, so that the model has to copy names from the
system prompt and cannot know the list by heart.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from training import knowledge, number_tasks, words
from training.chat import tool_call
from training.samples import Message, Sample, Tool

_Value = str | int


@dataclass(frozen=True, slots=True)
class _Function:
    """A callable tool: its parameters with a source of values, and ways to ask for it."""

    name: str
    description: str
    parameters: Mapping[str, Callable[[Random], _Value]]
    requests: tuple[str, ...]


def _city(rng: Random) -> str:
    return rng.choice(words.CITIES)


def _name(rng: Random) -> str:
    return rng.choice(words.NAMES)


def _word(rng: Random) -> str:
    return rng.choice(words.WORDS)


def _phrase(rng: Random) -> str:
    return " ".join(words.copyable_words(rng, 1, 3))


def _number(rng: Random) -> int:
    return rng.randint(0, 99)


_FUNCTIONS: tuple[_Function, ...] = (
    _Function(
        "get_weather", "Get the weather of a city", {"city": _city},
        (
            "What is the weather in {city}?", "Weather in {city}", "Is it raining in {city}?",
            "How is the weather in {city} today?", "Tell me the weather in {city}.",
            "What's the weather like in {city}?",
        ),
    ),
    _Function(
        "get_weather", "Current weather for a place", {"location": _city},
        (
            "What is the weather in {location}?", "Weather in {location}",
            "How warm is it in {location}?", "What's the weather like in {location} today?",
        ),
    ),
    _Function(
        "get_time", "Get the local time of a city", {"city": _city},
        ("What time is it in {city}?", "Tell me the time in {city}.", "Current time in {city}?"),
    ),
    _Function(
        "search", "Search the web", {"query": _phrase},
        ("Search for {query}", "Look up {query}", "Find {query} on the web", "Google {query}"),
    ),
    _Function(
        "add_user", "Create a user", {"name": _name},
        ("Add a user named {name}", "Create user {name}", "Add {name} as a user"),
    ),
    _Function(
        "send_email", "Send a short mail", {"to": _name, "text": _phrase},
        ("Send an email to {to}: {text}", "Email {to} and say {text}", "Mail {to}: {text}"),
    ),
    _Function(
        "set_timer", "Start a timer", {"minutes": _number},
        (
            "Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes",
            "Remind me in {minutes} minutes",
        ),
    ),
    _Function(
        "add", "Add two numbers", {"a": _number, "b": _number},
        ("Add {a} and {b} with the tool.", "Use the tool to add {a} and {b}", "Add {a} and {b}"),
    ),
    _Function(
        "book_train", "Book a seat", {"start": _city, "end": _city},
        ("Book a train from {start} to {end}", "I need a train from {start} to {end}."),
    ),
    _Function(
        "set_temperature", "Heat a room", {"room": _word, "degrees": _number},
        ("Set the {room} to {degrees} degrees", "Heat the {room} to {degrees} degrees."),
    ),
)  # fmt: skip

_VERBS = ("get", "find", "open", "create", "delete", "update", "check", "show", "start", "stop")
_NOUNS = (
    "order", "user", "file", "ticket", "price", "invoice", "room", "job", "report", "account",
    "alarm", "door", "light", "stock", "map", "note",
)  # fmt: skip
_PARAMETERS: dict[str, Callable[[Random], _Value]] = {
    "id": _number,
    "name": _name,
    "city": _city,
    "title": _word,
    "key": _word,
    "number": _number,
}

_COMPOSED_RATIO = 0.35
_TWO_PARAMETERS_RATIO = 0.25
_UNRELATED_RATIO = 0.12
_DESCRIBED_RATIO = 0.5
_OPTIONAL_RATIO = 0.12
_OPTIONS = (
    ("unit", ("celsius", "fahrenheit")),
    ("format", ("short", "long")),
    ("language", ("en", "de", "fr")),
)


def call(rng: Random) -> Sample:
    """Ask for something one of one to three tools does, or sometimes for something else."""
    functions = _some_functions(rng)
    chosen = rng.choice(functions)
    tools = tuple(_definition(rng, function) for function in functions)
    if rng.random() < _UNRELATED_RATIO:
        other = rng.choice((number_tasks.arithmetic, knowledge.faq, knowledge.identity))(rng)
        return Sample("tool call", other.messages, other.answer, tools, other.key)
    values = {name: source(rng) for name, source in chosen.parameters.items()}
    question = rng.choice(chosen.requests).format(**values)
    messages = ({"role": "user", "content": question},)
    return Sample("tool call", messages, tool_call(chosen.name, values), tools)


def result(rng: Random) -> Sample:
    """Give the result of a call; the answer says it in a sentence."""
    city = _city(rng)
    if rng.random() < _WEATHER_RATIO:
        weather = _FUNCTIONS[rng.randrange(2)]
        question = rng.choice(weather.requests).format(city=city, location=city)
        degrees, sky = rng.randint(-9, 39), rng.choice(("sunny", "cloudy", "rainy", "windy"))
        names = rng.choice((("temperature", "sky"), ("degrees", "condition"), ("temp", "weather")))
        content = json.dumps({names[0]: degrees, names[1]: sky})
        answer = f"It is {degrees} degrees and {sky} in {city}."
    else:
        weather = _FUNCTIONS[2]
        question = rng.choice(weather.requests).format(city=city)
        clock = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
        content = json.dumps({"time": clock})
        answer = f"It is {clock} in {city}."
    (parameter,) = weather.parameters
    messages: tuple[Message, ...] = (
        {"role": "user", "content": question},
        _assistant_call(weather.name, {parameter: city}),
        {"role": "tool", "tool_call_id": "call_0", "content": content},
    )
    tools = (_definition(rng, weather),)
    return Sample("tool result", messages, answer, tools, key=f"{question} {content}")


_WEATHER_RATIO = 0.7


def _assistant_call(name: str, arguments: dict[str, Any]) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


def _some_functions(rng: Random) -> list[_Function]:
    """Return one to three functions of different names."""
    by_name: dict[str, _Function] = {}
    for _ in range(rng.choice((1, 1, 2, 3))):
        is_composed = rng.random() < _COMPOSED_RATIO
        function = _composed(rng) if is_composed else rng.choice(_FUNCTIONS)
        by_name.setdefault(function.name, function)
    return list(by_name.values())


def _composed(rng: Random) -> _Function:
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    parameter, other = rng.sample(list(_PARAMETERS), 2)
    if rng.random() < _TWO_PARAMETERS_RATIO:
        return _Function(
            f"{verb}_{noun}",
            f"{verb.capitalize()} {noun}s",
            {name: _PARAMETERS[name] for name in (parameter, other)},
            (
                f"{verb.capitalize()} the {noun} with {parameter} {{{parameter}}} "
                f"and {other} {{{other}}}",
                f"Please {verb} {noun} {{{parameter}}}, {other} {{{other}}}",
            ),
        )
    return _Function(
        f"{verb}_{noun}",
        f"{verb.capitalize()} {noun}s",
        {parameter: _PARAMETERS[parameter]},
        (
            f"{verb.capitalize()} the {noun} with {parameter} {{{parameter}}}",
            f"Please {verb} the {noun} whose {parameter} is {{{parameter}}}",
            f"{verb.capitalize()} {noun} {{{parameter}}}",
        ),
    )


def _definition(rng: Random, function: _Function) -> Tool:
    """Return the OpenAI tool definition, with descriptions or without."""
    properties: dict[str, Any] = {}
    for name, source in function.parameters.items():
        properties[name] = {"type": "integer" if source is _number else "string"}
        if rng.random() < _DESCRIBED_RATIO / 2:
            properties[name]["description"] = f"The {name}"
    required = list(properties)
    if rng.random() < _OPTIONAL_RATIO:  # nothing a question mentions, so no call has it
        name, values = rng.choice(_OPTIONS)
        properties[name] = {"type": "string", "enum": list(values)}
    schema = {"type": "object", "properties": properties, "required": required}
    definition: dict[str, Any] = {"name": function.name}
    if rng.random() < _DESCRIBED_RATIO:
        definition["description"] = function.description
    return {"type": "function", "function": {**definition, "parameters": schema}}
