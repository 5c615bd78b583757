"""The messages of a chat, and the tools that a model may call. Pure."""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from gateway.bodies.fields import Elsewhere, Flag, FunctionName, Only, ShortText, Text
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import Strict

MESSAGES_MAX = 4096
PARTS_MAX = 4096  # maximum number of texts, or of tool calls, per message
TOOLS_MAX = 128
_NO_ID = ""


class _Part(BaseModel):
    """A piece of content. Unknown fields, such as `cache_control`, are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class TextPart(_Part):
    """A piece of text. Images and audio are refused."""

    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: Annotated[
        Any, Only(instead="prefixes are cached without it; leave it out")
    ] = None


class RefusalPart(_Part):
    """A text in which the assistant refused to answer."""

    type: Literal["refusal"]
    refusal: Text


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
_Parts = Annotated[list[Part], Field(fail_fast=True, max_length=PARTS_MAX)]
_FunctionType = Annotated[
    Literal["function"], Elsewhere("custom", instead="describe it as a function")
]


class _EchoedPart(BaseModel):
    """A part that clients or SDKs send back as they received it. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class FunctionCall(_EchoedPart):
    """The assistant's call of a function. `arguments` is JSON text."""

    name: ShortText
    arguments: Text = ""


class ToolCall(_EchoedPart):
    """A tool call in an earlier message of the assistant."""

    id: ShortText = _NO_ID
    type: _FunctionType = "function"
    function: FunctionCall


class CompactedHistory(_EchoedPart):
    """An encrypted summary, which replaces all messages before the message that contains it."""

    type: Literal["compaction"]
    id: ShortText | None = None
    encrypted_content: Text


class Message(_EchoedPart):
    """A message of a chat.

    Attributes:
        reasoning_content: Reasoning of an assistant. A template that supports reasoning may show it
            to the model.
        compaction: Summary that replaces the messages before this one, or None without a summary.
    """

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        Elsewhere("function", instead="use 'tool', and 'tool_calls' before it"),
    ]
    content: Text | _Parts | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=PARTS_MAX)] | None = None
    tool_call_id: ShortText | None = None
    compaction: CompactedHistory | None = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(instead="use 'tool_calls'")] = None

    def text(self) -> str:
        """Return the content as one string."""
        if not self.content:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(
            part.text if isinstance(part, TextPart) else part.refusal for part in self.content
        )


class FunctionTool(Strict):
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of the arguments. It is enforced if the function is strict, or if
            `tool_choice` forces a call.
    """

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(Strict):
    """A tool in the form of chat completions, which is always a function."""

    type: _FunctionType
    function: FunctionTool
    cache_control: Any = None  # no effect, because all prefixes are cached
    server: Annotated[
        Any,
        Only(False, instead="registered tools run in chat completions and responses"),
        Field(exclude=True),  # templates never see this field
    ] = None


class FunctionReference(Strict):
    """A function by its name."""

    name: FunctionName


class NamedChoice(Strict):
    """A choice by which the model must call the named function, exactly once."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTool(Strict):
    """One of the functions in `AllowedTools`."""

    type: _FunctionType
    function: FunctionReference


class AllowedTools(Strict):
    """The tools that may be called (mode auto), or of which one must be called (required)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, min_length=1, max_length=TOOLS_MAX)]


class AllowedChoice(Strict):
    """A choice that limits calls to some of the request's tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_form(value: Any) -> str:
    """Return the union's tag for a choice. Error paths omit it, so no field has this name."""
    return "an object" if isinstance(value, dict) else "a word"


_ChosenTools = Annotated[NamedChoice | AllowedChoice, Field(discriminator="type")]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[_ChosenTools, Tag("an object")],
    Discriminator(_choice_form),
]


def check_messages(messages: Sequence[Message]) -> None:
    """Raise BadRequestError if a message lacks a field of its role, or has another role's field."""
    calls: set[str | None] = set()  # ids of calls whose results may follow
    for index, message in enumerate(messages):
        has_more = message.tool_calls or message.compaction
        if message.role == "user" and type(message.content) is str and not has_more:
            calls = set()  # the usual case, which needs no further check
            continue
        at = f"messages[{index}]"
        _check_message(at, message)
        if message.role != "tool":
            calls = {call.id for call in message.tool_calls} if message.tool_calls else set()
        elif not calls:
            raise bad_value(
                f"{at}.role", "a result follows the assistant's message that has its call"
            )
        elif message.tool_call_id not in calls and _NO_ID not in calls:
            raise bad_value(f"{at}.tool_call_id", "the message before it has no call with this id")


def in_order_of_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages in which tool results have the order of their calls.

    Most templates omit the calls' ids, so the model matches results to calls by their order.
    """
    if "tool" not in [message.role for message in messages]:
        return messages
    ordered: list[Message] = []
    for is_result, group in groupby(messages, lambda message: message.role == "tool"):
        turns = list(group)
        ordered += _by_call(ordered[-1], turns) if is_result else turns
    return ordered


def _by_call(calling: Message, results: Sequence[Message]) -> list[Message]:
    """Return results in the order of their calls. One without id belongs to the next free call."""
    places: defaultdict[str, deque[int]] = defaultdict(deque)
    for place, call in enumerate(calling.tool_calls or ()):
        places[call.id].append(place)
    placed: list[tuple[int, Message]] = []
    for result in results:
        free = places.get(result.tool_call_id or _NO_ID) or places[_NO_ID]
        placed.append((free.popleft() if len(free) > 1 else free[0], result))
    return [result for _, result in sorted(placed, key=itemgetter(0))]


def _check_message(at: str, message: Message) -> None:
    if message.role != "assistant":
        if message.content is None or message.content == []:
            raise bad_value(
                f"{at}.content", "only a message of the assistant may be without content"
            )
        if message.tool_calls:
            raise bad_value(f"{at}.tool_calls", "only messages of the assistant have calls")
        if message.compaction is not None:
            raise bad_value(f"{at}.compaction", "only messages of the assistant have one")
        parts = () if isinstance(message.content, str) else message.content
        for index, part in enumerate(parts):
            if isinstance(part, RefusalPart):
                raise bad_value(
                    f"{at}.content[{index}]", "only messages of the assistant have refusals"
                )
    elif not _has_content(message):
        raise bad_value(f"{at}.content", "send it: the message has no calls, reasoning or refusal")
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_value(f"{at}.tool_call_id", "name the call that it answers")


def _has_content(message: Message) -> bool:
    """Return whether an assistant's message has content or a field that replaces it.

    A content of null is valid, because the gateway itself sends null if a forced call was cut.
    """
    return (
        "content" in message.model_fields_set
        or message.refusal is not None
        or message.reasoning_content is not None
        or bool(message.tool_calls)
    )
