"""The body of Anthropic's Messages API, and its translation into a chat completion. Pure.

A field that would have no effect here is refused with status 400. `turns` returns the messages of
the equivalent chat completion, and `chat_fields` returns its other fields.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.bodies.anthropic_blocks import Messages, TextBlocks, text_of, turns_of
from gateway.bodies.chat import Effort, TemplateOptions, effort_options
from gateway.bodies.fields import (
    Elsewhere,
    Flag,
    FunctionName,
    Integer,
    ModelName,
    Number,
    Only,
    ShortText,
    Text,
)
from gateway.bodies.generation import OutputTokens, Share, StopText
from gateway.bodies.guides import JsonSchema, JsonSchemaFormat, ResponseFormat, schema_text
from gateway.bodies.messages import (
    TOOLS_MAX,
    FunctionReference,
    FunctionTool,
    Message,
    NamedChoice,
    Tool,
    ToolChoice,
)
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import Body, Strict
from sluice.deadlines import DEADLINE_MS_MAX

STOPS_MAX = 16
_SCHEMA_NAME = "answer"
# Coding agents send this edit, which removes nothing.
_KEEPS_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}


class AnthropicTool(Strict):
    """A function that the model may call. Tools that Anthropic's servers run are refused."""

    type: Annotated[
        Literal["custom"] | None,
        Elsewhere(
            *("web_search_20250305", "web_fetch_20250910", "code_execution_20250825"),
            *("bash_20250124", "text_editor_20250728", "computer_20250124", "memory_20250818"),
            instead="describe it with an 'input_schema', and run it in the application",
        ),
    ] = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: Flag | None = None
    cache_control: Any = None  # accepted without effect, because all prefixes are cached
    # Accepted without effect, because arguments are always streamed.
    eager_input_streaming: Flag | None = None
    input_examples: Annotated[Any, Only([], instead="put examples into 'description'")] = None
    defer_loading: Annotated[Any, Only(False)] = None
    allowed_callers: Annotated[Any, Only(["direct"])] = None


class AnthropicToolChoice(Strict):
    """Whether the model may call functions, must call some function, or must call a named one."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: Flag | None = None


class Thinking(Strict):
    """Whether the model reasons before it answers. `budget_tokens` is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Integer, Field(ge=1, le=1 << 30)] | None = None
    display: Annotated[Any, Only("summarized", instead="thinking is always returned in full")] = (
        None
    )


class AnswerSchema(Strict):
    """A required JSON schema of the answer."""

    type: Literal["json_schema"]
    content: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """Effort and format of the answer."""

    effort: Effort | None = None
    format: AnswerSchema | None = None
    task_budget: Annotated[Any, Only()] = None


class CallerMetadata(Strict):
    """The caller's id of the end user."""

    user_id: ShortText | None = None


class _ChatBody(Body):
    """The fields that answering a message and counting its tokens have in common."""

    model: ModelName
    messages: Messages
    system: Text | TextBlocks | None = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True, max_length=TOOLS_MAX)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None  # accepted without effect, because all prefixes are cached
    context_management: Annotated[Any, Only({}, {"edits": []}, {"edits": [_KEEPS_THINKING]})] = None
    mcp_servers: Annotated[Any, Only([], instead="call them from the application")] = None
    chat_template_kwargs: TemplateOptions | None = None

    @cached_property
    def turns(self) -> list[Message]:
        """The turns of the equivalent chat, the system prompt first.

        Raises:
            BadRequestError: The order of the messages is wrong.
        """
        turns = turns_of(self.messages)
        if self.system:
            system = Message.model_construct(role="system", content=text_of(self.system))
            turns.insert(0, system)
        return turns

    @property
    def chat_tools(self) -> list[Tool] | None:
        """The tools in the form of a chat completion."""
        return [_tool(tool) for tool in self.tools] if self.tools else None

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """The tools that the prompt contains, which are none if `tool_choice` forbids calls."""
        is_told = self.tool_choice is None or self.tool_choice.type != "none"
        return (self.chat_tools or ()) if is_told else ()

    @property
    def template_options(self) -> TemplateOptions | None:
        """Options of the chat template from `thinking`, overridden by `chat_template_kwargs`."""
        if self.thinking is None:
            return self.chat_template_kwargs
        thinks: TemplateOptions = {"enable_thinking": self.thinking.type != "disabled"}
        return thinks | (self.chat_template_kwargs or {})

    def check(self) -> None:
        """Raise BadRequestError if the turns, the choice of tools or the schema are not valid."""
        choice = self.tool_choice
        if choice is not None and (choice.name is None) == (choice.type == "tool"):
            raise bad_value("tool_choice.name", 'send it with "type": "tool" only')
        form = None if self.output_config is None else self.output_config.format
        if form is not None:
            schema_text(form.content, "output_config.format.schema")
        _ = self.turns  # raises the errors here, before any use of the turns


