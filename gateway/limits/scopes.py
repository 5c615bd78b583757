"""The buckets of a caller for a model, in scopes for the account, the key and the model.

A level without a limit has no scope. `limits.caller` computes the limits of the levels.
"""

from typing import NamedTuple
from weakref import ReferenceType, WeakValueDictionary, ref

from gateway.directory import Principal
from gateway.limits.buckets import BucketScope
from gateway.limits.caller import account_limits, key_limits, model_limits
from gateway.limits.forecast import AnswerForecast
from sluice.limits import Limits

_BINDINGS_MAX = 65_536  # Cached bindings. Beyond the maximum, the oldest bindings are dropped.
_FORECASTS_MAX = 65_536


class Binding(NamedTuple):
    """The parts of a caller's reservations for one model, cached after the first request.

    Attributes:
        principal: Weak reference to the caller. An update replaces the caller's object and never
            changes it, so the binding is valid while the object is the same. The reference is weak,
            because a principal prevents its state's messages from being freed.
        tenant_id: Tenant whose budget is charged.
        scopes: Scopes of the caller's limits, at most three.
        forecast: Forecast of the tenant's answers from the model.
    """

    principal: ReferenceType[Principal]
    tenant_id: str
    scopes: tuple[BucketScope, ...]
    forecast: AnswerForecast


class Scopes:
    """Returns the scopes of callers. Callers that share a scope share one object."""

    def __init__(self) -> None:
        self._bindings: dict[tuple[str, str], Binding] = {}  # by ids of key and model
        # The bindings by caller and model, a faster index that reads no protobuf message. An
        # entry is removed with its principal, while its binding stays in `_bindings` for the
        # caller's next principal.
        self._by_caller: dict[ReferenceType[Principal], dict[str, Binding]] = {}
        self._scopes: WeakValueDictionary[str, BucketScope] = WeakValueDictionary()
        self._forecasts: dict[tuple[str, str], AnswerForecast] = {}

    def of(self, principal: Principal, model_id: str) -> Binding:
        """Return the limits of a caller for a model."""
        bound = self._by_caller.get(ref(principal))
        found = None if bound is None else bound.get(model_id)
        return self._bind(principal, model_id) if found is None else found

    def _bind(self, principal: Principal, model_id: str) -> Binding:
        key, tenant = principal.key, principal.tenant
        # The braces (a hash tag) place a tenant's scopes into one slot of a sharded Valkey.
        prefix = f"limits:{{{tenant.id}}}"
        of_model = f"your account for the model '{model_id}'"
        number = principal.number
        found = (
            self._scope(prefix, "your account", "account", account_limits(principal), number),
            self._scope(f"{prefix}:key:{key.id}", "your key", "key", key_limits(principal), number),
            self._scope(
                f"{prefix}:model:{model_id}",
                of_model,
                "model",
                model_limits(principal, model_id),
                number,
            ),
        )
        scopes = tuple(scope for scope in found if scope is not None)
        binding = Binding(ref(principal), tenant.id, scopes, self._forecast(tenant.id, model_id))
        place = (key.id, model_id)
        if place in self._bindings:
            # moves the binding to the end of the dict, whose oldest binding is dropped first
            self._forget(place)
        self._bindings[place] = binding
        by_model = self._by_caller.setdefault(ref(principal, self._by_caller.pop), {})
        by_model[model_id] = binding
        if len(self._bindings) > _BINDINGS_MAX:
            self._forget(next(iter(self._bindings)))
        return binding

    def _forget(self, place: tuple[str, str]) -> None:
        principal = self._bindings.pop(place).principal()
        if principal is not None:
            del self._by_caller[ref(principal)][place[1]]

    def _scope(
        self, name: str, label: str, kind: str, limits: Limits, number: int
    ) -> BucketScope | None:
        """Return a scope, or None without limits.

        The scope has the limits of the newest principal that it was requested for.
        """
        if not limits:
            return None
        scope = self._scopes.get(name)
        if scope is None:
            scope = self._scopes[name] = BucketScope(name, label, kind)
        if number >= scope.limited_by:
            scope.limited_by = number
            if limits != scope.limits:
                scope.limit(limits)
        return scope

    def _forecast(self, tenant_id: str, model_id: str) -> AnswerForecast:
        place = (tenant_id, model_id)
        forecast = self._forecasts.setdefault(place, AnswerForecast())
        if len(self._forecasts) > _FORECASTS_MAX:
            del self._forecasts[next(iter(self._forecasts))]
        return forecast
