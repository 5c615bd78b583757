"""Keys that encrypt what a tenant stores: new ones, and the same ones under a new secret. Pure."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sluice.errors import ErrorCode, PlatformError
from sluice.stored_content import KEY_BYTES, key_place

KEYS_MAX = 64  # of a tenant; each opens what was stored while it was the newest
_NUMBER, _SEALED, _MADE_AT = "number", "sealed", "made_at_unix_ms"


class KeySealer(Protocol):
    """Encrypts keys for their places; see `sluice.sealing`."""

    def seal(self, text: str, place: str) -> str:
        """Return the encrypted text."""
        ...

    def renewed(self, sealed: str, place: str) -> str | None:
        """Return a text under the newest secret; None: it is, or it cannot be decrypted."""
        ...


def new_key(tenant_id: str, number: int, sealer: KeySealer, now_ms: int) -> dict[str, Any]:
    """Return a random key, sealed."""
    sealed = sealer.seal(secrets.token_hex(KEY_BYTES), key_place(tenant_id, number))
    return {_NUMBER: number, _SEALED: sealed, _MADE_AT: now_ms}


def rotated(
    tenant_id: str, keys: Sequence[Mapping[str, Any]], sealer: KeySealer, now_ms: int
) -> list[dict[str, Any]]:
    """Return the keys with a new one, which encrypts from now on.

    PlatformError CONFLICT: there are as many as there may be.
    """
    if len(keys) >= KEYS_MAX:
        message = f"tenant {tenant_id} has {KEYS_MAX} keys: erase its content to begin anew"
        raise PlatformError(ErrorCode.CONFLICT, message)
    return [*map(dict, keys), new_key(tenant_id, _next(keys), sealer, now_ms)]


def erased(
    tenant_id: str, keys: Sequence[Mapping[str, Any]], sealer: KeySealer, now_ms: int
) -> list[dict[str, Any]]:
    """Return a new key in place of all others; none where there was none."""
    return [new_key(tenant_id, _next(keys), sealer, now_ms)] if keys else []


def renewed(
    tenant_id: str, keys: Sequence[Mapping[str, Any]], sealer: KeySealer
) -> list[dict[str, Any]] | None:
    """Return the keys under the newest installation secret; None: all of them are."""
    made, is_changed = list[dict[str, Any]](), False
    for key in keys:
        sealed = sealer.renewed(key[_SEALED], key_place(tenant_id, key[_NUMBER]))
        is_changed = is_changed or sealed is not None
        made.append({**key, _SEALED: sealed or key[_SEALED]})
    return made if is_changed else None


def shown_keys(keys: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Return what admins are shown of keys."""
    return [{name: key[name] for name in (_NUMBER, _MADE_AT)} for key in keys]


def _next(keys: Sequence[Mapping[str, Any]]) -> int:
    return max((int(key[_NUMBER]) for key in keys), default=0) + 1
