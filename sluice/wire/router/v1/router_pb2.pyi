from sluice.wire.engine.v1 import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OutcomeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_KIND_UNSPECIFIED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_STOP: _ClassVar[OutcomeKind]
    OUTCOME_KIND_LENGTH: _ClassVar[OutcomeKind]
    OUTCOME_KIND_CANCELLED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_REJECTED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_EVICTED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_FAILED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_LOST: _ClassVar[OutcomeKind]
OUTCOME_KIND_UNSPECIFIED: OutcomeKind
OUTCOME_KIND_STOP: OutcomeKind
OUTCOME_KIND_LENGTH: OutcomeKind
OUTCOME_KIND_CANCELLED: OutcomeKind
OUTCOME_KIND_REJECTED: OutcomeKind
OUTCOME_KIND_EVICTED: OutcomeKind
OUTCOME_KIND_FAILED: OutcomeKind
OUTCOME_KIND_LOST: OutcomeKind

class FollowServiceRequest(_message.Message):
    __slots__ = ("router_id", "pool_id")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    pool_id: str
    def __init__(self, router_id: _Optional[str] = ..., pool_id: _Optional[str] = ...) -> None: ...

class FollowServiceResponse(_message.Message):
    __slots__ = ("router_id", "cells")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    cells: _containers.RepeatedCompositeFieldContainer[CellService]
    def __init__(self, router_id: _Optional[str] = ..., cells: _Optional[_Iterable[_Union[CellService, _Mapping]]] = ...) -> None: ...

class CellService(_message.Message):
    __slots__ = ("cell_id", "epoch", "number", "tenant_ids", "priorities", "since", "service")
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TENANT_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    cell_id: str
    epoch: int
    number: int
    tenant_ids: _containers.RepeatedScalarFieldContainer[str]
    priorities: _containers.RepeatedScalarFieldContainer[int]
    since: _containers.RepeatedScalarFieldContainer[int]
    service: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, cell_id: _Optional[str] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ..., tenant_ids: _Optional[_Iterable[str]] = ..., priorities: _Optional[_Iterable[int]] = ..., since: _Optional[_Iterable[int]] = ..., service: _Optional[_Iterable[float]] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LiveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "submits", "cancels", "cancel_took", "cancel_placed", "turned_away")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TOOK_FIELD_NUMBER: _ClassVar[int]
    CANCEL_PLACED_FIELD_NUMBER: _ClassVar[int]
    TURNED_AWAY_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    cancel_took: _containers.RepeatedScalarFieldContainer[int]
    cancel_placed: _containers.RepeatedScalarFieldContainer[bool]
    turned_away: _containers.RepeatedCompositeFieldContainer[TurnedAway]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ..., cancel_took: _Optional[_Iterable[int]] = ..., cancel_placed: _Optional[_Iterable[bool]] = ..., turned_away: _Optional[_Iterable[_Union[TurnedAway, _Mapping]]] = ...) -> None: ...

class TurnedAway(_message.Message):
    __slots__ = ("cell_id", "priority", "requests")
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    cell_id: str
    priority: int
    requests: int
    def __init__(self, cell_id: _Optional[str] = ..., priority: _Optional[int] = ..., requests: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("gateway_id", "takes_closings", "counts_prompts")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    TAKES_CLOSINGS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    takes_closings: bool
    counts_prompts: bool
    def __init__(self, gateway_id: _Optional[str] = ..., takes_closings: _Optional[bool] = ..., counts_prompts: _Optional[bool] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "cell_id", "tenant_id", "tier_priority", "tenant_weight", "prompt", "output_tokens_max", "stop_token_ids", "cache_root", "adapter_digest", "session_hash", "deadline_ms", "ignore_eos", "resumed_tokens", "traceparent", "block_hashes", "is_preemptible", "tier_reserved_permille", "sampling", "is_begun", "tracestate", "closing", "was_placed", "attempt", "prediction", "admission_ms", "prompt_logprobs", "absence_ms", "scored_tokens", "pinned_blocks", "prompt_ids")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROOT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SESSION_HASH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    IS_PREEMPTIBLE_FIELD_NUMBER: _ClassVar[int]
    TIER_RESERVED_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    IS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    WAS_PLACED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ABSENCE_MS_FIELD_NUMBER: _ClassVar[int]
    SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    cell_id: str
    tenant_id: str
    tier_priority: int
    tenant_weight: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    output_tokens_max: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_root: bytes
    adapter_digest: str
    session_hash: int
    deadline_ms: int
    ignore_eos: bool
    resumed_tokens: int
    traceparent: str
    block_hashes: bytes
    is_preemptible: bool
    tier_reserved_permille: int
    sampling: _engine_pb2.Sampling
    is_begun: bool
    tracestate: str
    closing: bytes
    was_placed: bool
    attempt: int
    prediction: _containers.RepeatedScalarFieldContainer[int]
    admission_ms: int
    prompt_logprobs: int
    absence_ms: int
    scored_tokens: int
    pinned_blocks: int
    prompt_ids: bytes
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., cell_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., tier_priority: _Optional[int] = ..., tenant_weight: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., output_tokens_max: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., cache_root: _Optional[bytes] = ..., adapter_digest: _Optional[str] = ..., session_hash: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., resumed_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., block_hashes: _Optional[bytes] = ..., is_preemptible: _Optional[bool] = ..., tier_reserved_permille: _Optional[int] = ..., sampling: _Optional[_Union[_engine_pb2.Sampling, _Mapping]] = ..., is_begun: _Optional[bool] = ..., tracestate: _Optional[str] = ..., closing: _Optional[bytes] = ..., was_placed: _Optional[bool] = ..., attempt: _Optional[int] = ..., prediction: _Optional[_Iterable[int]] = ..., admission_ms: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., absence_ms: _Optional[int] = ..., scored_tokens: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ...) -> None: ...

