from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_GATEWAY: _ClassVar[Role]
    ROLE_ROUTER: _ClassVar[Role]
    ROLE_OPERATOR: _ClassVar[Role]

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    REPLICA_STATE_STARTING: _ClassVar[ReplicaState]
    REPLICA_STATE_READY: _ClassVar[ReplicaState]
    REPLICA_STATE_DRAINING: _ClassVar[ReplicaState]
    REPLICA_STATE_FAILED: _ClassVar[ReplicaState]
    REPLICA_STATE_LOST: _ClassVar[ReplicaState]
    REPLICA_STATE_STOPPED: _ClassVar[ReplicaState]
    REPLICA_STATE_SLEEPING: _ClassVar[ReplicaState]
ROLE_UNSPECIFIED: Role
ROLE_GATEWAY: Role
ROLE_ROUTER: Role
ROLE_OPERATOR: Role
REPLICA_STATE_UNSPECIFIED: ReplicaState
REPLICA_STATE_STARTING: ReplicaState
REPLICA_STATE_READY: ReplicaState
REPLICA_STATE_DRAINING: ReplicaState
REPLICA_STATE_FAILED: ReplicaState
REPLICA_STATE_LOST: ReplicaState
REPLICA_STATE_STOPPED: ReplicaState
REPLICA_STATE_SLEEPING: ReplicaState

class WatchRequest(_message.Message):
    __slots__ = ("role", "instance_id", "address", "known_version", "takes_parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    TAKES_PARTS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    instance_id: str
    address: str
    known_version: int
    takes_parts: bool
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., instance_id: _Optional[str] = ..., address: _Optional[str] = ..., known_version: _Optional[int] = ..., takes_parts: _Optional[bool] = ...) -> None: ...

class ConfirmRequest(_message.Message):
    __slots__ = ("gateway_id", "version", "oldest_open_unix_ms", "missing_bases")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_OPEN_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MISSING_BASES_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    version: int
    oldest_open_unix_ms: int
    missing_bases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, gateway_id: _Optional[str] = ..., version: _Optional[int] = ..., oldest_open_unix_ms: _Optional[int] = ..., missing_bases: _Optional[_Iterable[str]] = ...) -> None: ...

class ConfirmResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AccuseRequest(_message.Message):
    __slots__ = ("router_id", "ejections")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    EJECTIONS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    ejections: _containers.RepeatedCompositeFieldContainer[Ejection]
    def __init__(self, router_id: _Optional[str] = ..., ejections: _Optional[_Iterable[_Union[Ejection, _Mapping]]] = ...) -> None: ...

class Ejection(_message.Message):
    __slots__ = ("replica_id", "cell_id", "epoch", "evidence", "wrong", "asked", "ejected_at_unix_ms")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    EJECTED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    cell_id: str
    epoch: int
    evidence: str
    wrong: int
    asked: int
    ejected_at_unix_ms: int
    def __init__(self, replica_id: _Optional[str] = ..., cell_id: _Optional[str] = ..., epoch: _Optional[int] = ..., evidence: _Optional[str] = ..., wrong: _Optional[int] = ..., asked: _Optional[int] = ..., ejected_at_unix_ms: _Optional[int] = ...) -> None: ...

class AccuseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportDemandRequest(_message.Message):
    __slots__ = ("router_id", "cells")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    cells: _containers.RepeatedCompositeFieldContainer[CellDemand]
    def __init__(self, router_id: _Optional[str] = ..., cells: _Optional[_Iterable[_Union[CellDemand, _Mapping]]] = ...) -> None: ...

class ReportDemandResponse(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class CellDemand(_message.Message):
    __slots__ = ("cell_id", "epoch", "number", "tiers", "running", "replicas_ready", "speed", "first_token_us")
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_READY_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    cell_id: str
    epoch: int
    number: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierDemand]
    running: int
    replicas_ready: int
    speed: EngineSpeed
    first_token_us: int
    def __init__(self, cell_id: _Optional[str] = ..., epoch: _Optional[int] = ..., number: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierDemand, _Mapping]]] = ..., running: _Optional[int] = ..., replicas_ready: _Optional[int] = ..., speed: _Optional[_Union[EngineSpeed, _Mapping]] = ..., first_token_us: _Optional[int] = ...) -> None: ...

