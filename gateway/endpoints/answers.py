"""The shapes of answers, only for the description of the API. Endpoints write answers without them.

Further fields are not allowed, so that a test detects fields that the description lacks.
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
    """The parts of the prompt's tokens."""

    cached_tokens: Count


class CompletionTokensDetails(Shape):
    """The parts of the answer's tokens."""

    reasoning_tokens: Count
    accepted_prediction_tokens: Count | None = None
    rejected_prediction_tokens: Count | None = None


class CompletionUsage(Shape):
    """Counts of tokens."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CalledFunction(Shape):
    """A call whose `arguments` are JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(Shape):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ExecutedTool(Shape):
    """A call that ran on the server, with `output` or `error`, or a server that listed no tools."""

    index: Count
    type: Literal["function", "mcp", "mcp_list_tools"]
    id: str | None = None
    server_label: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
    error: str | None


class ChatCompaction(Shape):
    """The item that replaces all messages before an answer, except instructions."""

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
    """An alternative token."""

    token: str
    logprob: Logprob
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """Log probabilities of all tokens but special ones, also of calls and reasoning."""

    content: list[ContentLogprob]
    refusal: None


class FilteredRule(Shape):
    """A rule of the tenant that has matched, and whether it withheld text (`filtered`)."""

    id: str
    filtered: bool


class FilteredRules(Shape):
    """Rules of the tenant."""

    filtered: bool
    details: list[FilteredRule]


class FilterFailure(Shape):
    """The classifiers that did not answer."""

    code: Literal["content_filter_error"]
    message: str


class FilterResults(Shape):
    """Matches of the tenant's rules, in the form that Azure uses."""

    custom_blocklists: FilteredRules
    error: FilterFailure | None = None


class PromptFilterResults(Shape):
    """Matches in one prompt."""

    prompt_index: Count
    content_filter_results: FilterResults


class UsedBudget(Shape):
    """The budget of tools that run on the server, which has ended an answer."""

    reason: Literal["max_tool_calls", "max_tool_tokens", "max_tool_seconds", "max_tool_cost"]


class ChatChoice(Shape):
    """An answer."""

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
    """Log probabilities in columns with one entry per token."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Count]


class TextChoice(Shape):
    """A continuation."""

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
    """Counts of tokens."""

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
    """The score of a label."""

    label: str
    score: Score


class TextLabel(Shape):
    """The label of one text: `label`, `probs` in vLLM's form, `predictions` in Jina's."""

    object: Literal["classification"]
    index: Count
    label: str
    probs: list[Score]
    num_classes: Count
    prediction: str
    score: Score
    predictions: list[LabelScore]


class Classification(Shape):
    """Labels in the order of the texts."""

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
    """Documents, the nearest first."""

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
    """A judgement that was accepted. It counts only for an answer to the same tenant."""

    object: Literal["feedback"]
    id: str
    rating: Literal["good", "bad"]


class DecodedText(Shape):
    """The text of token ids."""

    prompt: str


_KINDS: dict[str, Any] = dict.fromkeys(METERED_NAMES, (int | None, ...))
_OfEachKind = create_model("_OfEachKind", __base__=Shape, **_KINDS)


class ModelLimits(_OfEachKind):
    """The caller's limits for this model. A limit is null if there is none."""


class Capacity(Shape):
    """The capacity of a model's pool, with lower bounds of counts and an upper bound of wait."""

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
    """The release that answers."""

    version: str


class Status(Shape):
    """The state of the worker."""

    status: str
