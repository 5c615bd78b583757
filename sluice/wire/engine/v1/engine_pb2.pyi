from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_REFUSED: _ClassVar[FinishReason]
    FINISH_REASON_BUSY: _ClassVar[FinishReason]
    FINISH_REASON_FAILED: _ClassVar[FinishReason]
    FINISH_REASON_UNKNOWN_SPAN: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_REFUSED: FinishReason
FINISH_REASON_BUSY: FinishReason
FINISH_REASON_FAILED: FinishReason
FINISH_REASON_UNKNOWN_SPAN: FinishReason

class HostRequest(_message.Message):
    __slots__ = ("attach", "submit", "cancel", "credit", "probe", "detach", "adapters", "export_kv", "import_kv", "rest")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EXPORT_KV_FIELD_NUMBER: _ClassVar[int]
    IMPORT_KV_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    submit: Submit
    cancel: Cancel
    credit: Credit
    probe: Probe
    detach: Detach
    adapters: Adapters
    export_kv: Export
    import_kv: Import
    rest: Rest
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ..., export_kv: _Optional[_Union[Export, _Mapping]] = ..., import_kv: _Optional[_Union[Import, _Mapping]] = ..., rest: _Optional[_Union[Rest, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("router_id", "epoch", "resumed_epoch", "credit_frames", "credit_every_ms")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESUMED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FRAMES_FIELD_NUMBER: _ClassVar[int]
    CREDIT_EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    epoch: int
    resumed_epoch: int
    credit_frames: int
    credit_every_ms: int
    def __init__(self, router_id: _Optional[str] = ..., epoch: _Optional[int] = ..., resumed_epoch: _Optional[int] = ..., credit_frames: _Optional[int] = ..., credit_every_ms: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("epoch", "frames")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    frames: int
    def __init__(self, epoch: _Optional[int] = ..., frames: _Optional[int] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("epoch", "sequences")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    def __init__(self, epoch: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("id", "prompt", "output_tokens_max", "stop_token_ids", "sampling", "cache_root", "adapter_digest", "priority", "ignore_eos", "forks", "resumed_tokens", "prompt_logprobs", "draft_tokens_max", "traceparent", "tracestate", "prediction", "scored_tokens", "pinned_blocks", "prompt_ids", "known_span", "known_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROOT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    SCORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_SPAN_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    output_tokens_max: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    cache_root: bytes
    adapter_digest: str
    priority: int
    ignore_eos: bool
    forks: _containers.RepeatedCompositeFieldContainer[Fork]
    resumed_tokens: int
    prompt_logprobs: int
    draft_tokens_max: int
    traceparent: str
    tracestate: str
    prediction: _containers.RepeatedScalarFieldContainer[int]
    scored_tokens: int
    pinned_blocks: int
    prompt_ids: bytes
    known_span: bytes
    known_tokens: int
    def __init__(self, id: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., output_tokens_max: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., cache_root: _Optional[bytes] = ..., adapter_digest: _Optional[str] = ..., priority: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., forks: _Optional[_Iterable[_Union[Fork, _Mapping]]] = ..., resumed_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., draft_tokens_max: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., prediction: _Optional[_Iterable[int]] = ..., scored_tokens: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., known_span: _Optional[bytes] = ..., known_tokens: _Optional[int] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("id", "seed")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    id: int
    seed: int
    def __init__(self, id: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_token", "logit_bias", "tokens_min", "logprobs", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MIN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_token: _containers.RepeatedScalarFieldContainer[int]
    logit_bias: _containers.RepeatedScalarFieldContainer[float]
    tokens_min: int
    logprobs: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_token: _Optional[_Iterable[int]] = ..., logit_bias: _Optional[_Iterable[float]] = ..., tokens_min: _Optional[int] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Grammar.Kind]
        KIND_JSON: _ClassVar[Grammar.Kind]
        KIND_JSON_SCHEMA: _ClassVar[Grammar.Kind]
        KIND_REGEX: _ClassVar[Grammar.Kind]
        KIND_CHOICE: _ClassVar[Grammar.Kind]
        KIND_EBNF: _ClassVar[Grammar.Kind]
    KIND_UNSPECIFIED: Grammar.Kind
    KIND_JSON: Grammar.Kind
    KIND_JSON_SCHEMA: Grammar.Kind
    KIND_REGEX: Grammar.Kind
    KIND_CHOICE: Grammar.Kind
    KIND_EBNF: Grammar.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: Grammar.Kind
    text: str
    def __init__(self, kind: _Optional[_Union[Grammar.Kind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("epoch", "sequences")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., sequences: _Optional[_Iterable[int]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("prompt", "tokens", "adapter_digest", "cache_root", "wants_logprobs", "timeout_ms")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROOT_FIELD_NUMBER: _ClassVar[int]
    WANTS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    adapter_digest: str
    cache_root: bytes
    wants_logprobs: bool
    timeout_ms: int
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., adapter_digest: _Optional[str] = ..., cache_root: _Optional[bytes] = ..., wants_logprobs: _Optional[bool] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("tokens", "elapsed_us", "engine", "base_digest", "active", "logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_US_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    elapsed_us: int
    engine: str
    base_digest: str
    active: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., elapsed_us: _Optional[int] = ..., engine: _Optional[str] = ..., base_digest: _Optional[str] = ..., active: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Adapters(_message.Message):
    __slots__ = ("load", "unload")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    load: _containers.RepeatedScalarFieldContainer[str]
    unload: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, load: _Optional[_Iterable[str]] = ..., unload: _Optional[_Iterable[str]] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("adapters", "problems")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    problems: _containers.RepeatedCompositeFieldContainer[AdapterProblem]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ..., problems: _Optional[_Iterable[_Union[AdapterProblem, _Mapping]]] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("digest", "is_in_slot", "rank", "memory_bytes", "sequences", "prompt_tokens", "output_tokens", "loads")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IS_IN_SLOT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    is_in_slot: bool
    rank: int
    memory_bytes: int
    sequences: int
    prompt_tokens: int
    output_tokens: int
    loads: int
    def __init__(self, digest: _Optional[str] = ..., is_in_slot: _Optional[bool] = ..., rank: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., sequences: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., loads: _Optional[int] = ...) -> None: ...

class AdapterProblem(_message.Message):
    __slots__ = ("digest", "code", "message")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    code: str
    message: str
    def __init__(self, digest: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Export(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class Import(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: KvBlocks
    def __init__(self, blocks: _Optional[_Union[KvBlocks, _Mapping]] = ...) -> None: ...

class Imported(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class Rest(_message.Message):
    __slots__ = ("is_asleep",)
    IS_ASLEEP_FIELD_NUMBER: _ClassVar[int]
    is_asleep: bool
    def __init__(self, is_asleep: _Optional[bool] = ...) -> None: ...

class Rested(_message.Message):
    __slots__ = ("is_asleep",)
    IS_ASLEEP_FIELD_NUMBER: _ClassVar[int]
    is_asleep: bool
    def __init__(self, is_asleep: _Optional[bool] = ...) -> None: ...

class KvBlocks(_message.Message):
    __slots__ = ("base_digest", "layout", "block_tokens", "block_bytes", "hashes", "checksums", "data")
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    base_digest: str
    layout: str
    block_tokens: int
    block_bytes: int
    hashes: bytes
    checksums: bytes
    data: bytes
    def __init__(self, base_digest: _Optional[str] = ..., layout: _Optional[str] = ..., block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., hashes: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class HostFrame(_message.Message):
    __slots__ = ("step", "probe", "attached", "refused", "adapters", "exported", "imported", "rested")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    IMPORTED_FIELD_NUMBER: _ClassVar[int]
    RESTED_FIELD_NUMBER: _ClassVar[int]
    step: StepFrame
    probe: ProbeReply
    attached: Attached
    refused: Refused
    adapters: AdapterList
    exported: KvBlocks
    imported: Imported
    rested: Rested
    def __init__(self, step: _Optional[_Union[StepFrame, _Mapping]] = ..., probe: _Optional[_Union[ProbeReply, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ..., exported: _Optional[_Union[KvBlocks, _Mapping]] = ..., imported: _Optional[_Union[Imported, _Mapping]] = ..., rested: _Optional[_Union[Rested, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("epoch", "limits", "state", "resumed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    limits: EngineLimits
    state: EngineState
    resumed: _containers.RepeatedCompositeFieldContainer[Resumed]
    def __init__(self, epoch: _Optional[int] = ..., limits: _Optional[_Union[EngineLimits, _Mapping]] = ..., state: _Optional[_Union[EngineState, _Mapping]] = ..., resumed: _Optional[_Iterable[_Union[Resumed, _Mapping]]] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("sequence", "output", "logprobs", "prompt_logprobs")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    output: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, sequence: _Optional[int] = ..., output: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class EngineLimits(_message.Message):
    __slots__ = ("context_tokens_max", "sequences_max", "step_tokens_max", "kv_blocks", "block_tokens", "base_digest", "engine", "adapter_slots", "adapter_rank_max", "logprobs_max", "features")
    CONTEXT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_MAX_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_RANK_MAX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MAX_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    context_tokens_max: int
    sequences_max: int
    step_tokens_max: int
    kv_blocks: int
    block_tokens: int
    base_digest: str
    engine: str
    adapter_slots: int
    adapter_rank_max: int
    logprobs_max: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, context_tokens_max: _Optional[int] = ..., sequences_max: _Optional[int] = ..., step_tokens_max: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., block_tokens: _Optional[int] = ..., base_digest: _Optional[str] = ..., engine: _Optional[str] = ..., adapter_slots: _Optional[int] = ..., adapter_rank_max: _Optional[int] = ..., logprobs_max: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("step", "steps", "sequence", "count", "token", "admitted", "finished", "state", "kv_events", "logprobs", "prompt_logprobs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    sequence: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    admitted: _containers.RepeatedCompositeFieldContainer[Admitted]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    state: EngineState
    kv_events: KvEvents
    logprobs: Logprobs
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., sequence: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., admitted: _Optional[_Iterable[_Union[Admitted, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., state: _Optional[_Union[EngineState, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("sequence", "logprob", "top_count", "top_token", "top_logprob")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    sequence: _containers.RepeatedScalarFieldContainer[int]
    logprob: _containers.RepeatedScalarFieldContainer[float]
    top_count: _containers.RepeatedScalarFieldContainer[int]
    top_token: _containers.RepeatedScalarFieldContainer[int]
    top_logprob: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sequence: _Optional[_Iterable[int]] = ..., logprob: _Optional[_Iterable[float]] = ..., top_count: _Optional[_Iterable[int]] = ..., top_token: _Optional[_Iterable[int]] = ..., top_logprob: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("sequence", "first", "logprob", "top_count", "top_token", "top_logprob")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    first: int
    logprob: _containers.RepeatedScalarFieldContainer[float]
    top_count: _containers.RepeatedScalarFieldContainer[int]
    top_token: _containers.RepeatedScalarFieldContainer[int]
    top_logprob: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sequence: _Optional[int] = ..., first: _Optional[int] = ..., logprob: _Optional[_Iterable[float]] = ..., top_count: _Optional[_Iterable[int]] = ..., top_token: _Optional[_Iterable[int]] = ..., top_logprob: _Optional[_Iterable[float]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("sequence", "queue_us", "cached_tokens", "load_us")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_US_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    queue_us: int
    cached_tokens: int
    load_us: int
    def __init__(self, sequence: _Optional[int] = ..., queue_us: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., load_us: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("sequence", "reason", "code", "message", "prompt_tokens", "output_tokens", "prefill_us", "param", "drafts", "score")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    reason: FinishReason
    code: str
    message: str
    prompt_tokens: int
    output_tokens: int
    prefill_us: int
    param: str
    drafts: Drafts
    score: Score
    def __init__(self, sequence: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., prefill_us: _Optional[int] = ..., param: _Optional[str] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ..., score: _Optional[_Union[Score, _Mapping]] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("tried", "accepted", "prediction_tried", "prediction_accepted")
    TRIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TRIED_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    tried: int
    accepted: int
    prediction_tried: int
    prediction_accepted: int
    def __init__(self, tried: _Optional[int] = ..., accepted: _Optional[int] = ..., prediction_tried: _Optional[int] = ..., prediction_accepted: _Optional[int] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("logprob", "entropy")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    entropy: float
    def __init__(self, logprob: _Optional[float] = ..., entropy: _Optional[float] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("running", "waiting", "kv_blocks_used", "kv_blocks_total", "prefill_tokens_owed", "step_us", "adapters_resident", "adapters_changed", "kv_blocks_pinned", "step_prompt_tokens", "prefilling")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_OWED_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_PINNED_FIELD_NUMBER: _ClassVar[int]
    STEP_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefill_tokens_owed: int
    step_us: int
    adapters_resident: _containers.RepeatedScalarFieldContainer[str]
    adapters_changed: bool
    kv_blocks_pinned: int
    step_prompt_tokens: int
    prefilling: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., prefill_tokens_owed: _Optional[int] = ..., step_us: _Optional[int] = ..., adapters_resident: _Optional[_Iterable[str]] = ..., adapters_changed: _Optional[bool] = ..., kv_blocks_pinned: _Optional[int] = ..., step_prompt_tokens: _Optional[int] = ..., prefilling: _Optional[int] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("number", "stored", "removed", "reset")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    number: int
    stored: bytes
    removed: bytes
    reset: bool
    def __init__(self, number: _Optional[int] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., reset: _Optional[bool] = ...) -> None: ...
