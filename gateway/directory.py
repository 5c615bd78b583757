"""Looks up callers, and the models that a caller may use, in the control plane's snapshot. Pure."""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import NamedTuple

from gateway.model_pools import options_of, served_by
from gateway.names import Names, PublicModel, matches
from gateway.owned_objects import OwnedObjects
from gateway.resolved import ReleaseFork, ResolvedModel
from gateway.rollouts.decision import PINNED, ReleaseDecision
from sluice.engines import profile_of
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.hashing import cache_root
from sluice.limits import CONTEXT, limits_of, narrowest
from sluice.profiles import FRAMES
from sluice.scopes import Scope
from sluice.split import SHARE_MAX, ReleaseSplit
from sluice.watch import STEP_OBJECTS, ControlState
from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.telemetry.v1 import telemetry_pb2 as telemetry

# Maximum number of cached results by caller and name. The cache is cleared when the state changes.
_RESOLVED_MAX = 16_384
# Kinds of objects on which no cached result depends, so that their changes do not clear the cache.
_UNREMEMBERED = frozenset({"cells", "replicas", "budget_stops", "content_keys"})
_NUMBERS = count(1)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Principal:
    """An authenticated caller, with the objects of the state that determine the caller's rights.

    Principals are compared by identity, because each state has separate ones. A principal must not
    be stored beyond its request, because it keeps the objects of its state in memory.

    Attributes:
        text_policy: Policy on redacted texts, or None to store no text of the caller's requests.
        guard_sets: Tenant's rules on texts, in the order of their ids.
        server_tools: Tenant's server tools, in the order of their ids.
        auto_policy: Policy of the tenant's model `auto`, or None to treat `auto` like any other
            name.
        number: Serial number. A principal of a later state has a higher number.
    """

    key: wire.ApiKey
    tenant: wire.Tenant
    tier: wire.Tier
    text_policy: wire.TextPolicy | None = None
    guard_sets: Sequence[wire.GuardSet] = ()
    server_tools: Sequence[wire.ServerTool] = ()
    auto_policy: wire.AutoPolicy | None = None
    number: int = field(default_factory=_NUMBERS.__next__, init=False, repr=False)
    # Cached beginnings of usage events, with the models to which they belong. See
    # `endpoints.event_head`.
    event_heads: dict[tuple[object, ...], tuple[bytes, wire.Model]] = field(
        default_factory=dict, init=False, repr=False
    )


class _NameMeaning(NamedTuple):
    """The model that a name means. `split` is set if a rollout chooses the model's release."""

    model: wire.Model
    decision: ReleaseDecision | None = None
    split: wire.Split | None = None


_NO_TIER = wire.Tier()
_NO_PRINCIPAL = Principal(
    wire.ApiKey(secret_sha256=bytes(32), is_disabled=True), wire.Tenant(is_disabled=True), _NO_TIER
)


