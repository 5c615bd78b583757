from sluice.wire.control.v1 import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SyncRequest(_message.Message):
    __slots__ = ("node_id", "replicas", "facts", "is_cordoned", "cordon_reason", "golden_results", "keeps_golden_prompts", "trial_results")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    IS_CORDONED_FIELD_NUMBER: _ClassVar[int]
    CORDON_REASON_FIELD_NUMBER: _ClassVar[int]
    GOLDEN_RESULTS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_GOLDEN_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    TRIAL_RESULTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    replicas: _containers.RepeatedCompositeFieldContainer[ObservedReplica]
    facts: NodeFacts
    is_cordoned: bool
    cordon_reason: str
    golden_results: _containers.RepeatedCompositeFieldContainer[GoldenResult]
    keeps_golden_prompts: bool
    trial_results: _containers.RepeatedCompositeFieldContainer[TrialResult]
    def __init__(self, node_id: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[ObservedReplica, _Mapping]]] = ..., facts: _Optional[_Union[NodeFacts, _Mapping]] = ..., is_cordoned: _Optional[bool] = ..., cordon_reason: _Optional[str] = ..., golden_results: _Optional[_Iterable[_Union[GoldenResult, _Mapping]]] = ..., keeps_golden_prompts: _Optional[bool] = ..., trial_results: _Optional[_Iterable[_Union[TrialResult, _Mapping]]] = ...) -> None: ...

class Trial(_message.Message):
    __slots__ = ("rollout_id", "pool_id", "adapter_digest")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    pool_id: str
    adapter_digest: str
    def __init__(self, rollout_id: _Optional[str] = ..., pool_id: _Optional[str] = ..., adapter_digest: _Optional[str] = ...) -> None: ...

class TrialResult(_message.Message):
    __slots__ = ("rollout_id", "code", "message")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    code: str
    message: str
    def __init__(self, rollout_id: _Optional[str] = ..., code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class GoldenResult(_message.Message):
    __slots__ = ("replica_id", "prompt_id", "token_ids", "logprobs", "asked_at_unix_ms", "error")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ASKED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    prompt_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    asked_at_unix_ms: int
    error: str
    def __init__(self, replica_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., asked_at_unix_ms: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class GoldenPrompt(_message.Message):
    __slots__ = ("id", "base_digest", "adapter_digest", "token_ids", "output_tokens_max", "every_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    id: str
    base_digest: str
    adapter_digest: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_tokens_max: int
    every_s: int
    def __init__(self, id: _Optional[str] = ..., base_digest: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., output_tokens_max: _Optional[int] = ..., every_s: _Optional[int] = ...) -> None: ...

class NodeFacts(_message.Message):
    __slots__ = ("cpu_count", "memory_bytes", "accelerators", "engines", "accelerator_facts", "region", "rack")
    CPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCELERATORS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_FACTS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    cpu_count: int
    memory_bytes: int
    accelerators: _containers.RepeatedScalarFieldContainer[str]
    engines: _containers.RepeatedScalarFieldContainer[str]
    accelerator_facts: _containers.RepeatedCompositeFieldContainer[Accelerator]
    region: str
    rack: str
    def __init__(self, cpu_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., accelerators: _Optional[_Iterable[str]] = ..., engines: _Optional[_Iterable[str]] = ..., accelerator_facts: _Optional[_Iterable[_Union[Accelerator, _Mapping]]] = ..., region: _Optional[str] = ..., rack: _Optional[str] = ...) -> None: ...

class Accelerator(_message.Message):
    __slots__ = ("index", "uuid", "name", "memory_bytes", "memory_used_bytes", "temperature_c", "power_w", "cordon")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    CORDON_FIELD_NUMBER: _ClassVar[int]
    index: int
    uuid: str
    name: str
    memory_bytes: int
    memory_used_bytes: int
    temperature_c: int
    power_w: float
    cordon: Cordon
    def __init__(self, index: _Optional[int] = ..., uuid: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., temperature_c: _Optional[int] = ..., power_w: _Optional[float] = ..., cordon: _Optional[_Union[Cordon, _Mapping]] = ...) -> None: ...

class Cordon(_message.Message):
    __slots__ = ("id", "reason", "since_unix_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    reason: str
    since_unix_ms: int
    def __init__(self, id: _Optional[str] = ..., reason: _Optional[str] = ..., since_unix_ms: _Optional[int] = ...) -> None: ...

class ObservedReplica(_message.Message):
    __slots__ = ("replica_id", "state", "grpc_address", "metrics_address", "pid", "memory_bytes", "restarts", "message")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    state: _control_pb2.ReplicaState
    grpc_address: str
    metrics_address: str
    pid: int
    memory_bytes: int
    restarts: int
    message: str
    def __init__(self, replica_id: _Optional[str] = ..., state: _Optional[_Union[_control_pb2.ReplicaState, str]] = ..., grpc_address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., pid: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., restarts: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class SyncResponse(_message.Message):
    __slots__ = ("version", "replicas", "lifted_cordons", "golden_prompts", "trials", "golden_unchanged")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LIFTED_CORDONS_FIELD_NUMBER: _ClassVar[int]
    GOLDEN_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    TRIALS_FIELD_NUMBER: _ClassVar[int]
    GOLDEN_UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    version: int
    replicas: _containers.RepeatedCompositeFieldContainer[DesiredReplica]
    lifted_cordons: _containers.RepeatedScalarFieldContainer[str]
    golden_prompts: _containers.RepeatedCompositeFieldContainer[GoldenPrompt]
    trials: _containers.RepeatedCompositeFieldContainer[Trial]
    golden_unchanged: bool
    def __init__(self, version: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[DesiredReplica, _Mapping]]] = ..., lifted_cordons: _Optional[_Iterable[str]] = ..., golden_prompts: _Optional[_Iterable[_Union[GoldenPrompt, _Mapping]]] = ..., trials: _Optional[_Iterable[_Union[Trial, _Mapping]]] = ..., golden_unchanged: _Optional[bool] = ...) -> None: ...

class DesiredReplica(_message.Message):
    __slots__ = ("replica_id", "pool_id", "base_digest", "engine", "is_draining", "engine_options", "accelerators", "is_quarantined", "sleeps", "accused_at_unix_ms", "suspected_at_unix_ms")
    class EngineOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    ENGINE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ACCELERATORS_FIELD_NUMBER: _ClassVar[int]
    IS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    SLEEPS_FIELD_NUMBER: _ClassVar[int]
    ACCUSED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SUSPECTED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    pool_id: str
    base_digest: str
    engine: str
    is_draining: bool
    engine_options: _containers.ScalarMap[str, str]
    accelerators: _containers.RepeatedScalarFieldContainer[int]
    is_quarantined: bool
    sleeps: bool
    accused_at_unix_ms: int
    suspected_at_unix_ms: int
    def __init__(self, replica_id: _Optional[str] = ..., pool_id: _Optional[str] = ..., base_digest: _Optional[str] = ..., engine: _Optional[str] = ..., is_draining: _Optional[bool] = ..., engine_options: _Optional[_Mapping[str, str]] = ..., accelerators: _Optional[_Iterable[int]] = ..., is_quarantined: _Optional[bool] = ..., sleeps: _Optional[bool] = ..., accused_at_unix_ms: _Optional[int] = ..., suspected_at_unix_ms: _Optional[int] = ...) -> None: ...