class PackedSubmit(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: bytes
    def __init__(self, prompt: _Optional[bytes] = ...) -> None: ...

class PackedSequence(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: bytes
    def __init__(self, prompt: _Optional[bytes] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("welcome", "handle", "count", "token", "placed", "outcomes", "cells", "logprobs", "prompt_logprobs", "closings", "sketches")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CLOSINGS_FIELD_NUMBER: _ClassVar[int]
    SKETCHES_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    handle: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    placed: _containers.RepeatedCompositeFieldContainer[Placed]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    cells: _containers.RepeatedCompositeFieldContainer[CellState]
    logprobs: _engine_pb2.Logprobs
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_engine_pb2.PromptLogprobs]
    closings: _containers.RepeatedScalarFieldContainer[bytes]
    sketches: _containers.RepeatedCompositeFieldContainer[CellSketch]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., handle: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., placed: _Optional[_Iterable[_Union[Placed, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., cells: _Optional[_Iterable[_Union[CellState, _Mapping]]] = ..., logprobs: _Optional[_Union[_engine_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_engine_pb2.PromptLogprobs, _Mapping]]] = ..., closings: _Optional[_Iterable[bytes]] = ..., sketches: _Optional[_Iterable[_Union[CellSketch, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("router_id", "epoch", "reads_prompt_ids")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READS_PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    epoch: int
    reads_prompt_ids: bool
    def __init__(self, router_id: _Optional[str] = ..., epoch: _Optional[int] = ..., reads_prompt_ids: _Optional[bool] = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("handle", "replica_id", "queue_us", "engine_queue_us", "cached_tokens", "decision", "before", "load_us")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    ENGINE_QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    LOAD_US_FIELD_NUMBER: _ClassVar[int]
    handle: int
    replica_id: str
    queue_us: int
    engine_queue_us: int
    cached_tokens: int
    decision: Explanation
    before: _containers.RepeatedCompositeFieldContainer[Interruption]
    load_us: int
    def __init__(self, handle: _Optional[int] = ..., replica_id: _Optional[str] = ..., queue_us: _Optional[int] = ..., engine_queue_us: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., decision: _Optional[_Union[Explanation, _Mapping]] = ..., before: _Optional[_Iterable[_Union[Interruption, _Mapping]]] = ..., load_us: _Optional[int] = ...) -> None: ...

class Interruption(_message.Message):
    __slots__ = ("replica_id", "code", "reason", "queue_us", "ended_us")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    code: str
    reason: str
    queue_us: int
    ended_us: int
    def __init__(self, replica_id: _Optional[str] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ..., queue_us: _Optional[int] = ..., ended_us: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("handle", "kind", "code", "message", "retry_after_ms", "output_tokens", "prefill_us", "decision", "before", "param", "drafts", "score")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    kind: OutcomeKind
    code: str
    message: str
    retry_after_ms: int
    output_tokens: int
    prefill_us: int
    decision: Explanation
    before: _containers.RepeatedCompositeFieldContainer[Interruption]
    param: str
    drafts: _engine_pb2.Drafts
    score: _engine_pb2.Score
    def __init__(self, handle: _Optional[int] = ..., kind: _Optional[_Union[OutcomeKind, str]] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., output_tokens: _Optional[int] = ..., prefill_us: _Optional[int] = ..., decision: _Optional[_Union[Explanation, _Mapping]] = ..., before: _Optional[_Iterable[_Union[Interruption, _Mapping]]] = ..., param: _Optional[str] = ..., drafts: _Optional[_Union[_engine_pb2.Drafts, _Mapping]] = ..., score: _Optional[_Union[_engine_pb2.Score, _Mapping]] = ...) -> None: ...

class CellState(_message.Message):
    __slots__ = ("cell_id", "queued", "running", "replicas_ready", "tokens_owed", "kv_free_permille", "wait_ms", "is_draining", "tier_gates")
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_READY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OWED_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    TIER_GATES_FIELD_NUMBER: _ClassVar[int]
    cell_id: str
    queued: int
    running: int
    replicas_ready: int
    tokens_owed: int
    kv_free_permille: int
    wait_ms: int
    is_draining: bool
    tier_gates: _containers.RepeatedCompositeFieldContainer[TierGate]
    def __init__(self, cell_id: _Optional[str] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., replicas_ready: _Optional[int] = ..., tokens_owed: _Optional[int] = ..., kv_free_permille: _Optional[int] = ..., wait_ms: _Optional[int] = ..., is_draining: _Optional[bool] = ..., tier_gates: _Optional[_Iterable[_Union[TierGate, _Mapping]]] = ...) -> None: ...

class TierGate(_message.Message):
    __slots__ = ("priority", "tenant_id", "passing_permille", "retry_ms", "service_us")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    PASSING_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_US_FIELD_NUMBER: _ClassVar[int]
    priority: int
    tenant_id: str
    passing_permille: int
    retry_ms: int
    service_us: int
    def __init__(self, priority: _Optional[int] = ..., tenant_id: _Optional[str] = ..., passing_permille: _Optional[int] = ..., retry_ms: _Optional[int] = ..., service_us: _Optional[int] = ...) -> None: ...

class CellSketch(_message.Message):
    __slots__ = ("cell_id", "epoch", "generation", "marks")
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    cell_id: str
    epoch: int
    generation: int
    marks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cell_id: _Optional[str] = ..., epoch: _Optional[int] = ..., generation: _Optional[int] = ..., marks: _Optional[_Iterable[int]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "submit")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    submit: Submit
    def __init__(self, request_id: _Optional[str] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("router_id", "cell_id", "request_id", "state", "code", "reason", "retry_after_ms", "predicted_ttft_ms", "predicted_queue_ms", "deadline_left_ms", "tokens_ahead", "requests_ahead", "chosen", "candidates")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    cell_id: str
    request_id: str
    state: str
    code: str
    reason: str
    retry_after_ms: int
    predicted_ttft_ms: int
    predicted_queue_ms: int
    deadline_left_ms: int
    tokens_ahead: int
    requests_ahead: int
    chosen: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, router_id: _Optional[str] = ..., cell_id: _Optional[str] = ..., request_id: _Optional[str] = ..., state: _Optional[str] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., predicted_ttft_ms: _Optional[int] = ..., predicted_queue_ms: _Optional[int] = ..., deadline_left_ms: _Optional[int] = ..., tokens_ahead: _Optional[int] = ..., requests_ahead: _Optional[int] = ..., chosen: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("replica_id", "excluded_by", "cost_us", "backlog_us", "prefill_us", "adapter_us", "cached_tokens", "active", "kv_free_blocks", "is_session_home", "health")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_BY_FIELD_NUMBER: _ClassVar[int]
    COST_US_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_US_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IS_SESSION_HOME_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    excluded_by: str
    cost_us: int
    backlog_us: int
    prefill_us: int
    adapter_us: int
    cached_tokens: int
    active: int
    kv_free_blocks: int
    is_session_home: bool
    health: str
    def __init__(self, replica_id: _Optional[str] = ..., excluded_by: _Optional[str] = ..., cost_us: _Optional[int] = ..., backlog_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., adapter_us: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., active: _Optional[int] = ..., kv_free_blocks: _Optional[int] = ..., is_session_home: _Optional[bool] = ..., health: _Optional[str] = ...) -> None: ...
