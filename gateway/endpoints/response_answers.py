"""The shapes of responses, which only the description of the API uses.

Fields that clients of the Responses API never expect to be null are never null here.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.endpoints.answers import ContentLogprob, Count, Shape

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ToolWord = Literal["none", "auto", "required"]


class OutputTextPart(Shape):
    """Text of the model."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ContentLogprob]


class ReasoningTextPart(Shape):
    """Reasoning of the model."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Shape):
    """A message of the model."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputTextPart]


class OutputReasoning(Shape):
    """The model's whole reasoning."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningTextPart]


class OutputCall(Shape):
    """A tool call of the model, whose `arguments` are JSON text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ListedTool(Shape):
    """A tool that a server lists."""

    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: None


class OutputToolList(Shape):
    """The tools of an MCP server."""

    id: str
    type: Literal["mcp_list_tools"]
    server_label: str
    tools: list[ListedTool]
    error: str | None


class OutputServerCall(Shape):
    """A call of a tool that ran on the server."""

    id: str
    type: Literal["mcp_call"]
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    server_label: str
    name: str
    arguments: str
    output: str | None
    error: str | None
    approval_request_id: str | None


class OutputApprovalRequest(Shape):
    """A call that waits for the caller's approval."""

    id: str
    type: Literal["mcp_approval_request"]
    server_label: str
    name: str
    arguments: str


class OutputCompaction(Shape):
    """An item that replaces all items before it, and that only the server can read."""

    id: str
    type: Literal["compaction"]
    status: ItemStatus
    encrypted_content: str


OutputItem = Annotated[
    OutputMessage
    | OutputReasoning
    | OutputCall
    | OutputToolList
    | OutputServerCall
    | OutputApprovalRequest
    | OutputCompaction,
    Field(discriminator="type"),
]


class InputTokensDetails(Shape):
    """Counts of tokens within `input_tokens`."""

    cached_tokens: Count


class OutputTokensDetails(Shape):
    """Counts of tokens within `output_tokens`."""

    reasoning_tokens: Count


class ResponseUsage(Shape):
    """The token counts of one response."""

    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class ResponseFailure(Shape):
    """The reason of a failure."""

    code: str
    message: str


class IncompleteDetails(Shape):
    """The reason why a response is incomplete."""

    reason: str


class ReasoningTold(Shape):
    """The requested effort of reasoning."""

    effort: str | None
    summary: str | None


class TextTold(Shape):
    """The requested form of the answer's text."""

    format: dict[str, Any]
    verbosity: str | None = None


class FunctionTold(Shape):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    server: bool | None = None


class ServerTold(Shape):
    """An MCP server whose tools the model may call. `headers` is null, as headers may be secret."""

    type: Literal["mcp"]
    server_label: str
    server_url: str | None
    server_description: str | None
    allowed_tools: list[str] | dict[str, Any] | None
    require_approval: str | dict[str, Any] | None
    headers: None


class ConversationTold(Shape):
    """The conversation that a response belongs to."""

    id: str


class ResponseObject(Shape):
    """A response. A stream sends its pieces as events, and the whole object at begin and end."""

    id: str
    object: Literal["response"]
    created_at: Count
    completed_at: Count | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    incomplete_details: IncompleteDetails | None
    error: ResponseFailure | None
    model: str
    previous_response_id: str | None
    conversation: ConversationTold | None = None
    instructions: str | None
    output: list[OutputItem]
    tools: list[Annotated[FunctionTold | ServerTold, Field(discriminator="type")]]
    tool_choice: ToolWord | dict[str, Any]
    truncation: Literal["auto", "disabled"]
    dropped_turns: Count | None = None
    parallel_tool_calls: bool
    text: TextTold
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: Count
    reasoning: ReasoningTold
    usage: ResponseUsage | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None
    user: str | None


class CompactedConversation(Shape):
    """A conversation that was summarized."""

    id: str
    object: Literal["response.compaction"]
    created_at: Count
    output: list[OutputCompaction]
    usage: ResponseUsage


class InputItemList(Shape):
    """One page of the items of a turn."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Shape):
    """A deleted response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(Shape):
    """The number of input tokens that a response would be charged for."""

    object: Literal["response.input_tokens"]
    input_tokens: Count


class ConversationObject(Shape):
    """A conversation, whose items are listed separately."""

    id: str
    object: Literal["conversation"]
    created_at: Count
    metadata: dict[str, str]


class DeletedConversation(Shape):
    """A deleted conversation."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]