class Directory:
    """Looks up callers and models in a `ControlState`. Call `update` after each change of it."""

    def __init__(
        self, state: ControlState, has_base: Callable[[str], bool] = lambda _: True
    ) -> None:
        """Index the current state.

        Args:
            state: The control plane's snapshot.
            has_base: Returns whether the tokenizer of the base with a given digest is loaded.
        """
        self._state = state
        self._has_base = has_base
        self._names = Names(state)
        self._key_ids: dict[bytes, str] = {}  # key id by SHA-256 of the secret
        self._hashes: dict[str, bytes] = {}  # SHA-256 of the secret by key id
        self._principals: dict[bytes, Principal] = {}  # by SHA-256 of the secret
        self._resolved: dict[tuple[Principal, str], ResolvedModel] = {}
        self._guard_sets = OwnedObjects(lambda: state.guard_sets)
        self._server_tools = OwnedObjects(lambda: state.server_tools)
        self._cells: dict[str, tuple[wire.Cell, ...]] = {}
        self._prepared: tuple[dict[bytes, str], dict[str, bytes]] | None = None
        self._reindex()

    def prepare(self, coming: ControlState) -> Iterator[None]:
        """Index a new snapshot in small steps, before the snapshot replaces the state.

        Until the next `update`, look-ups still read the old state.
        """
        yield from self._names.prepare(coming)
        yield from self._prepare_keys(coming)

    def update(self, response: wire.WatchResponse) -> None:
        """Update the indexes after a change, which the state already contains."""
        self._names.update(response)
        if response.is_snapshot:
            self._reindex()
            return
        changed = {field.name for field, _ in response.upserts.ListFields()}
        changed.update(field.name for field, _ in response.removals.ListFields())
        for key_id in response.removals.keys:
            self._forget_key(key_id)
        for key in response.upserts.keys:
            self._forget_key(key.id)
            self._learn_key(key)
        if "cells" in changed:
            self._index_cells()
        if changed - _UNREMEMBERED:
            self._forget_answers()

    @property
    def is_blank(self) -> bool:
        """Whether no snapshot has been received yet."""
        return not self._state.revisions["keys"]

    def authenticate(self, secret: str, now_unix_ms: int) -> Principal:
        """Return the caller whose key is `secret`, or raise PlatformError 401.

        All refusals have the same text and take equal time. Otherwise they would reveal whether a
        key exists.
        """
        digest = hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
        principal = self._principals.get(digest) or self._principal(digest)
        key = principal.key
        is_the_key = hmac.compare_digest(key.secret_sha256, digest)
        is_expired = 0 < key.expires_at_unix_ms <= now_unix_ms
        if not is_the_key or key.is_disabled or is_expired or principal.tenant.is_disabled:
            raise PlatformError(
                ErrorCode.INVALID_API_KEY,
                "Incorrect API key provided: the key is unknown, expired or disabled, or its "
                "account is disabled. Check the key, or ask for a new one.",
            )
        return principal

    def batch_principal(self, key_id: str) -> Principal | None:
        """Return a key's caller for batch work, or None if the key is unknown, disabled or expired.

        The caller has the lowest preemptible tier. If there is no preemptible tier, the caller has
        a copy of the tenant's tier that is preemptible and has priority 0.
        """
        principal = self._principal(self._hashes.get(key_id, b""))
        is_over = 0 < principal.key.expires_at_unix_ms <= time.time_ns() // 1_000_000
        if principal.key.is_disabled or principal.tenant.is_disabled or is_over:
            return None
        tiers = [it for it in self._state.tiers.values() if it.is_preemptible]
        tier = min(tiers, key=lambda it: (it.priority, it.id), default=None)
        if tier is None:
            tier = wire.Tier()
            tier.CopyFrom(principal.tier)
            tier.priority, tier.is_preemptible, tier.reserved_permille = 0, True, 0
            tier.ttft_deadline_ms = 0  # batch work has none
        return replace(principal, tier=tier)

    def is_highest(self, tier: wire.Tier) -> bool:
        """Return whether no tier has a higher priority."""
        return all(it.priority <= tier.priority for it in self._state.tiers.values())

    @staticmethod
    def require_scope(principal: Principal, scope: Scope) -> None:
        """Raise PlatformError 403 unless the caller's key has a scope."""
        scopes = principal.key.scopes
        if scopes and scope not in scopes:
            raise PlatformError(
                ErrorCode.PERMISSION_DENIED,
                f"This key may not use '{scope}', only: {', '.join(scopes)}. Use another key, or "
                "ask for one with this scope.",
            )

    def models(self, principal: Principal) -> Sequence[PublicModel]:
        """Return the models and aliases that the caller may use, sorted by name."""
        tenant = principal.tenant
        visible = self._names.visible(tenant.id)
        allowed = [found for found in visible if _is_allowed(principal, found.name, found.model)]
        if not tenant.pins:
            return allowed
        return [PublicModel(it.name, self._as_pinned(tenant, it.model).model) for it in allowed]

    def model(self, principal: Principal, name: str) -> wire.Model:
        """Return the model that a public name means, with the model's own id.

        If the caller's tenant has pinned a release, the result is the model in that release.

        Raises:
            BadRequestError: 404 if there is no such model or the caller may not use it.
        """
        return self._require(principal, name).model

    def _require(self, principal: Principal, name: str) -> _NameMeaning:
        found = self._find(principal, name)
        if found is None:
            raise BadRequestError(
                ErrorCode.MODEL_NOT_FOUND,
                f"The model '{name[:200]}' does not exist or you do not have access to it.",
                param="model",
            )
        return found

    def canaries(self) -> Iterator[wire.Model]:
        """Yield each model in rollout, in the form that it has with the new release."""
        for split in self._state.splits.values():
            model = self._state.models.get(split.id)
            canary = None if model is None else self._names.at(model, split.canary)
            if canary is not None:
                yield canary

    def served(self) -> Iterator[wire.Model]:
        """Yield all models, each also in the form of a new release and of each additional pool."""
        yield from self._state.models.values()
        yield from self.canaries()
        for told in self._state.model_pools.values():
            model = self._state.models.get(told.id)
            if model is not None:
                yield from (it for _, it in served_by(told, model, self._state.pools)[1:])

    def pool_ids(self, model: wire.Model) -> list[str]:
        """Return the ids of the pools that serve a model, the model's own pool first."""
        found = served_by(self._state.model_pools.get(model.id), model, self._state.pools)
        return [it.pool_id for it, _ in found] or [model.pool_id]

    def generates_text(self, model: wire.Model) -> bool:
        """Return whether the model generates text, rather than embeddings."""
        pool = self._state.pools.get(model.pool_id)
        return pool is None or profile_of(pool.engine) is FRAMES

    def context_tokens_max(self, principal: Principal, model: wire.Model) -> int:
        """Return the maximum of prompt and output tokens together, or 0 without a known limit."""
        base = self._state.bases.get(model.base_digest)
        of_base = 0 if base is None else base.context_tokens_max
        limits = narrowest(
            limits_of(principal.tier) | limits_of(principal.tenant),
            limits_of(principal.tier, model.id),
            {CONTEXT.name: of_base} if of_base else {},
        )
        return limits.get(CONTEXT.name, 0)

    def resolve(
        self, principal: Principal, name: str, session: str = "", request_id: str = ""
    ) -> ResolvedModel:
        """Return the model that answers a request, in the release chosen for the request.

        Args:
            principal: The caller.
            name: Model name in the request.
            session: Key of requests that use the same release, or empty without a session.
            request_id: Id that chooses the release of a request without a session.

        Raises:
            BadRequestError: The model does not exist, or does not generate text.
        """
        resolved = self._resolved.get((principal, name)) or self.resolve_any(principal, name)
        if resolved.fork is not None:
            tenant_id = principal.tenant.id
            return resolved.fork.choose(tenant_id, session, request_id, self._has_base)
        if not resolved.generates_text:
            raise BadRequestError(
                ErrorCode.INVALID_REQUEST,
                f"The model '{name}' makes embeddings; it cannot generate text. Choose another"
                " model.",
                param="model",
            )
        return resolved

    def resolve_any(self, principal: Principal, name: str) -> ResolvedModel:
        """Return the model of a public name, for text or embeddings, or raise 404 like `model`.

        The result ignores a rollout, because only `resolve` chooses between releases.
        """
        resolved = self._resolved.get((principal, name))
        if resolved is None:
            found = self._require(principal, name)
            resolved = self._described(principal, name, found.model, found.decision)
            if found.split is not None and resolved.generates_text:
                resolved = self._forked(principal, resolved, found.split)
            if len(self._resolved) >= _RESOLVED_MAX:
                self._resolved.clear()
            self._resolved[principal, name] = resolved
        return resolved

    def fallback(self, principal: Principal, name: str) -> str | None:
        """Return the name of the tenant's fallback model for `name`.

        Returns:
            None if there is no fallback that the caller may use. Also None if the fallback is the
                same model, or if only one of the two generates text. A fallback's own fallback is
                ignored.
        """
        wanted = principal.tenant.fallbacks
        found = self._find(principal, name) if wanted else None
        if found is None:
            return None
        model = found.model
        instead = wanted.get(name) or wanted.get(model.id) or wanted.get("*")
        found = self._find(principal, instead) if instead else None
        if found is None:
            return None
        other = found.model
        if (other.id, other.release) == (model.id, model.release):
            return None
        return instead if self.generates_text(other) == self.generates_text(model) else None

    def cells(self, pool_id: str) -> Sequence[wire.Cell]:
        """Return the cells of a pool that a router owns now."""
        return self._cells.get(pool_id, ())

    def celled_pools(self) -> Sequence[str]:
        """Return the ids of the pools in which a router owns a cell now."""
        return tuple(self._cells)

    def router_addresses(self) -> set[str]:
        """Return the addresses of all routers that own a cell."""
        return {cell.router_address for cells in self._cells.values() for cell in cells}

    def _principal(self, digest: bytes) -> Principal:
        """Return the caller of the key with a SHA-256 `digest`, or `_NO_PRINCIPAL` if unknown."""
        key = self._state.keys.get(self._key_ids.get(digest, ""))
        tenant = None if key is None else self._state.tenants.get(key.tenant_id)
        if key is None or tenant is None:
            return _NO_PRINCIPAL
        tier = self._state.tiers.get(tenant.tier_id, _NO_TIER)
        policy = self._state.text_policies.get(tenant.id)
        keeps = policy is not None and policy.is_on and policy.share > 0
        principal = Principal(
            key,
            tenant,
            tier,
            policy if keeps else None,
            self._guard_sets.of(tenant.id),
            self._server_tools.of(tenant.id),
            self._state.auto_policies.get(tenant.id),
        )
        self._principals[digest] = principal
        return principal

    def _find(self, principal: Principal, name: str) -> _NameMeaning | None:
        model = self._names.find(name, principal.tenant.id)
        if model is None or not _is_allowed(principal, name, model):
            return None
        return self._as_pinned(principal.tenant, model)

    def _as_pinned(self, tenant: wire.Tenant, model: wire.Model) -> _NameMeaning:
        """Return a model in the release that the tenant has pinned.

        A model that the request names as `model@release` is returned unchanged.
        """
        if self._state.models.get(model.id) is not model:
            return _NameMeaning(model)
        release = tenant.pins.get(model.id)
        if release is None:
            return _NameMeaning(model, split=self._state.splits.get(model.id))
        pinned = self._names.at(model, release)
        return (
            _NameMeaning(model, ReleaseDecision(missed=release))
            if pinned is None
            else _NameMeaning(pinned, PINNED)
        )

    def _described(
        self, principal: Principal, name: str, model: wire.Model, decision: ReleaseDecision | None
    ) -> ResolvedModel:
        tenant = principal.tenant
        return ResolvedModel(
            name=name,
            model=model,
            context_tokens_max=self.context_tokens_max(principal, model),
            tenant_id=tenant.id,
            cache_root=_cache_root(tenant, model),
            generates_text=self.generates_text(model),
            decision=decision,
            warm_prompts=self._state.warm_prompts.get(model.id),
            options=options_of(
                self._state.model_pools.get(model.id),
                model,
                self._state.pools,
                partial(_cache_root, tenant),
                partial(self.context_tokens_max, principal),
            ),
        )

    def _forked(
        self, principal: Principal, resolved: ResolvedModel, told: wire.Split
    ) -> ResolvedModel:
        """Return the model with a fork, which chooses between a rollout's releases per request.

        The result has no fork if no pool serves one of the releases.
        """
        arms: list[ResolvedModel] = []
        for release, arm in (
            (told.control, telemetry.ARM_CONTROL),
            (told.canary, telemetry.ARM_CANARY),
        ):
            model = self._names.at(resolved.model, release)
            if model is None or not self.generates_text(model):
                return replace(resolved, decision=ReleaseDecision(missed=release))
            decision = ReleaseDecision(told.rollout_id, arm)
            arms.append(self._described(principal, resolved.name, model, decision))
        control, canary = arms
        unloaded = replace(control, decision=ReleaseDecision(unloaded=told.canary))
        fork = ReleaseFork(
            split=_split(told, told.share),
            mirror=_split(told, told.mirrored) if told.mirrored else None,
            control=control,
            instead=replace(control, decision=ReleaseDecision(unready=told.canary)),
            copied=replace(control, shadow=canary),
            canary=replace(canary, instead=unloaded),
        )
        return replace(resolved, fork=fork)

    def _prepare_keys(self, coming: ControlState) -> Iterator[None]:
        self._prepared = None
        key_ids: dict[bytes, str] = {}
        hashes: dict[str, bytes] = {}
        for number, key in enumerate(coming.keys.values()):
            key_id, digest = key.id, key.secret_sha256
            key_ids[digest] = key_id
            hashes[key_id] = digest
            if number % STEP_OBJECTS == 0:
                yield
        self._prepared = key_ids, hashes

    def _reindex(self) -> None:
        if self._prepared is None:
            for _ in self._prepare_keys(self._state):
                pass
        assert self._prepared is not None
        (self._key_ids, self._hashes), self._prepared = self._prepared, None
        self._index_cells()
        self._forget_answers()

    def _forget_answers(self) -> None:
        self._principals.clear()
        self._resolved.clear()
        self._guard_sets.forget()
        self._server_tools.forget()

    def _learn_key(self, key: wire.ApiKey) -> None:
        self._key_ids[key.secret_sha256] = key.id
        self._hashes[key.id] = key.secret_sha256

    def _forget_key(self, key_id: str) -> None:
        digest = self._hashes.pop(key_id, None)
        if digest is not None and self._key_ids.get(digest) == key_id:
            del self._key_ids[digest]

    def _index_cells(self) -> None:
        by_pool: dict[str, list[wire.Cell]] = {}
        for cell_id in sorted(self._state.cells):
            cell = self._state.cells[cell_id]
            if cell.router_address:
                by_pool.setdefault(cell.pool_id, []).append(cell)
        self._cells = {pool_id: tuple(cells) for pool_id, cells in by_pool.items()}


def _is_allowed(principal: Principal, name: str, model: wire.Model) -> bool:
    """Return whether the key may use a model. A key without a list of models may use all."""
    patterns = principal.key.models
    return not patterns or any(matches(p, name) or matches(p, model.id) for p in patterns)


def _cache_root(tenant: wire.Tenant, model: wire.Model) -> bytes:
    return cache_root(model.base_digest, model.adapter_digest, tenant.cache_salt)


def _split(told: wire.Split, share: int) -> ReleaseSplit:
    return ReleaseSplit(told.id, told.control, told.canary, min(share, SHARE_MAX), told.salt)
