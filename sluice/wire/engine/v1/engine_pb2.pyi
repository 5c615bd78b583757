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
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_REFUSED: FinishReason
FINISH_REASON_BUSY: FinishReason
FINISH_REASON_FAILED: FinishReason

class HostRequest(_message.Message):
    __slots__ = ("attach", "submit", "cancel", "credit", "probe", "detach")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    submit: Submit
    cancel: Cancel
    credit: Credit
    probe: Probe
    detach: Detach
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("router_id", "epoch", "credit_frames")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FRAMES_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    epoch: int
    credit_frames: int
    def __init__(self, router_id: _Optional[str] = ..., epoch: _Optional[int] = ..., credit_frames: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("id", "prompt", "output_tokens_max", "stop_token_ids", "sampling", "cache_root", "adapter_digest", "priority", "ignore_eos")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROOT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    id: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    output_tokens_max: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    cache_root: bytes
    adapter_digest: str
    priority: int
    ignore_eos: bool
    def __init__(self, id: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., output_tokens_max: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., cache_root: _Optional[bytes] = ..., adapter_digest: _Optional[str] = ..., priority: _Optional[int] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("epoch", "sequences")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequences: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., sequences: _Optional[_Iterable[int]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("prompt", "tokens")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("tokens", "elapsed_us", "engine", "base_digest", "active")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_US_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    elapsed_us: int
    engine: str
    base_digest: str
    active: int
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., elapsed_us: _Optional[int] = ..., engine: _Optional[str] = ..., base_digest: _Optional[str] = ..., active: _Optional[int] = ...) -> None: ...

class HostFrame(_message.Message):
    __slots__ = ("step", "probe", "attached", "refused")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    step: StepFrame
    probe: ProbeReply
    attached: Attached
    refused: Refused
    def __init__(self, step: _Optional[_Union[StepFrame, _Mapping]] = ..., probe: _Optional[_Union[ProbeReply, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("epoch", "limits", "state")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    limits: EngineLimits
    state: EngineState
    def __init__(self, epoch: _Optional[int] = ..., limits: _Optional[_Union[EngineLimits, _Mapping]] = ..., state: _Optional[_Union[EngineState, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class EngineLimits(_message.Message):
    __slots__ = ("context_tokens_max", "sequences_max", "step_tokens_max", "kv_blocks", "block_tokens", "base_digest", "engine")
    CONTEXT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_MAX_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    context_tokens_max: int
    sequences_max: int
    step_tokens_max: int
    kv_blocks: int
    block_tokens: int
    base_digest: str
    engine: str
    def __init__(self, context_tokens_max: _Optional[int] = ..., sequences_max: _Optional[int] = ..., step_tokens_max: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., block_tokens: _Optional[int] = ..., base_digest: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("step", "steps", "sequence", "count", "token", "admitted", "finished", "state", "kv_events")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    sequence: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    admitted: _containers.RepeatedCompositeFieldContainer[Admitted]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    state: EngineState
    kv_events: KvEvents
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., sequence: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., admitted: _Optional[_Iterable[_Union[Admitted, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., state: _Optional[_Union[EngineState, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("sequence", "queue_us", "cached_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    queue_us: int
    cached_tokens: int
    def __init__(self, sequence: _Optional[int] = ..., queue_us: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("sequence", "reason", "code", "message", "prompt_tokens", "output_tokens", "prefill_us")
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
    def __init__(self, sequence: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., prefill_us: _Optional[int] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("running", "waiting", "kv_blocks_used", "kv_blocks_total", "prefill_tokens_owed", "step_us", "adapters_resident")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_OWED_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prefill_tokens_owed: int
    step_us: int
    adapters_resident: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., prefill_tokens_owed: _Optional[int] = ..., step_us: _Optional[int] = ..., adapters_resident: _Optional[_Iterable[str]] = ...) -> None: ...

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
