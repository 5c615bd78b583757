"""Bodies of tiers, tenants and their API keys."""

import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, Field, create_model, model_serializer

from control_plane.fields import AdminBody, Count, Id, Text, is_id
from control_plane.percent import PercentInTenths, ShareField
from sluice.limits import METERED_NAMES, NAMES
from sluice.pacing import GATHER_MS_MAX, INTERVAL_MS_MAX
from sluice.scopes import Scope

SALT_BYTES = 16
RESERVED = ShareField("reserved", of_percent=10, unit="permille")
RESERVED_PERMILLE_MAX = 1000  # largest sum of the reserved shares of all tiers
ANY_MODEL = "*"
RETENTION_HOURS_MAX = 87_600  # hours in ten years, which is also the largest bound of the platform
_PATTERN = re.compile(r"[A-Za-z0-9._:/@+-]{0,128}\*?")


def _checked_pattern(value: str) -> str:
    if not value or not _PATTERN.fullmatch(value):
        raise ValueError("the name of a model, or the beginning of one and a * are expected")
    return value


def _checked_wanted(value: str) -> str:
    if value != ANY_MODEL and not is_id(value):
        raise ValueError(f"the name of a model is expected, or {ANY_MODEL} for any")
    return value


def _checked_release(value: str) -> str:
    if not is_id(value) or "@" in value:
        raise ValueError("the name of a release is expected, without the model's and the @")
    return value


def _once(values: list[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _no_limits() -> dict[str, "LimitsBody"]:
    return {}


def _no_names() -> dict[str, str]:
    return {}


def _none() -> list[str]:
    return []


Scopes = Annotated[list[Scope], Field(max_length=64, default_factory=_none), AfterValidator(_once)]
Patterns = Annotated[
    list[Annotated[str, AfterValidator(_checked_pattern)]],
    Field(max_length=256, default_factory=_none),
    AfterValidator(_once),
]
Fallbacks = Annotated[
    dict[Annotated[str, AfterValidator(_checked_wanted)], Id],
    Field(max_length=256, default_factory=_no_names),
]
Pins = Annotated[
    dict[Id, Annotated[str, AfterValidator(_checked_release)]],
    Field(max_length=256, default_factory=_no_names),
]


def _limits(names: Iterable[str]) -> type[AdminBody]:
    """Return a body with a limit of each kind."""
    fields: dict[str, Any] = dict.fromkeys(names, (Count, 0))
    return create_model("_Limits", __base__=AdminBody, **fields)


_Limits, _MeteredLimits = _limits(NAMES), _limits(METERED_NAMES)


class LimitsBody(_Limits):
    """The limits of one caller. Zero is no limit, or the tier's limit in a tenant's `limits`."""

    @model_serializer
    def _set_ones(self) -> dict[str, int]:
        """Return the limits other than 0, because most of the many tenants have no limits."""
        return {name: limit for name, limit in self if limit}


ModelLimits = Annotated[dict[Id, LimitsBody], Field(max_length=256, default_factory=_no_limits)]


class TierBody(_Limits):
    """A priority class and its limits, where 0 is no limit.

    `requests_max` bounds a tenant's running and waiting requests. `model_limits` are a tenant's
    limits for one model, within its other limits. `reserved_percent` is the least share of every
    cell that the tier receives while it has work. All tiers together can have at most 100.
    `ttft_deadline_ms` is the longest expected wait for a first token, without the prompt's prefill,
    with which a request is admitted. Zero is the router's default, or 10 min for a tier that
    `is_preemptible`. A request's own deadline takes precedence. Work of a tier that
    `is_preemptible` (batch) is shed first, and preempted when a higher tier would miss its
    deadline.
    """

    priority: Count = 0
    model_limits: ModelLimits
    ttft_deadline_ms: Count = 0
    reserved_percent: PercentInTenths = 0.0
    is_preemptible: bool = False


class TenantBody(AdminBody):
    """A tenant. The platform creates its cache salt, which never changes and is never shown.

    `limits` replace the tier's limits where they are not 0. `fallbacks` name the model that answers
    while another model is saturated or down, and `*` means any other model. `pins` name, by model,
    the release that the tenant uses regardless of the model's release and of rollouts. With
    `allows_server_urls`, requests may name MCP servers by address, besides registered servers.
    `gather_ms` is the time for which a stream collects pieces of reasoning and of tool calls before
    it sends them. Zero sends each piece at once. `retention_hours` is the time after which stored
    responses, conversations and chat completions are deleted. Zero means that only the platform's
    bound applies.
    """

    name: Text = ""
    tier_id: Id
    is_disabled: bool = False
    weight: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    limits: Annotated[LimitsBody, Field(default_factory=LimitsBody)]
    fallbacks: Fallbacks
    pins: Pins
    allows_server_urls: bool = False
    gather_ms: Annotated[int, Field(ge=0, le=GATHER_MS_MAX)] = 0
    retention_hours: Annotated[int, Field(ge=0, le=RETENTION_HOURS_MAX)] = 0


class KeyBody(_MeteredLimits):
    """An API key. Without limits only the tenant's limits apply.

    Without `scopes` or `models`, all scopes or models are permitted. `models` are public names, and
    a name that ends in `*` is a prefix. `interval_ms` is the least time between two writes of a
    stream, unless the request sets another time. Zero sends tokens at once.
    """

    expires_at_unix_ms: Annotated[int, Field(ge=0, le=2**53)] = 0
    is_disabled: bool = False
    scopes: Scopes
    models: Patterns
    interval_ms: Annotated[int, Field(ge=0, le=INTERVAL_MS_MAX)] = 0
