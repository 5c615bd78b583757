"""The body of the Responses API, and its translation into a chat completion. Pure.

A field that would have no effect here is refused with status 400. `chat_fields` returns all fields
of the equivalent chat completion except the messages.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from gateway.bodies.chat import TOP_LOGPROBS_MAX, Effort, TemplateOptions, Verbosity
from gateway.bodies.fields import (
    Elsewhere,
    Flag,
    FunctionName,
    Integer,
    Metadata,
    ModelName,
    Number,
    Only,
    ShortText,
    Text,
)
from gateway.bodies.generation import OutputTokens, Penalty, Share
from gateway.bodies.guides import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    TextFormat,
    schema_text,
)
from gateway.bodies.messages import (
    TOOLS_MAX,
    AllowedChoice,
    AllowedTool,
    AllowedTools,
    FunctionReference,
    FunctionTool,
    NamedChoice,
    Tool,
    ToolChoice,
)
from gateway.bodies.mistakes import bad_value
from gateway.bodies.parsing import Body, Strict
from gateway.bodies.response_items import InputItem, InputItems, MessageItem
from gateway.bodies.server_tools import McpServerTool
from gateway.bodies.summaries import CompactionPolicy, ContextManagement
from sluice.deadlines import DEADLINE_MS_MAX
from sluice.errors import BadRequestError, ErrorCode

LOGPROBS = "message.output_text.logprobs"
_INCLUDES_MAX = 8
# Types of tools that run only at OpenAI.
_TOOLS_ELSEWHERE = (
    *("custom", "web_search", "web_search_preview", "file_search", "code_interpreter"),
    *("image_generation", "computer", "computer_use_preview", "local_shell", "shell"),
    *("apply_patch", "namespace", "tool_search"),
)
_INCLUDES_ELSEWHERE = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url"),
    "code_interpreter_call.outputs",
)


class SchemaFormat(Strict):
    """Format of an answer that is JSON and matches a schema. See `JsonSchema` for the fields."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    content: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Flag | None = None


class TextConfig(Strict):
    """Format and verbosity of the answer's text."""

    format: Annotated[
        TextFormat | JsonObjectFormat | SchemaFormat | None, Field(discriminator="type")
    ] = None
    verbosity: Verbosity | None = None


class ReasoningConfig(Strict):
    """The effort of reasoning. The answer contains the reasoning in full, as a separate item."""

    effort: Effort | None = None
    summary: Annotated[
        Any, Only("auto", instead="reasoning is returned in full, without a summary")
    ] = None
    generate_summary: Annotated[Any, Only("auto", instead="use 'summary'")] = None
    context: Annotated[Any, Only("auto")] = None
    mode: Annotated[Any, Only("standard")] = None


class ResponseFunction(Strict):
    """A function that the model may call."""

    type: Annotated[
        Literal["function"],
        Elsewhere(
            *_TOOLS_ELSEWHERE, instead="describe it as a function, and run it in the application"
        ),
    ]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    allowed_callers: Annotated[Any, Only(["direct"])] = None
    defer_loading: Annotated[Any, Only(False)] = None
    output_schema: Annotated[Any, Only()] = None
    server: Flag | None = None


def _tool_form(value: Any) -> str:
    """Return the form of a tool."""
    if isinstance(value, dict):
        kind: object = value.get("type")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    else:
        kind = getattr(value, "type", None)
    return "a server" if kind == "mcp" else "a function"


ResponseTool = Annotated[
    Annotated[ResponseFunction, Tag("a function")] | Annotated[McpServerTool, Tag("a server")],
    Discriminator(_tool_form),
]


class ChosenFunction(Strict):
    """A function that must be called once. Within `AllowedFunctions`, it may be called."""

    type: Annotated[
        Literal["function"], Elsewhere(*_TOOLS_ELSEWHERE, "mcp", instead="name a function")
    ]
    name: FunctionName


class AllowedFunctions(Strict):
    """The functions that may be called (mode auto), or of which one must be called (required)."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[
        list[ChosenFunction], Field(fail_fast=True, min_length=1, max_length=TOOLS_MAX)
    ]


class ConversationName(Strict):
    """The conversation that a response belongs to."""

    id: ShortText


def _choice_form(value: Any) -> str:
    """Return the union's tag for a choice. Error paths omit it, so no field has this name."""
    if not isinstance(value, dict):
        return "a word"
    kind: object = value.get("type")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return "some functions" if kind == "allowed_tools" else "a function"


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[ChosenFunction, Tag("a function")]
    | Annotated[AllowedFunctions, Tag("some functions")],
    Discriminator(_choice_form),
]
_Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
INCLUDABLE: tuple[str, ...] = get_args(_Includable)
Include = Annotated[
    _Includable,
    Elsewhere(*_INCLUDES_ELSEWHERE, instead="no tool has such output here; leave it out"),
]


ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]


