"""The body of a chat completion. Pure.

No parameter is dropped silently. A parameter that would have no effect here is refused with status
400 and its name, unless its value means "no change". docs/parameters.md lists all parameters.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gateway.bodies.chat_tools import ChatTools, RegisteredTool
from gateway.bodies.fields import EntriesMax, Flag, Integer, Number, Only, Text
from gateway.bodies.generation import GenerationFields, OutputTokens
from gateway.bodies.guides import schema_text
from gateway.bodies.messages import (
    MESSAGES_MAX,
    PARTS_MAX,
    AllowedChoice,
    Message,
    NamedChoice,
    TextPart,
    Tool,
    ToolChoice,
    check_messages,
    in_order_of_calls,
)
from gateway.bodies.mistakes import bad_value, unsupported
from gateway.bodies.parsing import Strict, parse
from gateway.bodies.server_tools import McpServerTool
from gateway.bodies.summaries import CompactionPolicy, ContextManagement

TOP_LOGPROBS_MAX = 20


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
_OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
TemplateOptions = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")],
        # A string must not be the text of a special token, so only these characters are allowed.
        Flag | Integer | Number | Annotated[str, Field(pattern=r"^[\w. -]{0,64}$")] | None,
    ],
    EntriesMax(16),
]


class PredictionBody(Strict):
    """The answer that the client expects, from which the engine speculates."""

    type: Literal["content"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=PARTS_MAX)]

    @property
    def text(self) -> str:
        """The whole expected text."""
        if isinstance(self.content, str):
            return self.content
        return "".join([part.text for part in self.content])


class ChatRequest(GenerationFields):
    """A chat to be answered. A field whose value is null counts as absent.

    Attributes:
        effort_param: Name in error messages of the body's field for `reasoning_effort`.
        parameters_param: Name in error messages of the body's field for a tool's schema, with a
            placeholder for the tool's index.
    """

    effort_param: ClassVar[str] = "reasoning_effort"
    parameters_param: ClassVar[str] = "tools[{}].function.parameters"

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: OutputTokens | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    tools: ChatTools | None = None
    max_tool_calls: Annotated[Integer, Field(ge=1, le=1 << 30)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    reasoning_effort: Effort | None = None
    functions: Annotated[Any, Only([], instead="use 'tools'")] = None
    function_call: Annotated[Any, Only("none", "auto", instead="use 'tool_choice'")] = None
    audio: Annotated[Any, Only()] = None
    modalities: Annotated[Any, Only(["text"])] = None
    moderation: Annotated[Any, Only()] = None
    prediction: PredictionBody | None = None
    prompt_cache_options: Annotated[
        Any,
        Only({}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"}),
    ] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    store: Flag | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: ContextManagement | None = None
    verbosity: Verbosity | None = None
    chat_template_kwargs: TemplateOptions | None = None
    chat_template: Annotated[Any, Only(instead="the base of a model sets it; leave it out")] = None
    add_generation_prompt: Annotated[Any, Only(True, instead="use /v1/completions")] = None
    continue_final_message: Annotated[Any, Only(False, instead="use /v1/completions")] = None
    echo: Annotated[Any, Only(False)] = None
    web_search_options: Annotated[Any, Only()] = None

    @property
    def output_tokens_max(self) -> int | None:
        """The bound on the tokens of the answer from either of its two fields, or None."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report per token: 0 for only the token itself, None for no report."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def alternatives_param(self) -> str:
        """Name of the body's field for `alternatives`."""
        return "top_logprobs" if self.top_logprobs else "logprobs"

    def prompt_param(self, index: int) -> str:
        """Return the name of the body's field for the prompt."""
        del index  # a chat has only one prompt
        return "messages"

    @property
    def shown_messages(self) -> Sequence[Message]:
        """The messages in the prompt, with results in the order of their calls."""
        return in_order_of_calls(self.messages)

    @property
    def compaction_policy(self) -> CompactionPolicy | None:
        """Condition and model for a summary of the chat, or None for no summary."""
        return self.context_management[0] if self.context_management else None

    @property
    def functions_told(self) -> Sequence[Tool]:
        """The functions for the prompt. Registered tools and MCP servers are not yet looked up."""
        if not self.tools:
            return ()  # the usual case
        return [it for it in self.tools if isinstance(it, Tool)]

    @property
    def server_functions(self) -> Mapping[str, str]:
        """The names of the tenant's registered tools, by the body's fields with the names."""
        return {
            f"tools[{index}].function": it.function.name
            for index, it in enumerate(self.tools or ())
            if isinstance(it, RegisteredTool)
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
    def has_server_tools(self) -> bool:
        """Whether the request names tools that run on the server."""
        return bool(self.tools) and not all(isinstance(it, Tool) for it in self.tools or ())

    @property
    def shown_tools(self) -> Sequence[Tool]:
        """The tools in the prompt."""
        if self.tool_choice == "none":
            return ()
        if isinstance(self.tool_choice, AllowedChoice):
            return self.callable_tools
        return self.functions_told

    @property
    def callable_tools(self) -> Sequence[Tool]:
        """The tools that the model may call."""
        if self.tool_choice == "none" or not self.tools:
            return ()
        names = self._chosen_names()
        return [it for it in self.functions_told if not names or it.function.name in names]

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call of one of `callable_tools`."""
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def is_parallel(self) -> bool:
        """Whether an answer may have several calls, which a function chosen by name excludes."""
        return self.parallel_tool_calls is not False and not isinstance(
            self.tool_choice, NamedChoice
        )

    @property
    def free_schemas(self) -> Sequence[Any]:
        """Schemas that a grammar may enforce only in part, of the answer or of enforced calls."""
        if not self.tools:
            return () if self.must_call else super().free_schemas
        tools = self.callable_tools
        schemas = () if self.must_call else super().free_schemas
        is_held = self.must_call or self.guide is not None
        if not (is_held or any(tool.function.strict for tool in tools)):
            return schemas
        return (
            *schemas,
            *(tool.function.parameters for tool in tools if not tool.function.strict),
        )

    @property
    def template_options(self) -> dict[str, object]:
        """Options of the chat template besides messages and tools."""
        options: dict[str, object] = {}
        if self.reasoning_effort is not None:
            options |= effort_options(self.reasoning_effort)
        if self.verbosity is not None:
            options["verbosity"] = self.verbosity
        if self.chat_template_kwargs is not None:
            options |= self.chat_template_kwargs
        return options

    def check(self) -> None:
        """Raise BadRequestError if messages or tools are not valid, or if fields conflict."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise bad_value("top_logprobs", "it needs 'logprobs': true")
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise bad_value(
                "max_tokens", "it is the old name of 'max_completion_tokens'; send one of them"
            )
        if self.chat_template_kwargs:
            for name in _OWN_NAMES.intersection(self.chat_template_kwargs):
                raise bad_value(f"chat_template_kwargs.{name}", "the server sets it; leave it out")
        check_messages(self.messages)
        if self.has_server_tools:
            self._check_server_tools()
        else:
            self.check_tools()

    def _check_server_tools(self) -> None:
        """Raise BadRequestError if a field excludes tools that run on the server.

        `check_tools` is called later, when the server has looked up these tools.
        """
        if self.choices > 1:
            raise unsupported("n", "with tools that run here there is one answer; leave it out")
        if self.counts_usage:
            text = "with tools that run here the usage comes at the end; leave it out"
            raise unsupported("stream_options.continuous_usage_stats", text)
        labels = [it.server_label for it in self.servers.values()]
        if len(set(labels)) < len(labels):
            raise bad_value("tools", "two servers have the same label; each needs its own")

    def check_tools(self) -> None:
        """Raise BadRequestError if `tool_choice` does not fit the tools."""
        if not self.tools and self.tool_choice in (None, "none", "auto"):
            return
        functions = [tool.function for tool in self.functions_told]
        names = {function.name for function in functions}
        if len(names) < len(functions):
            raise bad_value("tools", "two functions have the same name; each needs its own")
        for index, function in enumerate(functions):
            if function.parameters is not None:
                schema_text(function.parameters, self.parameters_param.format(index))
        if self.must_call and not functions:
            raise bad_value("tool_choice", "it needs 'tools'")
        if unknown := self._chosen_names() - names:
            raise bad_value("tool_choice", f"'{min(unknown)}' is not among 'tools'")

    def _chosen_names(self) -> set[str]:
        choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            return {choice.function.name}
        if isinstance(choice, AllowedChoice):
            return {tool.function.name for tool in choice.allowed_tools.tools}
        return set()


def parse_chat_request(body: bytes) -> ChatRequest:
    """Return the request in `body`, or raise BadRequestError with the name of the wrong field."""
    return parse(ChatRequest, body)


def effort_options(effort: Effort) -> dict[str, object]:
    """Return the options of the chat template that express an effort of reasoning."""
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}
