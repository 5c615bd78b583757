"""The shapes of answers of Anthropic's API, which only the description of the API uses."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.endpoints.answers import Count, Shape

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]


class AnthropicText(Shape):
    """Text of the model."""

    type: Literal["text"]
    text: str


class AnthropicThinking(Shape):
    """Reasoning of the model. Its `signature` is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnthropicToolUse(Shape):
    """A tool call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class AnthropicUsage(Shape):
    """Counts of tokens. The three counts of the input do not overlap."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    service_tier: Literal["standard"]


class AnthropicMessageObject(Shape):
    """A whole answer, which Anthropic's API calls a message."""

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
    """The number of input tokens of a message."""

    input_tokens: Count


class AnthropicErrorDetail(Shape):
    """The error. This platform adds `code` and `param` to Anthropic's fields."""

    type: str
    message: str
    code: str
    param: str | None


class AnthropicErrorEnvelope(Shape):
    """The body of every error of the Messages API."""

    type: Literal["error"]
    error: AnthropicErrorDetail
