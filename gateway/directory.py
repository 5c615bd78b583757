"""Who is calling and what they may use: answers from the control plane's snapshot. Pure."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.errors import BadRequestError, ErrorCode, PlatformError
from sluice.hashing import cache_root
from sluice.profiles import FRAMES, profile_of
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

_NO_TIER = wire.Tier()


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller."""

    key: wire.ApiKey
    tenant: wire.Tenant
    tier: wire.Tier


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What a public model name stands for, for one tenant.

    Attributes:
        context_tokens_max: Of the base and the caller's tier, the smaller; prompt and output.
        cache_root: Root of the prefix cache's hash chain.
    """

    model: wire.Model
    context_tokens_max: int
    cache_root: bytes


class Directory:
    """Answers from a `ControlState`; call `update` after each change of it."""

    def __init__(self, state: ControlState) -> None:
        """Index what is known so far."""
        self._state = state
        self._key_ids: dict[bytes, str] = {}  # SHA-256 of the secret -> key id
        self._hashes: dict[str, bytes] = {}  # key id -> SHA-256 of the secret
        self._cells: dict[str, tuple[wire.Cell, ...]] = {}
        self._reindex()

    def update(self, response: wire.WatchResponse) -> None:
        """Follow a change that the state has already taken."""
        if response.is_snapshot:
            self._reindex()
            return
        for key_id in response.removals.keys:
            self._forget_key(key_id)
        for key in response.upserts.keys:
            self._forget_key(key.id)
            self._learn_key(key)
        if response.upserts.cells or response.removals.cells:
            self._index_cells()

    def authenticate(self, secret: str, now_unix_ms: int) -> Principal:
        """Return the caller whose key text is `secret`; PlatformError 401 otherwise."""
        digest = hashlib.sha256(secret.encode(errors="surrogateescape")).digest()
        key = self._state.keys.get(self._key_ids.get(digest, ""))
        if key is None or not hmac.compare_digest(key.secret_sha256, digest):
            raise PlatformError(
                ErrorCode.INVALID_API_KEY,
                "Incorrect API key provided. Check it, or ask for a new one.",
            )
        if key.is_disabled or 0 < key.expires_at_unix_ms <= now_unix_ms:
            raise PlatformError(
                ErrorCode.INVALID_API_KEY, "This API key is disabled or expired. Ask for a new one."
            )
        tenant = self._state.tenants.get(key.tenant_id)
        if tenant is None or tenant.is_disabled:
            raise PlatformError(
                ErrorCode.INVALID_API_KEY, "This account is disabled. Ask whoever runs this server."
            )
        return Principal(key, tenant, self._state.tiers.get(tenant.tier_id, _NO_TIER))

    def models(self, principal: Principal) -> Sequence[wire.Model]:
        """Return the models that the caller may see, by name."""
        return sorted(
            (m for m in self._state.models.values() if _is_visible(m, principal)),
            key=lambda model: model.id,
        )

    def model(self, principal: Principal, name: str) -> wire.Model:
        """Return a model; another tenant's is as unknown as one that does not exist."""
        model = self._state.models.get(name)
        if model is None or not _is_visible(model, principal):
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
        limits = (principal.tier.context_tokens_max, base.context_tokens_max if base else 0)
        return min((limit for limit in limits if limit), default=0)

    def resolve(self, principal: Principal, name: str) -> ResolvedModel:
        """Return what the public name stands for; BadRequestError if it generates no text."""
        model = self.model(principal, name)
        if not self.generates_text(model):
            raise BadRequestError(
                ErrorCode.INVALID_REQUEST,
                f"The model '{model.id}' makes embeddings; it cannot generate text. Choose another"
                " model.",
                param="model",
            )
        return ResolvedModel(
            model=model,
            context_tokens_max=self.context_tokens_max(principal, model),
            cache_root=cache_root(
                model.base_digest, model.adapter_digest, principal.tenant.cache_salt
            ),
        )

    def cells(self, pool_id: str) -> Sequence[wire.Cell]:
        """Return the cells of a pool that have an owner now."""
        return self._cells.get(pool_id, ())

    def router_addresses(self) -> set[str]:
        """Return the addresses of all routers that own a cell."""
        return {cell.router_address for cells in self._cells.values() for cell in cells}

    def _reindex(self) -> None:
        self._key_ids.clear()
        self._hashes.clear()
        for key in self._state.keys.values():
            self._learn_key(key)
        self._index_cells()

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


def _is_visible(model: wire.Model, principal: Principal) -> bool:
    return model.owner_tenant_id in ("", principal.tenant.id)
