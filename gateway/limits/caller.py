"""The limits of a caller for the account, for the key, and for a model in the account. Pure."""

from gateway.directory import Principal
from sluice.limits import Limits, limits_of, metered, narrowest


def account_limits(principal: Principal) -> Limits:
    """Return the tier's limits. A limit of the tenant replaces the tier's limit of that kind."""
    return metered(limits_of(principal.tier) | limits_of(principal.tenant))


def key_limits(principal: Principal) -> Limits:
    """Return the additional limits of the key."""
    return metered(limits_of(principal.key))


def model_limits(principal: Principal, model_id: str) -> Limits:
    """Return the tier's limits for one model."""
    return metered(limits_of(principal.tier, model_id))


def caller_limits(principal: Principal, model_id: str) -> Limits:
    """Return the narrowest limit of each kind."""
    return narrowest(
        account_limits(principal), key_limits(principal), model_limits(principal, model_id)
    )
