from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Arm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARM_UNSPECIFIED: _ClassVar[Arm]
    ARM_CONTROL: _ClassVar[Arm]
    ARM_CANARY: _ClassVar[Arm]
ARM_UNSPECIFIED: Arm
ARM_CONTROL: Arm
ARM_CANARY: Arm

class RequestEvent(_message.Message):
    __slots__ = ("schema_version", "event_id", "received_at_unix_ms", "request_id", "trace_id", "tenant_id", "key_id", "tier_id", "session_hash", "model", "release", "base_digest", "adapter_digest", "pool_id", "cell_id", "replica_id", "router_id", "gateway_id", "endpoint", "is_stream", "prompt_tokens", "cached_tokens", "output_tokens", "gateway_us", "queue_us", "engine_queue_us", "prefill_us", "ttft_us", "total_us", "itl_max_us", "outcome", "status", "resumes", "requested_model", "rollout_id", "arm", "is_pinned", "is_copy", "is_refusal", "choices", "part", "count", "parent_span_id", "is_sampled", "tracestate", "attempts", "lost_model", "lost_prompt_tokens", "lost_output_tokens", "limits", "reserved_tokens", "is_limited_locally", "load_us", "is_empty", "is_repetitive", "scored_rollout_id", "base_logprob", "answer_logprob", "answer_entropy", "guard_rules", "withheld_tokens", "unbilled_tokens", "dropped_turns", "auto", "feedback", "tool_call")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_HASH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    IS_STREAM_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    ENGINE_QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    ITL_MAX_US_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_MODEL_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    IS_COPY_FIELD_NUMBER: _ClassVar[int]
    IS_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PARENT_SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    IS_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    LOST_MODEL_FIELD_NUMBER: _ClassVar[int]
    LOST_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_LIMITED_LOCALLY_FIELD_NUMBER: _ClassVar[int]
    LOAD_US_FIELD_NUMBER: _ClassVar[int]
    IS_EMPTY_FIELD_NUMBER: _ClassVar[int]
    IS_REPETITIVE_FIELD_NUMBER: _ClassVar[int]
    SCORED_ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ANSWER_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ANSWER_ENTROPY_FIELD_NUMBER: _ClassVar[int]
    GUARD_RULES_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNBILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TURNS_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    event_id: str
    received_at_unix_ms: int
    request_id: str
    trace_id: str
    tenant_id: str
    key_id: str
    tier_id: str
    session_hash: int
    model: str
    release: str
    base_digest: str
    adapter_digest: str
    pool_id: str
    cell_id: str
    replica_id: str
    router_id: str
    gateway_id: str
    endpoint: str
    is_stream: bool
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    gateway_us: int
    queue_us: int
    engine_queue_us: int
    prefill_us: int
    ttft_us: int
    total_us: int
    itl_max_us: int
    outcome: str
    status: int
    resumes: int
    requested_model: str
    rollout_id: str
    arm: Arm
    is_pinned: bool
    is_copy: bool
    is_refusal: bool
    choices: int
    part: int
    count: TokenCount
    parent_span_id: str
    is_sampled: bool
    tracestate: str
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    lost_model: str
    lost_prompt_tokens: int
    lost_output_tokens: int
    limits: str
    reserved_tokens: int
    is_limited_locally: bool
    load_us: int
    is_empty: bool
    is_repetitive: bool
    scored_rollout_id: str
    base_logprob: float
    answer_logprob: float
    answer_entropy: float
    guard_rules: str
    withheld_tokens: int
    unbilled_tokens: int
    dropped_turns: int
    auto: AutoChoice
    feedback: AnswerFeedback
    tool_call: ToolCall
    def __init__(self, schema_version: _Optional[int] = ..., event_id: _Optional[str] = ..., received_at_unix_ms: _Optional[int] = ..., request_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., key_id: _Optional[str] = ..., tier_id: _Optional[str] = ..., session_hash: _Optional[int] = ..., model: _Optional[str] = ..., release: _Optional[str] = ..., base_digest: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., pool_id: _Optional[str] = ..., cell_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., router_id: _Optional[str] = ..., gateway_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., is_stream: _Optional[bool] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., gateway_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., engine_queue_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., ttft_us: _Optional[int] = ..., total_us: _Optional[int] = ..., itl_max_us: _Optional[int] = ..., outcome: _Optional[str] = ..., status: _Optional[int] = ..., resumes: _Optional[int] = ..., requested_model: _Optional[str] = ..., rollout_id: _Optional[str] = ..., arm: _Optional[_Union[Arm, str]] = ..., is_pinned: _Optional[bool] = ..., is_copy: _Optional[bool] = ..., is_refusal: _Optional[bool] = ..., choices: _Optional[int] = ..., part: _Optional[int] = ..., count: _Optional[_Union[TokenCount, _Mapping]] = ..., parent_span_id: _Optional[str] = ..., is_sampled: _Optional[bool] = ..., tracestate: _Optional[str] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., lost_model: _Optional[str] = ..., lost_prompt_tokens: _Optional[int] = ..., lost_output_tokens: _Optional[int] = ..., limits: _Optional[str] = ..., reserved_tokens: _Optional[int] = ..., is_limited_locally: _Optional[bool] = ..., load_us: _Optional[int] = ..., is_empty: _Optional[bool] = ..., is_repetitive: _Optional[bool] = ..., scored_rollout_id: _Optional[str] = ..., base_logprob: _Optional[float] = ..., answer_logprob: _Optional[float] = ..., answer_entropy: _Optional[float] = ..., guard_rules: _Optional[str] = ..., withheld_tokens: _Optional[int] = ..., unbilled_tokens: _Optional[int] = ..., dropped_turns: _Optional[int] = ..., auto: _Optional[_Union[AutoChoice, _Mapping]] = ..., feedback: _Optional[_Union[AnswerFeedback, _Mapping]] = ..., tool_call: _Optional[_Union[ToolCall, _Mapping]] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("tool_id", "kind", "label", "name", "attempts", "duration_us", "outcome", "output_bytes", "price_micros")
    TOOL_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRICE_MICROS_FIELD_NUMBER: _ClassVar[int]
    tool_id: str
    kind: str
    label: str
    name: str
    attempts: int
    duration_us: int
    outcome: str
    output_bytes: int
    price_micros: int
    def __init__(self, tool_id: _Optional[str] = ..., kind: _Optional[str] = ..., label: _Optional[str] = ..., name: _Optional[str] = ..., attempts: _Optional[int] = ..., duration_us: _Optional[int] = ..., outcome: _Optional[str] = ..., output_bytes: _Optional[int] = ..., price_micros: _Optional[int] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("part", "number", "cell_id", "router_id", "replica_id", "submitted_us", "first_us", "ended_us", "queue_us", "engine_queue_us", "prefill_us", "cached_tokens", "output_tokens", "outcome", "reason", "decision", "load_us")
    PART_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_US_FIELD_NUMBER: _ClassVar[int]
    FIRST_US_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    ENGINE_QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    LOAD_US_FIELD_NUMBER: _ClassVar[int]
    part: int
    number: int
    cell_id: str
    router_id: str
    replica_id: str
    submitted_us: int
    first_us: int
    ended_us: int
    queue_us: int
    engine_queue_us: int
    prefill_us: int
    cached_tokens: int
    output_tokens: int
    outcome: str
    reason: str
    decision: bytes
    load_us: int
    def __init__(self, part: _Optional[int] = ..., number: _Optional[int] = ..., cell_id: _Optional[str] = ..., router_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., submitted_us: _Optional[int] = ..., first_us: _Optional[int] = ..., ended_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., engine_queue_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., decision: _Optional[bytes] = ..., load_us: _Optional[int] = ...) -> None: ...

class AutoChoice(_message.Message):
    __slots__ = ("scheme", "cluster", "reason", "model", "options")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    scheme: int
    cluster: int
    reason: str
    model: str
    options: _containers.RepeatedCompositeFieldContainer[AutoOption]
    def __init__(self, scheme: _Optional[int] = ..., cluster: _Optional[int] = ..., reason: _Optional[str] = ..., model: _Optional[str] = ..., options: _Optional[_Iterable[_Union[AutoOption, _Mapping]]] = ...) -> None: ...

class AutoOption(_message.Message):
    __slots__ = ("model", "release", "cost", "quality", "propensity")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    PROPENSITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    release: str
    cost: float
    quality: float
    propensity: float
    def __init__(self, model: _Optional[str] = ..., release: _Optional[str] = ..., cost: _Optional[float] = ..., quality: _Optional[float] = ..., propensity: _Optional[float] = ...) -> None: ...

class AnswerFeedback(_message.Message):
    __slots__ = ("answer", "good")
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    GOOD_FIELD_NUMBER: _ClassVar[int]
    answer: str
    good: float
    def __init__(self, answer: _Optional[str] = ..., good: _Optional[float] = ...) -> None: ...

class TokenCount(_message.Message):
    __slots__ = ("epoch", "number", "output_tokens", "uncertain_tokens", "discarded_tokens", "is_last", "has_prompts", "prompt_tokens", "uncertain_prompt_tokens", "discarded_prompt_tokens", "resumed_prompt_tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCERTAIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    HAS_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCERTAIN_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    output_tokens: int
    uncertain_tokens: int
    discarded_tokens: int
    is_last: bool
    has_prompts: bool
    prompt_tokens: int
    uncertain_prompt_tokens: int
    discarded_prompt_tokens: int
    resumed_prompt_tokens: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., output_tokens: _Optional[int] = ..., uncertain_tokens: _Optional[int] = ..., discarded_tokens: _Optional[int] = ..., is_last: _Optional[bool] = ..., has_prompts: _Optional[bool] = ..., prompt_tokens: _Optional[int] = ..., uncertain_prompt_tokens: _Optional[int] = ..., discarded_prompt_tokens: _Optional[int] = ..., resumed_prompt_tokens: _Optional[int] = ...) -> None: ...
