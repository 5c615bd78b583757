from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoredResponse(_message.Message):
    __slots__ = ("id", "tenant_id", "created_at_unix_ms", "ancestors", "input_items", "response", "prompt", "deltas")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ANCESTORS_FIELD_NUMBER: _ClassVar[int]
    INPUT_ITEMS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant_id: str
    created_at_unix_ms: int
    ancestors: _containers.RepeatedScalarFieldContainer[str]
    input_items: bytes
    response: bytes
    prompt: bytes
    deltas: bytes
    def __init__(self, id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., created_at_unix_ms: _Optional[int] = ..., ancestors: _Optional[_Iterable[str]] = ..., input_items: _Optional[bytes] = ..., response: _Optional[bytes] = ..., prompt: _Optional[bytes] = ..., deltas: _Optional[bytes] = ...) -> None: ...

class StoredPrompt(_message.Message):
    __slots__ = ("said", "messages", "after", "hashes", "packed", "rest", "opening", "tail", "ending", "characters", "given")
    SAID_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    said: bytes
    messages: int
    after: bytes
    hashes: bytes
    packed: bytes
    rest: _containers.RepeatedScalarFieldContainer[int]
    opening: str
    tail: str
    ending: str
    characters: int
    given: int
    def __init__(self, said: _Optional[bytes] = ..., messages: _Optional[int] = ..., after: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., packed: _Optional[bytes] = ..., rest: _Optional[_Iterable[int]] = ..., opening: _Optional[str] = ..., tail: _Optional[str] = ..., ending: _Optional[str] = ..., characters: _Optional[int] = ..., given: _Optional[int] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[StoredResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[StoredResponse, _Mapping]]] = ...) -> None: ...

class KeepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("tenant_id", "ids")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant_id: _Optional[str] = ..., ids: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("tenant_id", "id")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    id: str
    def __init__(self, tenant_id: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ("existed",)
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    existed: bool
    def __init__(self, existed: _Optional[bool] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("id", "tenant_id", "kind", "created_at_unix_ms", "metadata", "content", "model")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant_id: str
    kind: str
    created_at_unix_ms: int
    metadata: _containers.ScalarMap[str, str]
    content: bytes
    model: str
    def __init__(self, id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., kind: _Optional[str] = ..., created_at_unix_ms: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., content: _Optional[bytes] = ..., model: _Optional[str] = ...) -> None: ...

class RecordItem(_message.Message):
    __slots__ = ("id", "content")
    ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    id: str
    content: bytes
    def __init__(self, id: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class CreateRecordRequest(_message.Message):
    __slots__ = ("record", "items")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    record: Record
    items: _containers.RepeatedCompositeFieldContainer[RecordItem]
    def __init__(self, record: _Optional[_Union[Record, _Mapping]] = ..., items: _Optional[_Iterable[_Union[RecordItem, _Mapping]]] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("tenant_id", "id")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    id: str
    def __init__(self, tenant_id: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class ListRecordsRequest(_message.Message):
    __slots__ = ("tenant_id", "kind", "after", "limit", "is_ascending", "metadata", "model")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    IS_ASCENDING_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    kind: str
    after: str
    limit: int
    is_ascending: bool
    metadata: _containers.ScalarMap[str, str]
    model: str
    def __init__(self, tenant_id: _Optional[str] = ..., kind: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., is_ascending: _Optional[bool] = ..., metadata: _Optional[_Mapping[str, str]] = ..., model: _Optional[str] = ...) -> None: ...

class ChangeRecordRequest(_message.Message):
    __slots__ = ("tenant_id", "id", "metadata", "content")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    id: str
    metadata: _containers.ScalarMap[str, str]
    content: bytes
    def __init__(self, tenant_id: _Optional[str] = ..., id: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ..., content: _Optional[bytes] = ...) -> None: ...

class RemoveRecordResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AppendItemsRequest(_message.Message):
    __slots__ = ("tenant_id", "id", "items", "items_max")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_MAX_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    id: str
    items: _containers.RepeatedCompositeFieldContainer[RecordItem]
    items_max: int
    def __init__(self, tenant_id: _Optional[str] = ..., id: _Optional[str] = ..., items: _Optional[_Iterable[_Union[RecordItem, _Mapping]]] = ..., items_max: _Optional[int] = ...) -> None: ...

class AppendItemsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListItemsRequest(_message.Message):
    __slots__ = ("tenant_id", "id", "after", "limit", "is_ascending", "item_ids")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    IS_ASCENDING_FIELD_NUMBER: _ClassVar[int]
    ITEM_IDS_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    id: str
    after: str
    limit: int
    is_ascending: bool
    item_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant_id: _Optional[str] = ..., id: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., is_ascending: _Optional[bool] = ..., item_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RemoveItemRequest(_message.Message):
    __slots__ = ("tenant_id", "id", "item_id")
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    tenant_id: str
    id: str
    item_id: str
    def __init__(self, tenant_id: _Optional[str] = ..., id: _Optional[str] = ..., item_id: _Optional[str] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("id", "tenant_id", "key_id", "endpoint", "input_file_id", "status", "created_at_unix_ms", "expires_at_unix_ms", "metadata", "total", "completed", "failed", "output_file_id", "error_file_id", "errors", "reached_at_unix_ms")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ReachedAtUnixMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    INPUT_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FILE_ID_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    REACHED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    status: str
    created_at_unix_ms: int
    expires_at_unix_ms: int
    metadata: _containers.ScalarMap[str, str]
    total: int
    completed: int
    failed: int
    output_file_id: str
    error_file_id: str
    errors: bytes
    reached_at_unix_ms: _containers.ScalarMap[str, int]
    def __init__(self, id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., key_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., input_file_id: _Optional[str] = ..., status: _Optional[str] = ..., created_at_unix_ms: _Optional[int] = ..., expires_at_unix_ms: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ..., total: _Optional[int] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., output_file_id: _Optional[str] = ..., error_file_id: _Optional[str] = ..., errors: _Optional[bytes] = ..., reached_at_unix_ms: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LineName(_message.Message):
    __slots__ = ("batch_id", "number")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    number: int
    def __init__(self, batch_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class BatchLine(_message.Message):
    __slots__ = ("name", "tenant_id", "key_id", "endpoint", "body")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    name: LineName
    tenant_id: str
    key_id: str
    endpoint: str
    body: bytes
    def __init__(self, name: _Optional[_Union[LineName, _Mapping]] = ..., tenant_id: _Optional[str] = ..., key_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class LineResult(_message.Message):
    __slots__ = ("name", "status", "request_id", "body")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    name: LineName
    status: int
    request_id: str
    body: bytes
    def __init__(self, name: _Optional[_Union[LineName, _Mapping]] = ..., status: _Optional[int] = ..., request_id: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class SyncLinesRequest(_message.Message):
    __slots__ = ("gateway_id", "wanted", "under_way", "given_back", "results")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    UNDER_WAY_FIELD_NUMBER: _ClassVar[int]
    GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    wanted: int
    under_way: _containers.RepeatedCompositeFieldContainer[LineName]
    given_back: _containers.RepeatedCompositeFieldContainer[LineName]
    results: _containers.RepeatedCompositeFieldContainer[LineResult]
    def __init__(self, gateway_id: _Optional[str] = ..., wanted: _Optional[int] = ..., under_way: _Optional[_Iterable[_Union[LineName, _Mapping]]] = ..., given_back: _Optional[_Iterable[_Union[LineName, _Mapping]]] = ..., results: _Optional[_Iterable[_Union[LineResult, _Mapping]]] = ...) -> None: ...

class SyncLinesResponse(_message.Message):
    __slots__ = ("lines", "lost")
    LINES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[BatchLine]
    lost: _containers.RepeatedCompositeFieldContainer[LineName]
    def __init__(self, lines: _Optional[_Iterable[_Union[BatchLine, _Mapping]]] = ..., lost: _Optional[_Iterable[_Union[LineName, _Mapping]]] = ...) -> None: ...
