from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_NEEDED: _ClassVar[Priority]
    PRIORITY_WARMING: _ClassVar[Priority]
    PRIORITY_PREFETCH: _ClassVar[Priority]

class Trouble(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TROUBLE_UNSPECIFIED: _ClassVar[Trouble]
    TROUBLE_CORRUPT: _ClassVar[Trouble]
    TROUBLE_TIMEOUT: _ClassVar[Trouble]
    TROUBLE_REFUSED: _ClassVar[Trouble]
PRIORITY_UNSPECIFIED: Priority
PRIORITY_NEEDED: Priority
PRIORITY_WARMING: Priority
PRIORITY_PREFETCH: Priority
TROUBLE_UNSPECIFIED: Trouble
TROUBLE_CORRUPT: Trouble
TROUBLE_TIMEOUT: Trouble
TROUBLE_REFUSED: Trouble

class DistributionReport(_message.Message):
    __slots__ = ("node_id", "boot_id", "region", "rack", "peer_address", "held", "is_full", "failures", "needed", "free_bytes", "declined", "knows_unchanged")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    KNOWS_UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: str
    region: str
    rack: str
    peer_address: str
    held: _containers.RepeatedCompositeFieldContainer[Held]
    is_full: bool
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    needed: _containers.RepeatedScalarFieldContainer[str]
    free_bytes: int
    declined: _containers.RepeatedScalarFieldContainer[str]
    knows_unchanged: bool
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., region: _Optional[str] = ..., rack: _Optional[str] = ..., peer_address: _Optional[str] = ..., held: _Optional[_Iterable[_Union[Held, _Mapping]]] = ..., is_full: _Optional[bool] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., needed: _Optional[_Iterable[str]] = ..., free_bytes: _Optional[int] = ..., declined: _Optional[_Iterable[str]] = ..., knows_unchanged: _Optional[bool] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("digest", "chunks", "is_complete")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    chunks: bytes
    is_complete: bool
    def __init__(self, digest: _Optional[str] = ..., chunks: _Optional[bytes] = ..., is_complete: _Optional[bool] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("digest", "chunk", "source_node_id", "trouble")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    chunk: int
    source_node_id: str
    trouble: Trouble
    def __init__(self, digest: _Optional[str] = ..., chunk: _Optional[int] = ..., source_node_id: _Optional[str] = ..., trouble: _Optional[_Union[Trouble, str]] = ...) -> None: ...

class DistributionAnswer(_message.Message):
    __slots__ = ("wanted", "orders", "wants_full", "is_wanted_unchanged", "own", "peer_keys")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    WANTS_FULL_FIELD_NUMBER: _ClassVar[int]
    IS_WANTED_UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    PEER_KEYS_FIELD_NUMBER: _ClassVar[int]
    wanted: _containers.RepeatedCompositeFieldContainer[Wanted]
    orders: _containers.RepeatedCompositeFieldContainer[Order]
    wants_full: bool
    is_wanted_unchanged: bool
    own: _containers.RepeatedCompositeFieldContainer[Wanted]
    peer_keys: _containers.RepeatedCompositeFieldContainer[PeerKey]
    def __init__(self, wanted: _Optional[_Iterable[_Union[Wanted, _Mapping]]] = ..., orders: _Optional[_Iterable[_Union[Order, _Mapping]]] = ..., wants_full: _Optional[bool] = ..., is_wanted_unchanged: _Optional[bool] = ..., own: _Optional[_Iterable[_Union[Wanted, _Mapping]]] = ..., peer_keys: _Optional[_Iterable[_Union[PeerKey, _Mapping]]] = ...) -> None: ...

class PeerKey(_message.Message):
    __slots__ = ("id", "key")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    id: int
    key: bytes
    def __init__(self, id: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("digest", "priority")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    digest: str
    priority: Priority
    def __init__(self, digest: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("digest", "start", "stop", "source_node_id", "source_address", "priority", "ticket")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    digest: str
    start: int
    stop: int
    source_node_id: str
    source_address: str
    priority: Priority
    ticket: str
    def __init__(self, digest: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., source_node_id: _Optional[str] = ..., source_address: _Optional[str] = ..., priority: _Optional[_Union[Priority, str]] = ..., ticket: _Optional[str] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class ManifestPiece(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class TextFileRequest(_message.Message):
    __slots__ = ("digest", "name")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    digest: str
    name: str
    def __init__(self, digest: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class TextFilePiece(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    def __init__(self, content: _Optional[bytes] = ...) -> None: ...
