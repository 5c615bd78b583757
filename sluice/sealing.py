"""Secrets at rest: encrypted for a place and a purpose with keys of the installation's secret.

AES-256-GCM. A sealed text can be opened only by processes of the installation, and only at its own
place: moved to another row, or to another server's address, it does not open.
"""

import base64
import binascii
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sluice.shared_secret import SharedSecret

_NONCE_BYTES = 12
_VERSION = "1."


class SealError(ValueError):
    """A sealed text cannot be opened here: other secrets, or another place."""


class Sealer:
    """Seals and opens texts for one purpose; thread-safe."""

    def __init__(self, secret: SharedSecret, purpose: str) -> None:
        """Derive the keys: the installation's first secret seals, all of them open."""
        self._ciphers = [AESGCM(key) for key in secret.sealing_keys(purpose)]

    def seal(self, text: str, place: str) -> str:
        """Return a text that can be opened for the same place alone; ASCII."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[0].encrypt(nonce, text.encode(), place.encode())
        return _VERSION + base64.urlsafe_b64encode(nonce + sealed).decode()

    def opened(self, sealed: str, place: str) -> str:
        """Return the text sealed for a place; SealError where it cannot be opened."""
        return self._opened(sealed, place)[0]

    def renewed(self, sealed: str, place: str) -> str | None:
        """Return a text sealed with the newest secret; None: it is, or it cannot be opened."""
        try:
            text, is_newest = self._opened(sealed, place)
        except SealError:
            return None
        return None if is_newest else self.seal(text, place)

    def _opened(self, sealed: str, place: str) -> tuple[str, bool]:
        """Return a text, and whether the newest secret has sealed it."""
        try:
            data = base64.urlsafe_b64decode(sealed.removeprefix(_VERSION).encode())
        except (binascii.Error, ValueError):
            raise SealError("this is no sealed text") from None
        nonce, text = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
        for number, cipher in enumerate(self._ciphers):
            try:
                return cipher.decrypt(nonce, text, place.encode()).decode(), number == 0
            except (InvalidTag, ValueError):
                continue
        raise SealError("sealed with another secret, or for another place; send the secret again")
