"""The shape of answers of Anthropic's API, for the description of the API alone; see `answers`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.endpoints.answers import Count, Shape

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]


class AnthropicText(Shape):
    """Text that the model said."""

    type: Literal["text"]
    text: str


class AnthropicThinking(Shape):
    """Text that the model thought; there is no signature to check."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnthropicToolUse(Shape):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(Shape):
    """Token ids, counted; all three of the input are apart from one another."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    service_tier: Literal["standard"]


class AnthropicMessageObject(Shape):
    """A whole message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[
        Annotated[AnthropicText | AnthropicThinking | AnthropicToolUse, Field(discriminator="type")]
    ]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicTokenCount(Shape):
    """The tokens of a message's input."""

    input_tokens: Count


class AnthropicErrorDetail(Shape):
    """The failure; `code` and `param` are this platform's."""

    type: str
    message: str
    code: str
    param: str | None


class AnthropicErrorEnvelope(Shape):
    """The body of every error of the Messages API."""

    type: Literal["error"]
    error: AnthropicErrorDetail
