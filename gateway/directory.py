"""Who is calling and what they may use: answers from the control plane's snapshot. Pure."""

import hashlib
import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.names import Names, PublicModel, matches
from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.hashing import cache_root
from sluice.profiles import FRAMES, profile_of
from sluice.scopes import Scope
from sluice.watch import STEP_OBJECTS, ControlState
from sluice.wire.control.v1 import control_pb2 as wire

# Answers are kept until the state changes; of those for (caller, name), at most so many.
_RESOLVED_MAX = 16_384
# Kinds of which none is behind an answer that is kept.
_UNREMEMBERED = frozenset({"cells", "replicas"})


@dataclass(frozen=True, slots=True, eq=False)
class Principal:
    """An authenticated caller; compared by identity, because it is one state's answer."""

    key: wire.ApiKey
    tenant: wire.Tenant
    tier: wire.Tier


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What a public model name stands for, for one caller.

    Attributes:
        name: As asked for: a model, `model@release` or an alias.
        model: With the model's own id, and the release that the name stands for.
        context_tokens_max: Prompt and output together; 0 when it is not known.
        cache_root: Root of the prefix cache's hash chain.
        generates_text: Whether it is one to chat with, not one that makes embeddings.
    """

    name: str
    model: wire.Model
    context_tokens_max: int
    cache_root: bytes
    generates_text: bool


_NO_TIER = wire.Tier()
_NOBODY = Principal(
    wire.ApiKey(secret_sha256=bytes(32), is_disabled=True), wire.Tenant(is_disabled=True), _NO_TIER
)


class Directory:
    """Answers from a `ControlState`; call `update` after each change of it."""

    def __init__(self, state: ControlState) -> None:
        """Index what is known so far."""
        self._state = state
        self._names = Names(state)
        self._key_ids: dict[bytes, str] = {}  # SHA-256 of the secret -> key id
        self._hashes: dict[str, bytes] = {}  # key id -> SHA-256 of the secret
        self._principals: dict[bytes, Principal] = {}  # by SHA-256 of the secret
        self._resolved: dict[tuple[Principal, str], ResolvedModel] = {}
        self._cells: dict[str, tuple[wire.Cell, ...]] = {}
        self._prepared: tuple[dict[bytes, str], dict[str, bytes]] | None = None
        self._reindex()

    def prepare(self, coming: ControlState) -> Iterator[None]:
        """Index what a snapshot is going to make of the state, step by step; `update` follows.

        Until then, answers are those of the state as it is.
        """
        yield from self._names.prepare(coming)
        yield from self._prepare_keys(coming)

    def update(self, response: wire.WatchResponse) -> None:
        """Follow a change that the state has already taken."""
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

    def authenticate(self, secret: str, now_unix_ms: int) -> Principal:
        """Return the caller whose key text is `secret`; PlatformError 401 otherwise.

        All who are refused are told the same, after the same work: an answer does not say whether
        there is such a key.
        """
        digest = hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
        principal = self._principals.get(digest) or self._principal(digest)
        key = principal.key
        is_the_key = hmac.compare_digest(key.secret_sha256, digest)
        is_expired = 0 < key.expires_at_unix_ms <= now_unix_ms
        if not is_the_key or key.is_disabled or is_expired or principal.tenant.is_disabled:
            raise PlatformError(
                ErrorCode.INVALID_API_KEY,
                "Incorrect API key provided: there is none like it, it has expired, or it or its "
                "account is disabled. Check it, or ask for a new one.",
            )
        return principal

    @staticmethod
    def require_scope(principal: Principal, scope: Scope) -> None:
        """Do nothing if the caller's key may be used for this; PlatformError 403 otherwise."""
        scopes = principal.key.scopes
        if scopes and scope not in scopes:
            raise PlatformError(
                ErrorCode.PERMISSION_DENIED,
                f"This key may not use '{scope}', only: {', '.join(scopes)}. Use another key, or "
                "ask for one with this scope.",
            )

    def models(self, principal: Principal) -> Sequence[PublicModel]:
        """Return the models and aliases that the caller may use, by name."""
        visible = self._names.visible(principal.tenant.id)
        return [found for found in visible if _is_allowed(principal, found.name, found.model)]

    def model(self, principal: Principal, name: str) -> wire.Model:
        """Return what the public name stands for, with the model's own id.

        Raises:
            BadRequestError: 404; what the caller may not use is as unknown as what does not exist.
        """
        model = self._find(principal, name)
        if model is None:
            raise BadRequestError(
                ErrorCode.MODEL_NOT_FOUND,
                f"The model '{name[:200]}' does not exist or you do not have access to it.",
                param="model",
            )
        return model

    def generates_text(self, model: wire.Model) -> bool:
        """Return whether the model is one to chat with, not one that makes embeddings."""
        pool = self._state.pools.get(model.pool_id)
        return pool is None or profile_of(pool.engine) is FRAMES

    def context_tokens_max(self, principal: Principal, model: wire.Model) -> int:
        """Return how many tokens prompt and output may have together; 0 when it is not known."""
        base = self._state.bases.get(model.base_digest)
        tier, tenant = principal.tier, principal.tenant
        limited = tier.model_limits.get(model.id)
        limits = (
            tenant.limits.context_tokens_max or tier.context_tokens_max,
            limited.context_tokens_max if limited is not None else 0,
            base.context_tokens_max if base is not None else 0,
        )
        return min((limit for limit in limits if limit), default=0)

    def resolve(self, principal: Principal, name: str) -> ResolvedModel:
        """Return what the public name stands for; BadRequestError if it generates no text."""
        resolved = self.resolve_any(principal, name)
        if not resolved.generates_text:
            raise BadRequestError(
                ErrorCode.INVALID_REQUEST,
                f"The model '{name}' makes embeddings; it cannot generate text. Choose another"
                " model.",
                param="model",
            )
        return resolved

    def resolve_any(self, principal: Principal, name: str) -> ResolvedModel:
        """Return what the public name stands for, whatever it makes; 404 as `model`."""
        resolved = self._resolved.get((principal, name))
        if resolved is None:
            model = self.model(principal, name)
            resolved = ResolvedModel(
                name=name,
                model=model,
                context_tokens_max=self.context_tokens_max(principal, model),
                cache_root=cache_root(
                    model.base_digest, model.adapter_digest, principal.tenant.cache_salt
                ),
                generates_text=self.generates_text(model),
            )
            if len(self._resolved) >= _RESOLVED_MAX:
                self._resolved.clear()
            self._resolved[principal, name] = resolved
        return resolved

    def fallback(self, principal: Principal, name: str) -> str | None:
        """Return the name of what the tenant wants to answer while `name` cannot.

        None when it wants nothing, when the caller may not use that, or when it is no other model
        or does not make what `name` makes. A fallback has no fallback of its own.
        """
        wanted = principal.tenant.fallbacks
        model = self._find(principal, name) if wanted else None
        if model is None:
            return None
        instead = wanted.get(name) or wanted.get(model.id) or wanted.get("*")
        other = self._find(principal, instead) if instead else None
        if other is None or (other.id, other.release) == (model.id, model.release):
            return None
        return instead if self.generates_text(other) == self.generates_text(model) else None

    def cells(self, pool_id: str) -> Sequence[wire.Cell]:
        """Return the cells of a pool that have an owner now."""
        return self._cells.get(pool_id, ())

    def router_addresses(self) -> set[str]:
        """Return the addresses of all routers that own a cell."""
        return {cell.router_address for cells in self._cells.values() for cell in cells}

    def _principal(self, digest: bytes) -> Principal:
        """Return whose secret has this SHA-256, valid or not; nobody when it is unknown."""
        key = self._state.keys.get(self._key_ids.get(digest, ""))
        tenant = None if key is None else self._state.tenants.get(key.tenant_id)
        if key is None or tenant is None:
            return _NOBODY
        principal = Principal(key, tenant, self._state.tiers.get(tenant.tier_id, _NO_TIER))
        self._principals[digest] = principal
        return principal

    def _find(self, principal: Principal, name: str) -> wire.Model | None:
        model = self._names.find(name, principal.tenant.id)
        if model is None or not _is_allowed(principal, name, model):
            return None
        return model

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
    """Return whether the key's list, if it has one, has the name or the model behind it."""
    patterns = principal.key.models
    return not patterns or any(matches(p, name) or matches(p, model.id) for p in patterns)
