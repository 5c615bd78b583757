from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class TextEvent(_message.Message):
    __slots__ = ("schema_version", "event_id", "received_at_unix_ms", "request_id", "tenant_id", "model", "endpoint", "prompt", "answers", "is_prompt_cut", "is_answer_cut", "expires_at_unix_ms", "redactions", "outcome")
    class RedactionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    IS_PROMPT_CUT_FIELD_NUMBER: _ClassVar[int]
    IS_ANSWER_CUT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REDACTIONS_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    event_id: str
    received_at_unix_ms: int
    request_id: str
    tenant_id: str
    model: str
    endpoint: str
    prompt: str
    answers: str
    is_prompt_cut: bool
    is_answer_cut: bool
    expires_at_unix_ms: int
    redactions: _containers.ScalarMap[str, int]
    outcome: str
    def __init__(self, schema_version: _Optional[int] = ..., event_id: _Optional[str] = ..., received_at_unix_ms: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., model: _Optional[str] = ..., endpoint: _Optional[str] = ..., prompt: _Optional[str] = ..., answers: _Optional[str] = ..., is_prompt_cut: _Optional[bool] = ..., is_answer_cut: _Optional[bool] = ..., expires_at_unix_ms: _Optional[int] = ..., redactions: _Optional[_Mapping[str, int]] = ..., outcome: _Optional[str] = ...) -> None: ...