class ResponsesStreamOptions(Strict):
    """Options of a stream, which may only have their neutral values."""

    include_obfuscation: Annotated[Any, Only(False)] = None


class ResponseRequest(Body):
    """A response to be generated. A field whose value is null counts as absent."""

    model: ModelName
    input: Text | InputItems | None = None
    instructions: Text | None = None
    stream: Flag | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: OutputTokens | None = None
    max_tool_calls: Annotated[Integer, Field(ge=1, le=1 << 30)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=TOOLS_MAX)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[Include], Field(fail_fast=True, max_length=_INCLUDES_MAX)] | None = None
    metadata: Metadata | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    service_tier: ServiceTier | None = None
    store: Flag | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: Flag | None = None
    previous_response_id: ShortText | None = None
    conversation: ShortText | ConversationName | None = None
    context_management: ContextManagement | None = None
    prompt: Annotated[Any, Only(instead="send its text as 'instructions' and 'input'")] = None
    moderation: Annotated[Any, Only()] = None
    image: Annotated[Any, Only()] = None
    access_programs: Annotated[Any, Only()] = None
    prompt_cache_options: Annotated[
        Any,
        Only({}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"}),
    ] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    # Extensions of OpenAI's API, with the same meaning as in chat completions.
    seed: Annotated[Integer, Field(ge=-(1 << 63), le=(1 << 64) - 1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    ignore_eos: Flag | None = None
    session_id: ShortText | None = None
    priority: Annotated[Integer, Field(gt=-4, le=0)] | None = None
    deadline_ms: Annotated[Integer, Field(ge=1, le=DEADLINE_MS_MAX)] | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def conversation_id(self) -> str | None:
        """Id of the conversation that the response belongs to, or None."""
        name = self.conversation
        return name.id if isinstance(name, ConversationName) else name

    @property
    def items(self) -> Sequence[InputItem]:
        """The input as a list of items, even if it is one text."""
        return _items_of(self.input)

    @property
    def compaction_policy(self) -> CompactionPolicy | None:
        """Condition and model for a summary of the conversation, or None for no summary."""
        return self.context_management[0] if self.context_management else None

    @property
    def functions(self) -> Sequence[ResponseFunction]:
        """The functions that the client runs."""
        tools = self.tools or ()
        return [it for it in tools if isinstance(it, ResponseFunction) and not it.server]

    @property
    def server_functions(self) -> Mapping[str, str]:
        """The names of functions that run on the server, by the body's fields with the names."""
        return {
            f"tools[{index}]": it.name
            for index, it in enumerate(self.tools or ())
            if isinstance(it, ResponseFunction) and it.server
        }

    @property
    def servers(self) -> Mapping[str, McpServerTool]:
        """The MCP servers, by the body's fields that describe them."""
        return {
            f"tools[{index}]": it
            for index, it in enumerate(self.tools or ())
            if isinstance(it, McpServerTool)
        }

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer shows log probabilities."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raise BadRequestError if the input is empty, or if fields exclude each other."""
        if self.input is None:
            text = "Missing required parameter: 'input'."
            raise BadRequestError(ErrorCode.INVALID_REQUEST, text, param="input")
        if not self.items:
            raise bad_value("input", "it has no items; send at least one")
        if self.stream_options is not None and not self.stream:
            raise bad_value("stream_options", "it needs 'stream': true")
        if self.background and self.store is False:
            raise bad_value("store", "a response in the background is stored: leave 'store' out")
        if self.conversation is not None:
            if self.previous_response_id is not None:
                text = "a response continues a conversation or a response: leave one of them out"
                raise bad_value("conversation", text)
            if self.store is False:
                raise bad_value(
                    "store", "responses of a conversation are stored; leave 'store' out"
                )
        self._check_server_tools()
        form = None if self.text is None else self.text.format
        if isinstance(form, SchemaFormat) and form.content is not None:
            schema_text(form.content, "text.format.schema")

    def _check_server_tools(self) -> None:
        labels = [it.server_label for it in self.servers.values()]
        if len(set(labels)) < len(labels):
            raise bad_value("tools", "two servers have the same label; each needs its own")
        for index, it in enumerate(self.tools or ()):
            if isinstance(it, ResponseFunction) and it.server and (it.parameters or it.description):
                text = "the registration sets it: leave it out"
                name = "parameters" if it.parameters else "description"
                raise bad_value(f"tools[{index}].{name}", text)

    def chat_fields(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat completion, without the messages."""
        text, reasoning = self.text or TextConfig(), self.reasoning or ReasoningConfig()
        same = {name: getattr(self, name) for name in _SAME}
        return same | {
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs or None,
            "tools": [_tool(tool) for tool in self.functions] or None,
            "tool_choice": _tool_choice(self.tool_choice),
            "response_format": _response_format(text),
            "verbosity": text.verbosity,
            "reasoning_effort": reasoning.effort,
        }


class InputTokensRequest(ResponseRequest):
    """A response whose input tokens are counted instead of answered."""


class CompactRequest(Body):
    """A conversation to be summarized."""

    model: ModelName
    input: Text | InputItems | None = None
    instructions: Text | None = None
    previous_response_id: ShortText | None = None
    service_tier: ServiceTier | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: Annotated[Any, Only({}, {"mode": "implicit"})] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    image: Annotated[Any, Only()] = None

    @property
    def conversation_id(self) -> str | None:
        """Always None, because a compaction names no conversation."""
        return None

    @property
    def items(self) -> Sequence[InputItem]:
        """The input as a list of items, even if it is one text."""
        return _items_of(self.input)

    def check(self) -> None:
        """Raise BadRequestError if there is nothing to summarize."""
        if not self.items and self.previous_response_id is None:
            text = "Missing required parameter: 'input', or 'previous_response_id'."
            raise BadRequestError(ErrorCode.INVALID_REQUEST, text, param="input")


_SAME = (
    *("model", "stream", "temperature", "top_p", "top_logprobs", "presence_penalty"),
    *("frequency_penalty", "parallel_tool_calls", "metadata", "user", "safety_identifier"),
    *("prompt_cache_key", "service_tier", "seed", "top_k", "min_p", "repetition_penalty"),
    *("truncation", "ignore_eos", "session_id", "priority", "deadline_ms", "chat_template_kwargs"),
)


def _items_of(given: str | Sequence[InputItem] | None) -> Sequence[InputItem]:
    if isinstance(given, str):
        return (MessageItem(role="user", content=given),)
    return given or ()


def _tool(tool: ResponseFunction) -> Tool:
    function = FunctionTool.model_construct(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool.model_construct(type="function", function=function)


def _tool_choice(choice: ResponseToolChoice | None) -> ToolChoice | None:
    match choice:
        case ChosenFunction(name=name):
            return NamedChoice(type="function", function=FunctionReference(name=name))
        case AllowedFunctions(mode=mode, tools=tools):
            allowed = [
                AllowedTool(type="function", function=FunctionReference(name=tool.name))
                for tool in tools
            ]
            return AllowedChoice(
                type="allowed_tools", allowed_tools=AllowedTools(mode=mode, tools=allowed)
            )
        case _:
            return choice


def _response_format(text: TextConfig) -> ResponseFormat | None:
    form = text.format
    if not isinstance(form, SchemaFormat):
        return form
    schema = JsonSchema.model_validate(
        {"name": form.name, "schema": form.content, "strict": form.strict}
    )
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


def echo_of(request: ResponseRequest) -> Mapping[str, object]:
    """Return the request's fields in the form in which each answer repeats them."""
    text, reasoning = request.text or TextConfig(), request.reasoning or ReasoningConfig()
    form = {"type": "text"} if text.format is None else _format_fields(text.format)
    told_text: dict[str, object] = {"format": form}
    if text.verbosity is not None:
        told_text["verbosity"] = text.verbosity
    choice = request.tool_choice
    conversation = request.conversation_id
    told = {} if conversation is None else {"conversation": {"id": conversation}}
    return told | {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "text": told_text,
        "tool_choice": choice if isinstance(choice, str) else _choice_fields(choice),
        "tools": [_tool_fields(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation or "disabled",
        "user": request.user,
        "previous_response_id": request.previous_response_id,
        "background": bool(request.background),
    }


def _format_fields(form: TextFormat | JsonObjectFormat | SchemaFormat) -> dict[str, Any]:
    if not isinstance(form, SchemaFormat):
        return {"type": form.type}
    return {
        "type": "json_schema",
        "name": form.name,
        "description": form.description,
        "schema": form.content or {"type": "object"},
        "strict": bool(form.strict),
    }


def _choice_fields(choice: ChosenFunction | AllowedFunctions | None) -> object:
    return "auto" if choice is None else choice.model_dump()


def _tool_fields(tool: ResponseFunction | McpServerTool) -> dict[str, Any]:
    if isinstance(tool, McpServerTool):
        return tool.public_fields()
    told: dict[str, Any] = {"server": True} if tool.server else {}
    return told | {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