class CountTokensRequest(_ChatBody):
    """A message whose input tokens are counted instead of answered."""

    @property
    def counted_options(self) -> dict[str, object]:
        """Options of the template with the effort, which a chat completion derives itself."""
        effort = None if self.output_config is None else self.output_config.effort
        told = {} if effort is None else effort_options(effort)
        return told | (self.template_options or {})


class AnthropicRequest(_ChatBody):
    """A message to be answered. A field whose value is null counts as absent."""

    max_tokens: OutputTokens
    stream: Flag | None = None
    stop_sequences: (
        Annotated[list[StopText], Field(fail_fast=True, max_length=STOPS_MAX)] | None
    ) = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[Integer, Field(ge=0, le=1 << 20)] | None = None
    metadata: CallerMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Annotated[Any, Only()] = None
    inference_geo: Annotated[Any, Only()] = None
    speed: Annotated[Any, Only("standard")] = None
    diagnostics: Annotated[Any, Only()] = None
    user_profile_id: Annotated[Any, Only(instead="use 'metadata.user_id'")] = None
    workspace_id: Annotated[Any, Only(instead="a key belongs to one tenant; leave it out")] = None
    # Extensions of Anthropic's API, with the same meaning as in chat completions.
    seed: Annotated[Integer, Field(ge=-(1 << 63), le=(1 << 64) - 1)] | None = None
    session_id: ShortText | None = None
    priority: Annotated[Integer, Field(gt=-4, le=0)] | None = None
    deadline_ms: Annotated[Integer, Field(ge=1, le=DEADLINE_MS_MAX)] | None = None

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat completion, without the messages."""
        config, metadata = self.output_config or OutputConfig(), self.metadata
        choice = self.tool_choice
        same = {name: getattr(self, name) for name in _SAME}
        is_single = choice is not None and choice.disable_parallel_tool_use
        return same | {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tools": self.chat_tools,
            "tool_choice": _choice(choice),
            "parallel_tool_calls": False if is_single else None,
            "response_format": None if config.format is None else _format(config.format),
            "reasoning_effort": config.effort,
            "chat_template_kwargs": self.template_options,
            "safety_identifier": None if metadata is None else metadata.user_id,
        }


_SAME = (
    *("model", "stream", "temperature", "top_p", "top_k"),
    *("seed", "session_id", "priority", "deadline_ms"),
)


def _tool(tool: AnthropicTool) -> Tool:
    function = FunctionTool.model_construct(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool.model_construct(type="function", function=function)


def _choice(choice: AnthropicToolChoice | None) -> ToolChoice | None:
    match choice:
        case None:
            return None
        case AnthropicToolChoice(type="any"):
            return "required"
        case AnthropicToolChoice(type="tool", name=str(name)):
            return NamedChoice(type="function", function=FunctionReference(name=name))
        case _:
            return "none" if choice.type == "none" else "auto"


def _format(form: AnswerSchema) -> ResponseFormat:
    schema = JsonSchema.model_validate(
        {"name": _SCHEMA_NAME, "schema": form.content, "strict": None}
    )
    return JsonSchemaFormat(type="json_schema", json_schema=schema)
