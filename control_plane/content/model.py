"""Keys that encrypt a tenant's stored content, with their creation and re-encryption. Pure."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sluice.errors import ErrorCode, PlatformError
from sluice.stored_content import KEY_BYTES, key_place

# Largest number of keys per tenant. Each key decrypts the content that was stored while it was the
# newest key.
KEYS_MAX = 64
_NUMBER, _SEALED, _MADE_AT = "number", "sealed", "made_at_unix_ms"


class KeySealer(Protocol):
    """Encrypts each key for one place, so that a copy in another place is useless.

    The implementation is `sluice.sealing`.
    """

    def seal(self, text: str, place: str) -> str:
        """Return the encrypted text."""
        ...

    def renewed(self, sealed: str, place: str) -> str | None:
        """Return a text encrypted with the newest secret, or None if nothing changes."""
        ...


def new_key(tenant_id: str, number: int, sealer: KeySealer, now_ms: int) -> dict[str, Any]:
    """Return a random key, encrypted."""
    sealed = sealer.seal(secrets.token_hex(KEY_BYTES), key_place(tenant_id, number))
    return {_NUMBER: number, _SEALED: sealed, _MADE_AT: now_ms}


def rotated(
    tenant_id: str, keys: Sequence[Mapping[str, Any]], sealer: KeySealer, now_ms: int
) -> list[dict[str, Any]]:
    """Return the keys with a new key, which encrypts all later content.

    Raises:
        PlatformError: `CONFLICT` if the tenant already has the largest number of keys.
    """
    if len(keys) >= KEYS_MAX:
        message = f"tenant {tenant_id} has {KEYS_MAX} keys: erase its content to begin anew"
        raise PlatformError(ErrorCode.CONFLICT, message)
    return [*map(dict, keys), new_key(tenant_id, _next(keys), sealer, now_ms)]


def erased(
    tenant_id: str, keys: Sequence[Mapping[str, Any]], sealer: KeySealer, now_ms: int
) -> list[dict[str, Any]]:
    """Return a new key in place of all other keys, or no key if there was none."""
    return [new_key(tenant_id, _next(keys), sealer, now_ms)] if keys else []


def renewed(
    tenant_id: str, keys: Sequence[Mapping[str, Any]], sealer: KeySealer
) -> list[dict[str, Any]] | None:
    """Return the keys encrypted with the newest installation secret, or None without a change."""
    made, is_changed = list[dict[str, Any]](), False
    for key in keys:
        sealed = sealer.renewed(key[_SEALED], key_place(tenant_id, key[_NUMBER]))
        is_changed = is_changed or sealed is not None
        made.append({**key, _SEALED: sealed or key[_SEALED]})
    return made if is_changed else None


def shown_keys(keys: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Return the fields of keys that admins may see."""
    return [{name: key[name] for name in (_NUMBER, _MADE_AT)} for key in keys]


def _next(keys: Sequence[Mapping[str, Any]]) -> int:
    return max((int(key[_NUMBER]) for key in keys), default=0) + 1
