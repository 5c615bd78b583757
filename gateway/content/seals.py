"""Encryption of stored content with keys of the tenants, and the maximum age of that content.

The cipher is AES-256-GCM. Encrypted content begins with a mark byte and the number of its key.
Neither JSON nor an event begins with this byte. So content that was stored before the tenant had a
key is recognized as unencrypted. Content is bound to the place where it is stored. It cannot be
decrypted at another place, or after its key was deleted.
"""

import os
import struct
from collections import OrderedDict
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sluice.errors import ErrorCode, RejectedError
from sluice.sealing import Sealer, SealError
from sluice.shared_secret import SharedSecret
from sluice.stored_content import SEALED_FOR, key_place
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

_MARK = b"\x01"
_HEAD = struct.Struct(">cI")  # mark and number of the key
_NONCE_BYTES = 12
_TENANTS_MAX = 1024  # maximum number of tenants whose ciphers are cached
_HOUR_MS = 3_600_000


class ContentGoneError(Exception):
    """Stored content cannot be decrypted any more, because its key was deleted."""


class _KeyRing(NamedTuple):
    """A tenant's keys as the control plane sent them, and their ciphers by number of the key."""

    told: wire.ContentKeys
    ciphers: dict[int, AESGCM]


class ContentSeals:
    """Encrypts and decrypts the stored contents of all tenants, for one worker."""

    def __init__(self, state: ControlState, secret: SharedSecret) -> None:
        """Read keys from `state`, in which they are encrypted with the secret `secret`."""
        self._state = state
        self._sealer = Sealer(secret, SEALED_FOR)
        self._rings: OrderedDict[str, _KeyRing] = OrderedDict()

    def encrypts(self, tenant_id: str) -> bool:
        """Return whether contents of a tenant are encrypted."""
        told = self._state.content_keys.get(tenant_id)
        return told is not None and bool(told.keys)

    def horizon_unix_ms(self, tenant_id: str, now_unix_ms: int) -> int:
        """Return the Unix time in ms before which a tenant's content has expired, or 0 if none."""
        tenant, told = self._state.tenants.get(tenant_id), self._state.content_keys.get(tenant_id)
        erased_ms = 0 if told is None else told.erased_at_unix_ms
        if tenant is None or not tenant.retention_hours:
            return erased_ms
        return max(erased_ms, now_unix_ms - tenant.retention_hours * _HOUR_MS)

    def sealed(self, tenant_id: str, place: str, content: bytes) -> bytes:
        """Return content in the form to store at a place, encrypted if the tenant has a key.

        Raises RejectedError UNAVAILABLE if the tenant's key cannot be decrypted here.
        """
        if not content or not self.encrypts(tenant_id):
            return content
        ciphers = self._ciphers(tenant_id)
        newest = max(key.number for key in self._state.content_keys[tenant_id].keys)
        if newest not in ciphers:
            text = "Content cannot be encrypted for storage now; try again shortly."
            raise RejectedError(ErrorCode.UNAVAILABLE, text, retry_after_s=2.0)
        nonce, bound = os.urandom(_NONCE_BYTES), _bound(tenant_id, place)
        body = ciphers[newest].encrypt(nonce, content, bound)
        return _HEAD.pack(_MARK, newest) + nonce + body

    def opened(self, tenant_id: str, place: str, content: bytes) -> bytes:
        """Return stored content, decrypted if it is encrypted.

        Raises ContentGoneError if the content cannot be decrypted.
        """
        if not is_sealed(content):
            return content
        return self.opened_sealed(tenant_id, place, content)

    def opened_sealed(self, tenant_id: str, place: str, content: bytes) -> bytes:
        """Decrypt content that must be encrypted, or raise ContentGoneError."""
        behind = _HEAD.size + _NONCE_BYTES
        if len(content) < behind or not is_sealed(content):
            raise ContentGoneError
        _, number = _HEAD.unpack_from(content)
        cipher = self._ciphers(tenant_id).get(number)
        if cipher is None:
            raise ContentGoneError
        try:
            nonce = content[_HEAD.size : behind]
            return cipher.decrypt(nonce, content[behind:], _bound(tenant_id, place))
        except InvalidTag:
            raise ContentGoneError from None

    def _ciphers(self, tenant_id: str) -> dict[int, AESGCM]:
        """Return the ciphers of a tenant's keys, without keys that cannot be decrypted here."""
        told, ring = self._state.content_keys.get(tenant_id), self._rings.get(tenant_id)
        if ring is not None and ring.told is told:
            self._rings.move_to_end(tenant_id)
            return ring.ciphers
        self._rings.pop(tenant_id, None)  # a deleted key must not remain in memory
        if told is None:
            return {}
        ciphers = dict[int, AESGCM]()
        for key in told.keys:
            try:
                text = self._sealer.opened(key.sealed, key_place(tenant_id, key.number))
            except SealError:
                continue
            ciphers[key.number] = AESGCM(bytes.fromhex(text))
        self._rings[tenant_id] = _KeyRing(told, ciphers)
        while len(self._rings) > _TENANTS_MAX:
            self._rings.popitem(last=False)
        return ciphers


def is_sealed(content: bytes) -> bool:
    """Return whether a stored content is encrypted."""
    return content.startswith(_MARK)


def _bound(tenant_id: str, place: str) -> bytes:
    return f"{tenant_id}\0{place}".encode()
