from collections.abc import Iterable as _Iterable
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper

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
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_REFUSED: FinishReason
FINISH_REASON_BUSY: FinishReason
FINISH_REASON_FAILED: FinishReason

class HostRequest(_message.Message):
    __slots__ = ("adapters", "attach", "cancel", "credit", "detach", "export_kv", "import_kv", "pin", "probe", "submit")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EXPORT_KV_FIELD_NUMBER: _ClassVar[int]
    IMPORT_KV_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    submit: Submit
    cancel: Cancel
    credit: Credit
    probe: Probe
    detach: Detach
    adapters: Adapters
    export_kv: Export
    import_kv: Import
    pin: Pin
    def __init__(self, attach: Attach | _Mapping | None = ..., submit: Submit | _Mapping | None = ..., cancel: Cancel | _Mapping | None = ..., credit: Credit | _Mapping | None = ..., probe: Probe | _Mapping | None = ..., detach: Detach | _Mapping | None = ..., adapters: Adapters | _Mapping | None = ..., export_kv: Export | _Mapping | None = ..., import_kv: Import | _Mapping | None = ..., pin: Pin | _Mapping | None = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("credit_every_ms", "credit_frames", "epoch", "resumed_epoch", "router_id")
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
    def __init__(self, router_id: str | None = ..., epoch: int | None = ..., resumed_epoch: int | None = ..., credit_frames: int | None = ..., credit_every_ms: int | None = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("epoch", "frames")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    frames: int
    def __init__(self, epoch: int | None = ..., frames: int | None = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: int | None = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("epoch", "sequences")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    def __init__(self, epoch: int | None = ..., sequences: _Iterable[Sequence | _Mapping] | None = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("adapter_digest", "cache_root", "draft_tokens_max", "forks", "id", "ignore_eos", "output_tokens_max", "priority", "prompt", "prompt_logprobs", "resumed_tokens", "sampling", "stop_token_ids")
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
    def __init__(self, id: int | None = ..., prompt: _Iterable[int] | None = ..., output_tokens_max: int | None = ..., stop_token_ids: _Iterable[int] | None = ..., sampling: Sampling | _Mapping | None = ..., cache_root: bytes | None = ..., adapter_digest: str | None = ..., priority: int | None = ..., ignore_eos: bool | None = ..., forks: _Iterable[Fork | _Mapping] | None = ..., resumed_tokens: int | None = ..., prompt_logprobs: int | None = ..., draft_tokens_max: int | None = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("id", "seed")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    id: int
    seed: int
    def __init__(self, id: int | None = ..., seed: int | None = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("bias_token", "frequency_penalty", "grammar", "logit_bias", "logprobs", "min_p", "presence_penalty", "repetition_penalty", "seed", "temperature", "tokens_min", "top_k", "top_p")
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
    def __init__(self, temperature: float | None = ..., top_p: float | None = ..., top_k: int | None = ..., seed: int | None = ..., min_p: float | None = ..., presence_penalty: float | None = ..., frequency_penalty: float | None = ..., repetition_penalty: float | None = ..., bias_token: _Iterable[int] | None = ..., logit_bias: _Iterable[float] | None = ..., tokens_min: int | None = ..., logprobs: int | None = ..., grammar: Grammar | _Mapping | None = ...) -> None: ...

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
    def __init__(self, kind: Grammar.Kind | str | None = ..., text: str | None = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("epoch", "sequences")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: int | None = ..., sequences: _Iterable[int] | None = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("adapter_digest", "cache_root", "prompt", "timeout_ms", "tokens", "wants_logprobs")
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
    def __init__(self, prompt: _Iterable[int] | None = ..., tokens: int | None = ..., adapter_digest: str | None = ..., cache_root: bytes | None = ..., wants_logprobs: bool | None = ..., timeout_ms: int | None = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("active", "base_digest", "elapsed_us", "engine", "logprobs", "tokens")
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
    def __init__(self, tokens: _Iterable[int] | None = ..., elapsed_us: int | None = ..., engine: str | None = ..., base_digest: str | None = ..., active: int | None = ..., logprobs: _Iterable[float] | None = ...) -> None: ...

class Adapters(_message.Message):
    __slots__ = ("load", "unload")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    load: _containers.RepeatedScalarFieldContainer[str]
    unload: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, load: _Iterable[str] | None = ..., unload: _Iterable[str] | None = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("adapters", "problems")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    problems: _containers.RepeatedCompositeFieldContainer[AdapterProblem]
    def __init__(self, adapters: _Iterable[AdapterInfo | _Mapping] | None = ..., problems: _Iterable[AdapterProblem | _Mapping] | None = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("digest", "is_in_slot", "loads", "memory_bytes", "output_tokens", "prompt_tokens", "rank", "sequences")
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
    def __init__(self, digest: str | None = ..., is_in_slot: bool | None = ..., rank: int | None = ..., memory_bytes: int | None = ..., sequences: int | None = ..., prompt_tokens: int | None = ..., output_tokens: int | None = ..., loads: int | None = ...) -> None: ...

class AdapterProblem(_message.Message):
    __slots__ = ("code", "digest", "message")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    code: str
    message: str
    def __init__(self, digest: str | None = ..., code: str | None = ..., message: str | None = ...) -> None: ...

class Export(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: bytes | None = ...) -> None: ...

class Import(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: KvBlocks
    def __init__(self, blocks: KvBlocks | _Mapping | None = ...) -> None: ...

class Imported(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: int | None = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("hashes", "ttl_ms")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    ttl_ms: int
    def __init__(self, hashes: bytes | None = ..., ttl_ms: int | None = ...) -> None: ...

class Pinned(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: int | None = ...) -> None: ...

class KvBlocks(_message.Message):
    __slots__ = ("base_digest", "block_bytes", "block_tokens", "checksums", "data", "hashes", "layout")
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
    def __init__(self, base_digest: str | None = ..., layout: str | None = ..., block_tokens: int | None = ..., block_bytes: int | None = ..., hashes: bytes | None = ..., checksums: bytes | None = ..., data: bytes | None = ...) -> None: ...

class HostFrame(_message.Message):
    __slots__ = ("adapters", "attached", "exported", "imported", "pinned", "probe", "refused", "step")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    IMPORTED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    step: StepFrame
    probe: ProbeReply
    attached: Attached
    refused: Refused
    adapters: AdapterList
    exported: KvBlocks
    imported: Imported
    pinned: Pinned
    def __init__(self, step: StepFrame | _Mapping | None = ..., probe: ProbeReply | _Mapping | None = ..., attached: Attached | _Mapping | None = ..., refused: Refused | _Mapping | None = ..., adapters: AdapterList | _Mapping | None = ..., exported: KvBlocks | _Mapping | None = ..., imported: Imported | _Mapping | None = ..., pinned: Pinned | _Mapping | None = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("epoch", "limits", "resumed", "state")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    limits: EngineLimits
    state: EngineState
    resumed: _containers.RepeatedCompositeFieldContainer[Resumed]
    def __init__(self, epoch: int | None = ..., limits: EngineLimits | _Mapping | None = ..., state: EngineState | _Mapping | None = ..., resumed: _Iterable[Resumed | _Mapping] | None = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("logprobs", "output", "prompt_logprobs", "sequence")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    output: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, sequence: int | None = ..., output: _Iterable[int] | None = ..., logprobs: Logprobs | _Mapping | None = ..., prompt_logprobs: _Iterable[PromptLogprobs | _Mapping] | None = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: str | None = ..., message: str | None = ...) -> None: ...

class EngineLimits(_message.Message):
    __slots__ = ("adapter_rank_max", "adapter_slots", "base_digest", "block_tokens", "context_tokens_max", "engine", "features", "kv_blocks", "logprobs_max", "sequences_max", "step_tokens_max")
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
    def __init__(self, context_tokens_max: int | None = ..., sequences_max: int | None = ..., step_tokens_max: int | None = ..., kv_blocks: int | None = ..., block_tokens: int | None = ..., base_digest: str | None = ..., engine: str | None = ..., adapter_slots: int | None = ..., adapter_rank_max: int | None = ..., logprobs_max: int | None = ..., features: _Iterable[str] | None = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("admitted", "count", "finished", "kv_events", "logprobs", "prompt_logprobs", "sequence", "state", "step", "steps", "token")
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
    def __init__(self, step: int | None = ..., steps: int | None = ..., sequence: _Iterable[int] | None = ..., count: _Iterable[int] | None = ..., token: _Iterable[int] | None = ..., admitted: _Iterable[Admitted | _Mapping] | None = ..., finished: _Iterable[Finished | _Mapping] | None = ..., state: EngineState | _Mapping | None = ..., kv_events: KvEvents | _Mapping | None = ..., logprobs: Logprobs | _Mapping | None = ..., prompt_logprobs: _Iterable[PromptLogprobs | _Mapping] | None = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprob", "sequence", "top_count", "top_logprob", "top_token")
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
    def __init__(self, sequence: _Iterable[int] | None = ..., logprob: _Iterable[float] | None = ..., top_count: _Iterable[int] | None = ..., top_token: _Iterable[int] | None = ..., top_logprob: _Iterable[float] | None = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first", "logprob", "sequence", "top_count", "top_logprob", "top_token")
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
    def __init__(self, sequence: int | None = ..., first: int | None = ..., logprob: _Iterable[float] | None = ..., top_count: _Iterable[int] | None = ..., top_token: _Iterable[int] | None = ..., top_logprob: _Iterable[float] | None = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("cached_tokens", "queue_us", "sequence")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    queue_us: int
    cached_tokens: int
    def __init__(self, sequence: int | None = ..., queue_us: int | None = ..., cached_tokens: int | None = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("code", "message", "output_tokens", "prefill_us", "prompt_tokens", "reason", "sequence")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    reason: FinishReason
    code: str
    message: str
    prompt_tokens: int
    output_tokens: int
    prefill_us: int
    def __init__(self, sequence: int | None = ..., reason: FinishReason | str | None = ..., code: str | None = ..., message: str | None = ..., prompt_tokens: int | None = ..., output_tokens: int | None = ..., prefill_us: int | None = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("adapters_changed", "adapters_resident", "kv_blocks_pinned", "kv_blocks_total", "kv_blocks_used", "prefill_tokens_owed", "prefilling", "running", "step_prompt_tokens", "step_us", "waiting")
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
    def __init__(self, running: int | None = ..., waiting: int | None = ..., kv_blocks_used: int | None = ..., kv_blocks_total: int | None = ..., prefill_tokens_owed: int | None = ..., step_us: int | None = ..., adapters_resident: _Iterable[str] | None = ..., adapters_changed: bool | None = ..., kv_blocks_pinned: int | None = ..., step_prompt_tokens: int | None = ..., prefilling: int | None = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("number", "removed", "reset", "stored")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    number: int
    stored: bytes
    removed: bytes
    reset: bool
    def __init__(self, number: int | None = ..., stored: bytes | None = ..., removed: bytes | None = ..., reset: bool | None = ...) -> None: ...
