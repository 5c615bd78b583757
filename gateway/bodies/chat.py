"""The body of a chat completion: what is honoured, and a clear 400 for everything else. Pure.

Nothing is dropped silently: a parameter that has no effect here is refused with its name, unless
it has the value that means "nothing special".
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from sluice.errors import BadRequestError, ErrorCode

BODY_BYTES_MAX = 4 << 20
MESSAGES_MAX = 4096
PARTS_MAX = 4096  # of one message: texts, or tool calls
STOPS_MAX = 4
_METADATA_MAX = 16
_FIELDS_MAX = 64  # of an object whose fields are known

# Documented parameters that have no effect yet -> the values that ask for nothing special.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "reasoning_effort": ("none",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "prompt_cache_retention": ("in_memory",),
}

# Only the first mistake is told. Without fail_fast all are collected: a body of 4 MB can hold
# millions, which would stop the event loop for 10 s.
Text = Annotated[str, Field(max_length=BODY_BYTES_MAX)]
ShortText = Annotated[str, Field(max_length=512)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        """Refuse what has many unknown fields before each of them becomes a mistake."""
        if isinstance(value, dict) and len(cast("dict[str, Any]", value)) > _FIELDS_MAX:
            raise ValueError(f"an object has at most {_FIELDS_MAX} fields here")
        return value


class TextPart(_Strict):
    """A piece of content; only text is served."""

    type: Literal["text"]
    text: Text


class FunctionCall(_Strict):
    """A call as the assistant made it; `arguments` is JSON text."""

    name: ShortText
    arguments: Text = ""


class ToolCall(_Strict):
    """A tool call in the history."""

    id: ShortText = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One turn. Fields that clients copy back from answers (refusal, audio, ...) are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Text | Annotated[list[TextPart], Field(fail_fast=True, max_length=PARTS_MAX)] | None
    ) = None
    name: ShortText | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=PARTS_MAX)] | None = None
    tool_call_id: ShortText | None = None

    def text(self) -> str:
        """Return the content as one string."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class FunctionTool(_Strict):
    """A function that the model may call; its schema goes to the chat template unchecked."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(_Strict):
    """A tool; only functions exist."""

    type: Literal["function"]
    function: FunctionTool


class StreamOptions(_Strict):
    """What a stream brings besides text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


def _few_entries(value: Any) -> Any:
    if isinstance(value, dict) and len(cast("dict[str, Any]", value)) > _METADATA_MAX:
        raise ValueError(f"at most {_METADATA_MAX} entries are allowed")
    return value


Metadata = Annotated[dict[ShortText, ShortText], BeforeValidator(_few_entries)]


class ChatRequest(BaseModel):
    """A valid request; None stands for "not given"."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: Annotated[str, Field(min_length=1, max_length=256)]
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MESSAGES_MAX)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    metadata: Metadata | None = None
    session_id: ShortText | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def output_tokens_max(self) -> int | None:
        """The caller's bound on the answer, by either name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def session(self) -> str:
        """What groups requests that share a prefix; empty when the caller did not say."""
        return self.session_id or self.prompt_cache_key or ""


_ADAPTER = TypeAdapter(ChatRequest)


def parse_chat_request(body: bytes) -> ChatRequest:
    """Return the request in `body`; BadRequestError names what is wrong with it."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST, f"We could not parse the JSON body of your request: {error}."
        ) from None
    if not isinstance(document, dict):
        raise BadRequestError(ErrorCode.INVALID_REQUEST, "The request body must be a JSON object.")
    try:
        request = _ADAPTER.validate_python(document)
    except ValidationError as error:
        raise _bad_field(error) from None
    for name, value in (request.model_extra or {}).items():
        _refuse_unless_neutral(name, value)
    _check_relations(request)
    return request


def _bad_field(error: ValidationError) -> BadRequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # Union members appear in the path as type names; clients know only keys and indices.
    path = [part for part in first["loc"] if isinstance(part, int) or part.islower()]
    param = ""
    for part in path:
        if part in ("str", "float", "int") or str(part).startswith(("list[", "constrained-")):
            continue
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    what = "Missing required parameter" if first["type"] == "missing" else "Invalid value for"
    return BadRequestError(
        ErrorCode.INVALID_REQUEST, f"{what} '{param}': {first['msg']}.", param=param
    )


def _refuse_unless_neutral(name: str, value: object) -> None:
    if name not in _NEUTRAL:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST,
            f"Unrecognized request argument supplied: {name[:100]}",
            param=name[:100],
        )
    if value is not None and value not in _NEUTRAL[name]:
        allowed = [orjson.dumps(neutral).decode() for neutral in _NEUTRAL[name]] or ["null"]
        raise BadRequestError(
            ErrorCode.UNSUPPORTED_PARAMETER,
            f"Unsupported value for '{name}': this server only takes {' or '.join(allowed)}.",
            param=name,
        )


def _check_relations(request: ChatRequest) -> None:
    if len(request.stops) > STOPS_MAX or not all(request.stops):
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST,
            f"Invalid value for 'stop': give up to {STOPS_MAX} strings, none of them empty.",
            param="stop",
        )
    if max(map(len, request.stops), default=0) > 1024:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST,
            "Invalid value for 'stop': a stop string has at most 1024 characters.",
            param="stop",
        )
    if request.stream_options is not None and not request.stream:
        raise BadRequestError(
            ErrorCode.INVALID_REQUEST,
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
        )
    if request.tool_choice not in (None, "none", "auto"):
        raise BadRequestError(
            ErrorCode.UNSUPPORTED_PARAMETER,
            'Unsupported value for \'tool_choice\': this server only takes "none" or "auto".',
            param="tool_choice",
        )
    if request.tools and request.parallel_tool_calls is False:
        raise BadRequestError(
            ErrorCode.UNSUPPORTED_PARAMETER,
            "Unsupported value for 'parallel_tool_calls': this server only takes true.",
            param="parallel_tool_calls",
        )
