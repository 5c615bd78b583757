from sluice.wire.control.v1 import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SyncRequest(_message.Message):
    __slots__ = ("node_id", "replicas", "facts")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    replicas: _containers.RepeatedCompositeFieldContainer[ObservedReplica]
    facts: NodeFacts
    def __init__(self, node_id: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[ObservedReplica, _Mapping]]] = ..., facts: _Optional[_Union[NodeFacts, _Mapping]] = ...) -> None: ...

class NodeFacts(_message.Message):
    __slots__ = ("cpu_count", "memory_bytes", "accelerators", "engines")
    CPU_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCELERATORS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    cpu_count: int
    memory_bytes: int
    accelerators: _containers.RepeatedScalarFieldContainer[str]
    engines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cpu_count: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., accelerators: _Optional[_Iterable[str]] = ..., engines: _Optional[_Iterable[str]] = ...) -> None: ...

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
    __slots__ = ("version", "replicas")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    version: int
    replicas: _containers.RepeatedCompositeFieldContainer[DesiredReplica]
    def __init__(self, version: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[DesiredReplica, _Mapping]]] = ...) -> None: ...

class DesiredReplica(_message.Message):
    __slots__ = ("replica_id", "pool_id", "base_digest", "engine", "is_draining", "engine_options")
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
    replica_id: str
    pool_id: str
    base_digest: str
    engine: str
    is_draining: bool
    engine_options: _containers.ScalarMap[str, str]
    def __init__(self, replica_id: _Optional[str] = ..., pool_id: _Optional[str] = ..., base_digest: _Optional[str] = ..., engine: _Optional[str] = ..., is_draining: _Optional[bool] = ..., engine_options: _Optional[_Mapping[str, str]] = ...) -> None: ...
