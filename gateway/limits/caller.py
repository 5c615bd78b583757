"""The limits of a caller in three scopes: its account, its key, and a model in its account. Pure.

0 stands for no limit.
"""

from typing import NamedTuple

from gateway.directory import Principal
from sluice.wire.control.v1 import control_pb2 as wire

_NO_LIMITS = wire.Limits()


class CallerLimits(NamedTuple):
    """Requests and tokens per minute, and requests at once."""

    rpm: int
    tpm: int
    requests_max: int


def account_limits(principal: Principal) -> CallerLimits:
    """Return the tier's limits, replaced where the tenant has its own."""
    own, tier = principal.tenant.limits, principal.tier
    return CallerLimits(
        own.rpm or tier.rpm, own.tpm or tier.tpm, own.requests_max or tier.requests_max
    )


def key_limits(principal: Principal) -> CallerLimits:
    """Return the limits that the key has besides."""
    key = principal.key
    return CallerLimits(key.rpm, key.tpm, key.requests_max)


def model_limits(principal: Principal, model_id: str) -> CallerLimits:
    """Return the tier's limits for one model."""
    limits = principal.tier.model_limits.get(model_id) or _NO_LIMITS
    return CallerLimits(limits.rpm, limits.tpm, limits.requests_max)


def limits_of(principal: Principal, model_id: str) -> CallerLimits:
    """Return the narrowest limit of each kind."""
    scopes = (account_limits(principal), key_limits(principal), model_limits(principal, model_id))
    return CallerLimits(
        *(min((limit for limit in kind if limit), default=0) for kind in zip(*scopes, strict=True))
    )
