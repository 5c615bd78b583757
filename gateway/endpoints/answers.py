"""The shapes of answers, which only the description of the API uses.

Endpoints write answers without these classes. The classes forbid further fields, so that a test
detects fields that the description lacks.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from gateway.pool_status import PoolReadiness
from sluice.limits import METERED_NAMES

Count = Annotated[int, Field(ge=0)]
Logprob = Annotated[float, Field(le=0.001)]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class Shape(BaseModel):
    """A JSON object that has these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Shape):
    """The details of an error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorEnvelope(Shape):
    """The body of every error, and the last event of a stream that failed."""

    error: ErrorDetail


class PromptTokensDetails(Shape):
    """Counts of tokens within `prompt_tokens`."""

    cached_tokens: Count


class CompletionTokensDetails(Shape):
    """Counts of tokens within `completion_tokens`."""

    reasoning_tokens: Count
    accepted_prediction_tokens: Count | None = None
    rejected_prediction_tokens: Count | None = None


class CompletionUsage(Shape):
    """The token counts of one request, summed over its choices."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(Shape):
    """The function that a tool call names. `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(Shape):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ExecutedTool(Shape):
    """A tool call that ran on the server, or an MCP server that failed to list its tools."""

    index: Count
    type: Literal["function", "mcp", "mcp_list_tools"]
    id: str | None = None
    server_label: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
    error: str | None


class ChatCompaction(Shape):
    """An item that clients send instead of all earlier messages except instructions."""

    type: Literal["compaction"]
    id: str
    encrypted_content: str


class AssistantMessage(Shape):
    """The answer of a chat completion."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    compaction: ChatCompaction | None = None
    executed_tools: list[ExecutedTool] | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class TopLogprob(Shape):
    """A token that was possible at a position, with its log probability."""

    token: str
    logprob: Logprob
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A token of the answer, with the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """Log probabilities of all tokens except special tokens. Calls and reasoning are included."""

    content: list[ContentLogprob]
    refusal: None


class FilteredRule(Shape):
    """A tenant's rule that has matched. `filtered` is true if the rule withheld text."""

    id: str
    filtered: bool


class FilteredRules(Shape):
    """The tenant's rules that have matched. `filtered` is true if any rule withheld text."""

    filtered: bool
    details: list[FilteredRule]


class FilterFailure(Shape):
    """The error that is reported if classifiers did not answer."""

    code: Literal["content_filter_error"]
    message: str


class FilterResults(Shape):
    """Matches of the tenant's rules, in the form that Azure uses."""

    custom_blocklists: FilteredRules
    error: FilterFailure | None = None


class PromptFilterResults(Shape):
    """Matches of the tenant's rules in one prompt."""

    prompt_index: Count
    content_filter_results: FilterResults


class UsedBudget(Shape):
    """The budget of server tools whose exhaustion ended an answer."""

    reason: Literal["max_tool_calls", "max_tool_tokens", "max_tool_seconds", "max_tool_cost"]


class ChatChoice(Shape):
    """One answer of a chat completion."""

    index: Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    incomplete_details: UsedBudget | None = None
    content_filter_results: FilterResults | None = None


class _AnswerRun(Shape):
    id: str
    created: Count
    model: str
    system_fingerprint: str
    service_tier: str | None = None
    usage: CompletionUsage
    prompt_filter_results: list[PromptFilterResults] | None = None


class ChatCompletion(_AnswerRun):
    """A whole answer. A stream sends the same data as `chat.completion.chunk` objects."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextLogprobs(Shape):
    """Log probabilities in columns. Each column has one entry per token."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Count]


class TextChoice(Shape):
    """One continuation of a prompt."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    content_filter_results: FilterResults | None = None


class TextCompletion(_AnswerRun):
    """A whole answer. A stream sends `text_completion` objects with pieces of the text."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class EmbeddingItem(Shape):
    """A vector as numbers, or as little-endian float32 in base64."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class EmbeddingUsage(Shape):
    """The token counts of a request. Both counts are equal, because no output tokens exist."""

    prompt_tokens: Count
    total_tokens: Count


class EmbeddingList(Shape):
    """The vectors of all inputs, in their order."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


Score = Annotated[float, Field(ge=-1.001, le=1.001)]


class ModerationResult(Shape):
    """The judgement on one text, by category."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, Score]
    category_applied_input_types: dict[str, list[Literal["text"]]]


class Moderation(Shape):
    """Judgements in the order of the texts, by the classifier `model`."""

    id: str
    model: str
    results: list[ModerationResult]


class LabelScore(Shape):
    """A label, with its score for one text."""

    label: str
    score: Score


class TextLabel(Shape):
    """The best label of one text.

    `probs` and `num_classes` are vLLM's fields. `prediction`, `score` and `predictions` are Jina's.
    """

    object: Literal["classification"]
    index: Count
    label: str
    probs: list[Score]
    num_classes: Count
    prediction: str
    score: Score
    predictions: list[LabelScore]


class Classification(Shape):
    """The best label of each text, in the order of the texts."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[TextLabel]
    usage: EmbeddingUsage


class RankedText(Shape):
    """The text of a document."""

    text: str


class RankedDocument(Shape):
    """A document by its index, with its relevance to the query."""

    index: Count
    relevance_score: Score
    document: RankedText | None = None


class Reranking(Shape):
    """The documents, most relevant first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class Tokens(Shape):
    """Token ids of a prompt. `max_model_len` is the context in tokens, or null if unknown."""

    count: Count
    max_model_len: Count | None
    tokens: list[int]


class TakenFeedback(Shape):
    """An accepted judgement of an answer. It counts only for an answer to the same tenant."""

    object: Literal["feedback"]
    id: str
    rating: Literal["good", "bad"]


class DecodedText(Shape):
    """The text decoded from token ids."""

    prompt: str


_KINDS: dict[str, Any] = dict.fromkeys(METERED_NAMES, (int | None, ...))
_OfEachKind = create_model("_OfEachKind", __base__=Shape, **_KINDS)


class ModelLimits(_OfEachKind):
    """The caller's limits for this model. A limit is null if there is none."""


class Capacity(Shape):
    """The state of a model's pool. The counts are lower bounds, and `wait_ms` is an upper bound."""

    replicas_ready: Count
    queued: Count
    running: Count
    wait_ms: int | None


class ModelCard(Shape):
    """A model, the caller's rights on it, and its present state."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    kind: Literal["chat", "embedding"]
    stands_for: str
    release: str | None
    is_adapter: bool
    context_window: int | None
    readiness: PoolReadiness
    capacity: Capacity
    limits: ModelLimits


class ModelList(Shape):
    """All models that the caller may use."""

    object: Literal["list"]
    data: list[ModelCard]


class Version(Shape):
    """The version of the software of this gateway."""

    version: str


class Status(Shape):
    """The state of the worker."""

    status: str
