"""The turns of a chat and the tools that a model may call. Pure."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.bodies.fields import Flag, FunctionName, Only, ShortText, Text
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import Strict

MESSAGES_MAX = 4096
PARTS_MAX = 4096  # of one message: texts, or tool calls
TOOLS_MAX = 128


class TextPart(Strict):
    """A piece of content; only text is served."""

    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: Annotated[
        Any, Only(instead="prefixes are cached by themselves, wherever they end")
    ] = None


class RefusalPart(Strict):
    """What the assistant said when it refused."""

    type: Literal["refusal"]
    refusal: Text


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class _Answered(BaseModel):
    """What clients send back as they got it, or as an SDK completed it: other fields do nothing."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class FunctionCall(_Answered):
    """A call as the assistant made it; `arguments` is JSON text."""

    name: ShortText
    arguments: Text = ""


class ToolCall(_Answered):
    """A tool call in the history."""

    id: ShortText = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Answered):
    """One turn.

    Attributes:
        reasoning_content: Of an assistant; templates that know it may show it to the model.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Field(fail_fast=True, max_length=PARTS_MAX)] | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=PARTS_MAX)] | None = None
    tool_call_id: ShortText | None = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(instead="use 'tool_calls'")] = None

    def text(self) -> str:
        """Return the content as one string."""
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(
            part.text if isinstance(part, TextPart) else part.refusal for part in self.content
        )


class FunctionTool(Strict):
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments; enforced when a call is, see `tool_choice`.
    """

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(Strict):
    """A tool; only functions exist."""

    type: Literal["function"]
    function: FunctionTool


class FunctionReference(Strict):
    """A function by its name."""

    name: FunctionName


class NamedChoice(Strict):
    """This function is to be called, once."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTools(Strict):
    """Only these may be called (auto), or one of them must be (required)."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(fail_fast=True, min_length=1, max_length=TOOLS_MAX)]


class AllowedChoice(Strict):
    """A choice among a part of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedChoice | AllowedChoice, Field(discriminator="type")]
)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise BadRequestError when a message lacks what its role needs."""
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            raise bad_value(f"messages[{index}].content", "only an assistant's may be missing")
        if message.role == "tool" and message.tool_call_id is None:
            raise bad_value(f"messages[{index}].tool_call_id", "name the call that it answers")