class TierDemand(_message.Message):
    __slots__ = ("priority", "requests", "prompt_tokens", "output_tokens", "refused", "queued", "queued_prompt_tokens")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    priority: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    refused: int
    queued: int
    queued_prompt_tokens: int
    def __init__(self, priority: _Optional[int] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., refused: _Optional[int] = ..., queued: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ...) -> None: ...

class EngineSpeed(_message.Message):
    __slots__ = ("prompt_token_us", "output_token_us", "sequences", "steps")
    PROMPT_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_us: float
    output_token_us: float
    sequences: int
    steps: int
    def __init__(self, prompt_token_us: _Optional[float] = ..., output_token_us: _Optional[float] = ..., sequences: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("version", "is_snapshot", "upserts", "removals", "is_heartbeat", "is_part")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    UPSERTS_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    IS_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    IS_PART_FIELD_NUMBER: _ClassVar[int]
    version: int
    is_snapshot: bool
    upserts: Objects
    removals: Removals
    is_heartbeat: bool
    is_part: bool
    def __init__(self, version: _Optional[int] = ..., is_snapshot: _Optional[bool] = ..., upserts: _Optional[_Union[Objects, _Mapping]] = ..., removals: _Optional[_Union[Removals, _Mapping]] = ..., is_heartbeat: _Optional[bool] = ..., is_part: _Optional[bool] = ...) -> None: ...

class Objects(_message.Message):
    __slots__ = ("tiers", "tenants", "keys", "bases", "models", "pools", "cells", "replicas", "aliases", "releases", "splits", "budget_stops", "text_policies", "guard_sets", "server_tools", "auto_policies", "warm_prompts", "model_pools", "content_keys")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_STOPS_FIELD_NUMBER: _ClassVar[int]
    TEXT_POLICIES_FIELD_NUMBER: _ClassVar[int]
    GUARD_SETS_FIELD_NUMBER: _ClassVar[int]
    SERVER_TOOLS_FIELD_NUMBER: _ClassVar[int]
    AUTO_POLICIES_FIELD_NUMBER: _ClassVar[int]
    WARM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_POOLS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_KEYS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[Tier]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    keys: _containers.RepeatedCompositeFieldContainer[ApiKey]
    bases: _containers.RepeatedCompositeFieldContainer[Base]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    cells: _containers.RepeatedCompositeFieldContainer[Cell]
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    aliases: _containers.RepeatedCompositeFieldContainer[Alias]
    releases: _containers.RepeatedCompositeFieldContainer[Release]
    splits: _containers.RepeatedCompositeFieldContainer[Split]
    budget_stops: _containers.RepeatedCompositeFieldContainer[BudgetStops]
    text_policies: _containers.RepeatedCompositeFieldContainer[TextPolicy]
    guard_sets: _containers.RepeatedCompositeFieldContainer[GuardSet]
    server_tools: _containers.RepeatedCompositeFieldContainer[ServerTool]
    auto_policies: _containers.RepeatedCompositeFieldContainer[AutoPolicy]
    warm_prompts: _containers.RepeatedCompositeFieldContainer[WarmPrompts]
    model_pools: _containers.RepeatedCompositeFieldContainer[ModelPools]
    content_keys: _containers.RepeatedCompositeFieldContainer[ContentKeys]
    def __init__(self, tiers: _Optional[_Iterable[_Union[Tier, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[ApiKey, _Mapping]]] = ..., bases: _Optional[_Iterable[_Union[Base, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., cells: _Optional[_Iterable[_Union[Cell, _Mapping]]] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., aliases: _Optional[_Iterable[_Union[Alias, _Mapping]]] = ..., releases: _Optional[_Iterable[_Union[Release, _Mapping]]] = ..., splits: _Optional[_Iterable[_Union[Split, _Mapping]]] = ..., budget_stops: _Optional[_Iterable[_Union[BudgetStops, _Mapping]]] = ..., text_policies: _Optional[_Iterable[_Union[TextPolicy, _Mapping]]] = ..., guard_sets: _Optional[_Iterable[_Union[GuardSet, _Mapping]]] = ..., server_tools: _Optional[_Iterable[_Union[ServerTool, _Mapping]]] = ..., auto_policies: _Optional[_Iterable[_Union[AutoPolicy, _Mapping]]] = ..., warm_prompts: _Optional[_Iterable[_Union[WarmPrompts, _Mapping]]] = ..., model_pools: _Optional[_Iterable[_Union[ModelPools, _Mapping]]] = ..., content_keys: _Optional[_Iterable[_Union[ContentKeys, _Mapping]]] = ...) -> None: ...

class Removals(_message.Message):
    __slots__ = ("tiers", "tenants", "keys", "bases", "models", "pools", "cells", "replicas", "aliases", "releases", "splits", "budget_stops", "text_policies", "guard_sets", "server_tools", "auto_policies", "warm_prompts", "model_pools", "content_keys")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_STOPS_FIELD_NUMBER: _ClassVar[int]
    TEXT_POLICIES_FIELD_NUMBER: _ClassVar[int]
    GUARD_SETS_FIELD_NUMBER: _ClassVar[int]
    SERVER_TOOLS_FIELD_NUMBER: _ClassVar[int]
    AUTO_POLICIES_FIELD_NUMBER: _ClassVar[int]
    WARM_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_POOLS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_KEYS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[str]
    tenants: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedScalarFieldContainer[str]
    bases: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedScalarFieldContainer[str]
    pools: _containers.RepeatedScalarFieldContainer[str]
    cells: _containers.RepeatedScalarFieldContainer[str]
    replicas: _containers.RepeatedScalarFieldContainer[str]
    aliases: _containers.RepeatedScalarFieldContainer[str]
    releases: _containers.RepeatedScalarFieldContainer[str]
    splits: _containers.RepeatedScalarFieldContainer[str]
    budget_stops: _containers.RepeatedScalarFieldContainer[str]
    text_policies: _containers.RepeatedScalarFieldContainer[str]
    guard_sets: _containers.RepeatedScalarFieldContainer[str]
    server_tools: _containers.RepeatedScalarFieldContainer[str]
    auto_policies: _containers.RepeatedScalarFieldContainer[str]
    warm_prompts: _containers.RepeatedScalarFieldContainer[str]
    model_pools: _containers.RepeatedScalarFieldContainer[str]
    content_keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tiers: _Optional[_Iterable[str]] = ..., tenants: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[str]] = ..., bases: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[str]] = ..., pools: _Optional[_Iterable[str]] = ..., cells: _Optional[_Iterable[str]] = ..., replicas: _Optional[_Iterable[str]] = ..., aliases: _Optional[_Iterable[str]] = ..., releases: _Optional[_Iterable[str]] = ..., splits: _Optional[_Iterable[str]] = ..., budget_stops: _Optional[_Iterable[str]] = ..., text_policies: _Optional[_Iterable[str]] = ..., guard_sets: _Optional[_Iterable[str]] = ..., server_tools: _Optional[_Iterable[str]] = ..., auto_policies: _Optional[_Iterable[str]] = ..., warm_prompts: _Optional[_Iterable[str]] = ..., model_pools: _Optional[_Iterable[str]] = ..., content_keys: _Optional[_Iterable[str]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("rpm", "tpm", "requests_max", "context_tokens_max", "rpd")
    RPM_FIELD_NUMBER: _ClassVar[int]
    TPM_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_MAX_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    RPD_FIELD_NUMBER: _ClassVar[int]
    rpm: int
    tpm: int
    requests_max: int
    context_tokens_max: int
    rpd: int
    def __init__(self, rpm: _Optional[int] = ..., tpm: _Optional[int] = ..., requests_max: _Optional[int] = ..., context_tokens_max: _Optional[int] = ..., rpd: _Optional[int] = ...) -> None: ...

class Tier(_message.Message):
    __slots__ = ("id", "priority", "rpm", "tpm", "context_tokens_max", "ttft_deadline_ms", "reserved_permille", "is_preemptible", "requests_max", "model_limits", "rpd")
    class ModelLimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Limits
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RPM_FIELD_NUMBER: _ClassVar[int]
    TPM_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    TTFT_DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_PERMILLE_FIELD_NUMBER: _ClassVar[int]
    IS_PREEMPTIBLE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_MAX_FIELD_NUMBER: _ClassVar[int]
    MODEL_LIMITS_FIELD_NUMBER: _ClassVar[int]
    RPD_FIELD_NUMBER: _ClassVar[int]
    id: str
    priority: int
    rpm: int
    tpm: int
    context_tokens_max: int
    ttft_deadline_ms: int
    reserved_permille: int
    is_preemptible: bool
    requests_max: int
    model_limits: _containers.MessageMap[str, Limits]
    rpd: int
    def __init__(self, id: _Optional[str] = ..., priority: _Optional[int] = ..., rpm: _Optional[int] = ..., tpm: _Optional[int] = ..., context_tokens_max: _Optional[int] = ..., ttft_deadline_ms: _Optional[int] = ..., reserved_permille: _Optional[int] = ..., is_preemptible: _Optional[bool] = ..., requests_max: _Optional[int] = ..., model_limits: _Optional[_Mapping[str, Limits]] = ..., rpd: _Optional[int] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("id", "name", "tier_id", "cache_salt", "is_disabled", "weight", "limits", "fallbacks", "pins", "allows_server_urls", "gather_ms", "retention_hours")
    class FallbacksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class PinsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIER_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    IS_DISABLED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    ALLOWS_SERVER_URLS_FIELD_NUMBER: _ClassVar[int]
    GATHER_MS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_HOURS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    tier_id: str
    cache_salt: bytes
    is_disabled: bool
    weight: int
    limits: Limits
    fallbacks: _containers.ScalarMap[str, str]
    pins: _containers.ScalarMap[str, str]
    allows_server_urls: bool
    gather_ms: int
    retention_hours: int
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., tier_id: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., is_disabled: _Optional[bool] = ..., weight: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., fallbacks: _Optional[_Mapping[str, str]] = ..., pins: _Optional[_Mapping[str, str]] = ..., allows_server_urls: _Optional[bool] = ..., gather_ms: _Optional[int] = ..., retention_hours: _Optional[int] = ...) -> None: ...

class ApiKey(_message.Message):
    __slots__ = ("id", "tenant_id", "secret_sha256", "expires_at_unix_ms", "is_disabled", "rpm", "tpm", "requests_max", "scopes", "models", "rpd", "interval_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_SHA256_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    IS_DISABLED_FIELD_NUMBER: _ClassVar[int]
    RPM_FIELD_NUMBER: _ClassVar[int]
    TPM_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_MAX_FIELD_NUMBER: _ClassVar[int]
    SCOPES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RPD_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    tenant_id: str
    secret_sha256: bytes
    expires_at_unix_ms: int
    is_disabled: bool
    rpm: int
    tpm: int
    requests_max: int
    scopes: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedScalarFieldContainer[str]
    rpd: int
    interval_ms: int
    def __init__(self, id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., secret_sha256: _Optional[bytes] = ..., expires_at_unix_ms: _Optional[int] = ..., is_disabled: _Optional[bool] = ..., rpm: _Optional[int] = ..., tpm: _Optional[int] = ..., requests_max: _Optional[int] = ..., scopes: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[str]] = ..., rpd: _Optional[int] = ..., interval_ms: _Optional[int] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("digest", "name", "context_tokens_max", "canary_token_ids")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    CANARY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    name: str
    context_tokens_max: int
    canary_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digest: _Optional[str] = ..., name: _Optional[str] = ..., context_tokens_max: _Optional[int] = ..., canary_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "base_digest", "adapter_digest", "release", "owner_tenant_id", "created_at_unix_s", "pool_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    OWNER_TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    base_digest: str
    adapter_digest: str
    release: str
    owner_tenant_id: str
    created_at_unix_s: int
    pool_id: str
    def __init__(self, id: _Optional[str] = ..., base_digest: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., release: _Optional[str] = ..., owner_tenant_id: _Optional[str] = ..., created_at_unix_s: _Optional[int] = ..., pool_id: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("id", "model_id", "base_digest", "adapter_digest", "pool_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    model_id: str
    base_digest: str
    adapter_digest: str
    pool_id: str
    def __init__(self, id: _Optional[str] = ..., model_id: _Optional[str] = ..., base_digest: _Optional[str] = ..., adapter_digest: _Optional[str] = ..., pool_id: _Optional[str] = ...) -> None: ...

class Split(_message.Message):
    __slots__ = ("id", "rollout_id", "control", "canary", "share", "mirrored", "salt")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    MIRRORED_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    id: str
    rollout_id: str
    control: str
    canary: str
    share: int
    mirrored: int
    salt: str
    def __init__(self, id: _Optional[str] = ..., rollout_id: _Optional[str] = ..., control: _Optional[str] = ..., canary: _Optional[str] = ..., share: _Optional[int] = ..., mirrored: _Optional[int] = ..., salt: _Optional[str] = ...) -> None: ...

class BudgetStops(_message.Message):
    __slots__ = ("id", "stops")
    ID_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    id: str
    stops: _containers.RepeatedCompositeFieldContainer[BudgetStop]
    def __init__(self, id: _Optional[str] = ..., stops: _Optional[_Iterable[_Union[BudgetStop, _Mapping]]] = ...) -> None: ...

class BudgetStop(_message.Message):
    __slots__ = ("name", "model_id", "unit", "amount", "period", "ends_at_unix_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_id: str
    unit: str
    amount: int
    period: str
    ends_at_unix_ms: int
    def __init__(self, name: _Optional[str] = ..., model_id: _Optional[str] = ..., unit: _Optional[str] = ..., amount: _Optional[int] = ..., period: _Optional[str] = ..., ends_at_unix_ms: _Optional[int] = ...) -> None: ...

class TextPolicy(_message.Message):
    __slots__ = ("id", "is_on", "share", "retention_days", "redacted", "words")
    ID_FIELD_NUMBER: _ClassVar[int]
    IS_ON_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_DAYS_FIELD_NUMBER: _ClassVar[int]
    REDACTED_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    id: str
    is_on: bool
    share: int
    retention_days: int
    redacted: _containers.RepeatedScalarFieldContainer[str]
    words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., is_on: _Optional[bool] = ..., share: _Optional[int] = ..., retention_days: _Optional[int] = ..., redacted: _Optional[_Iterable[str]] = ..., words: _Optional[_Iterable[str]] = ...) -> None: ...

class GuardRule(_message.Message):
    __slots__ = ("id", "action", "targets", "words", "expression", "named", "is_case_sensitive", "is_within_words", "replacement", "classifier", "category", "threshold")
    ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    IS_CASE_SENSITIVE_FIELD_NUMBER: _ClassVar[int]
    IS_WITHIN_WORDS_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    CLASSIFIER_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    id: str
    action: str
    targets: _containers.RepeatedScalarFieldContainer[str]
    words: _containers.RepeatedScalarFieldContainer[str]
    expression: str
    named: str
    is_case_sensitive: bool
    is_within_words: bool
    replacement: str
    classifier: str
    category: str
    threshold: float
    def __init__(self, id: _Optional[str] = ..., action: _Optional[str] = ..., targets: _Optional[_Iterable[str]] = ..., words: _Optional[_Iterable[str]] = ..., expression: _Optional[str] = ..., named: _Optional[str] = ..., is_case_sensitive: _Optional[bool] = ..., is_within_words: _Optional[bool] = ..., replacement: _Optional[str] = ..., classifier: _Optional[str] = ..., category: _Optional[str] = ..., threshold: _Optional[float] = ...) -> None: ...

class WarmPrompts(_message.Message):
    __slots__ = ("id", "prompts")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    prompts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., prompts: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelPools(_message.Message):
    __slots__ = ("id", "pools")
    ID_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    id: str
    pools: _containers.RepeatedCompositeFieldContainer[ModelPool]
    def __init__(self, id: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[ModelPool, _Mapping]]] = ...) -> None: ...

class ModelPool(_message.Message):
    __slots__ = ("pool_id", "weight", "price", "is_other_base")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    IS_OTHER_BASE_FIELD_NUMBER: _ClassVar[int]
    pool_id: str
    weight: float
    price: float
    is_other_base: bool
    def __init__(self, pool_id: _Optional[str] = ..., weight: _Optional[float] = ..., price: _Optional[float] = ..., is_other_base: _Optional[bool] = ...) -> None: ...

class GuardSet(_message.Message):
    __slots__ = ("id", "owner_tenant_id", "models", "keys", "version", "rules", "active_version", "active_rules", "is_withheld_free", "fence", "fence_tokens", "is_closed_on_failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_RULES_FIELD_NUMBER: _ClassVar[int]
    IS_WITHHELD_FREE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    FENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_CLOSED_ON_FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: str
    owner_tenant_id: str
    models: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedScalarFieldContainer[str]
    version: int
    rules: _containers.RepeatedCompositeFieldContainer[GuardRule]
    active_version: int
    active_rules: _containers.RepeatedCompositeFieldContainer[GuardRule]
    is_withheld_free: bool
    fence: str
    fence_tokens: int
    is_closed_on_failure: bool
    def __init__(self, id: _Optional[str] = ..., owner_tenant_id: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[str]] = ..., version: _Optional[int] = ..., rules: _Optional[_Iterable[_Union[GuardRule, _Mapping]]] = ..., active_version: _Optional[int] = ..., active_rules: _Optional[_Iterable[_Union[GuardRule, _Mapping]]] = ..., is_withheld_free: _Optional[bool] = ..., fence: _Optional[str] = ..., fence_tokens: _Optional[int] = ..., is_closed_on_failure: _Optional[bool] = ...) -> None: ...

class ServerTool(_message.Message):
    __slots__ = ("id", "owner_tenant_id", "kind", "name", "description", "parameters", "url", "method", "timeout_ms", "result_bytes_max", "secret_headers", "is_idempotent", "approval", "allowed_tools", "models", "keys", "price_micros")
    class SecretHeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    RESULT_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SECRET_HEADERS_FIELD_NUMBER: _ClassVar[int]
    IS_IDEMPOTENT_FIELD_NUMBER: _ClassVar[int]
    APPROVAL_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOOLS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PRICE_MICROS_FIELD_NUMBER: _ClassVar[int]
    id: str
    owner_tenant_id: str
    kind: str
    name: str
    description: str
    parameters: str
    url: str
    method: str
    timeout_ms: int
    result_bytes_max: int
    secret_headers: _containers.ScalarMap[str, str]
    is_idempotent: bool
    approval: str
    allowed_tools: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedScalarFieldContainer[str]
    price_micros: int
    def __init__(self, id: _Optional[str] = ..., owner_tenant_id: _Optional[str] = ..., kind: _Optional[str] = ..., name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ..., url: _Optional[str] = ..., method: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., result_bytes_max: _Optional[int] = ..., secret_headers: _Optional[_Mapping[str, str]] = ..., is_idempotent: _Optional[bool] = ..., approval: _Optional[str] = ..., allowed_tools: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[str]] = ..., price_micros: _Optional[int] = ...) -> None: ...

class AutoModel(_message.Message):
    __slots__ = ("model", "prompt_price", "cached_price", "output_price", "published", "quality")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PRICE_FIELD_NUMBER: _ClassVar[int]
    CACHED_PRICE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_PRICE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt_price: float
    cached_price: float
    output_price: float
    published: str
    quality: float
    def __init__(self, model: _Optional[str] = ..., prompt_price: _Optional[float] = ..., cached_price: _Optional[float] = ..., output_price: _Optional[float] = ..., published: _Optional[str] = ..., quality: _Optional[float] = ...) -> None: ...

class AutoCell(_message.Message):
    __slots__ = ("cluster", "model", "release", "good", "bad")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    GOOD_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    cluster: int
    model: str
    release: str
    good: float
    bad: float
    def __init__(self, cluster: _Optional[int] = ..., model: _Optional[str] = ..., release: _Optional[str] = ..., good: _Optional[float] = ..., bad: _Optional[float] = ...) -> None: ...

class AutoPolicy(_message.Message):
    __slots__ = ("id", "candidates", "price_max", "quality_min", "second_price", "miss_price", "explored_share", "queue_priority_min", "pin", "scheme", "cells")
    ID_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    PRICE_MAX_FIELD_NUMBER: _ClassVar[int]
    QUALITY_MIN_FIELD_NUMBER: _ClassVar[int]
    SECOND_PRICE_FIELD_NUMBER: _ClassVar[int]
    MISS_PRICE_FIELD_NUMBER: _ClassVar[int]
    EXPLORED_SHARE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PRIORITY_MIN_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    id: str
    candidates: _containers.RepeatedCompositeFieldContainer[AutoModel]
    price_max: float
    quality_min: float
    second_price: float
    miss_price: float
    explored_share: float
    queue_priority_min: int
    pin: str
    scheme: int
    cells: _containers.RepeatedCompositeFieldContainer[AutoCell]
    def __init__(self, id: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[AutoModel, _Mapping]]] = ..., price_max: _Optional[float] = ..., quality_min: _Optional[float] = ..., second_price: _Optional[float] = ..., miss_price: _Optional[float] = ..., explored_share: _Optional[float] = ..., queue_priority_min: _Optional[int] = ..., pin: _Optional[str] = ..., scheme: _Optional[int] = ..., cells: _Optional[_Iterable[_Union[AutoCell, _Mapping]]] = ...) -> None: ...

class Alias(_message.Message):
    __slots__ = ("id", "owner_tenant_id", "target")
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    id: str
    owner_tenant_id: str
    target: str
    def __init__(self, id: _Optional[str] = ..., owner_tenant_id: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("id", "base_digest", "engine", "replicas_wanted", "engine_options")
    class EngineOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_WANTED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    id: str
    base_digest: str
    engine: str
    replicas_wanted: int
    engine_options: _containers.ScalarMap[str, str]
    def __init__(self, id: _Optional[str] = ..., base_digest: _Optional[str] = ..., engine: _Optional[str] = ..., replicas_wanted: _Optional[int] = ..., engine_options: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Cell(_message.Message):
    __slots__ = ("id", "pool_id", "router_id", "router_address", "epoch", "is_draining")
    ID_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    id: str
    pool_id: str
    router_id: str
    router_address: str
    epoch: int
    is_draining: bool
    def __init__(self, id: _Optional[str] = ..., pool_id: _Optional[str] = ..., router_id: _Optional[str] = ..., router_address: _Optional[str] = ..., epoch: _Optional[int] = ..., is_draining: _Optional[bool] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("id", "pool_id", "cell_id", "node_id", "grpc_address", "triton_model", "state", "profile", "role", "accelerators", "is_quarantined", "sleeps")
    ID_FIELD_NUMBER: _ClassVar[int]
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    CELL_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRITON_MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ACCELERATORS_FIELD_NUMBER: _ClassVar[int]
    IS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    SLEEPS_FIELD_NUMBER: _ClassVar[int]
    id: str
    pool_id: str
    cell_id: str
    node_id: str
    grpc_address: str
    triton_model: str
    state: ReplicaState
    profile: str
    role: str
    accelerators: _containers.RepeatedScalarFieldContainer[int]
    is_quarantined: bool
    sleeps: bool
    def __init__(self, id: _Optional[str] = ..., pool_id: _Optional[str] = ..., cell_id: _Optional[str] = ..., node_id: _Optional[str] = ..., grpc_address: _Optional[str] = ..., triton_model: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., profile: _Optional[str] = ..., role: _Optional[str] = ..., accelerators: _Optional[_Iterable[int]] = ..., is_quarantined: _Optional[bool] = ..., sleeps: _Optional[bool] = ...) -> None: ...

class ContentKeys(_message.Message):
    __slots__ = ("id", "keys", "erased_at_unix_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ERASED_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    keys: _containers.RepeatedCompositeFieldContainer[ContentKey]
    erased_at_unix_ms: int
    def __init__(self, id: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[ContentKey, _Mapping]]] = ..., erased_at_unix_ms: _Optional[int] = ...) -> None: ...

class ContentKey(_message.Message):
    __slots__ = ("number", "sealed", "made_at_unix_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    MADE_AT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    sealed: str
    made_at_unix_ms: int
    def __init__(self, number: _Optional[int] = ..., sealed: _Optional[str] = ..., made_at_unix_ms: _Optional[int] = ...) -> None: ...
