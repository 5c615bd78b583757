"""Encryption of secrets at rest, with keys derived from the installation's secret.

Texts are encrypted by AES-256-GCM for a purpose and a place, for example a database row. Only
processes of the installation can decrypt a text, and only with the same purpose and place. So a
text that is moved to another row, or to another server's address, cannot be decrypted.
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
    """Raised for a sealed text that cannot be decrypted, because secret or place is different."""


class Sealer:
    """Encrypts and decrypts texts for one purpose. Thread-safe."""

    def __init__(self, secret: SharedSecret, purpose: str) -> None:
        """Derive the keys.

        The installation's first secret encrypts, and all secrets can decrypt.
        """
        self._ciphers = [AESGCM(key) for key in secret.sealing_keys(purpose)]

    def seal(self, text: str, place: str) -> str:
        """Return the encrypted text, in ASCII, which is decrypted only with the same place."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[0].encrypt(nonce, text.encode(), place.encode())
        return _VERSION + base64.urlsafe_b64encode(nonce + sealed).decode()

    def opened(self, sealed: str, place: str) -> str:
        """Return the decrypted text of a place, or raise SealError if that is impossible."""
        return self._opened(sealed, place)[0]

    def renewed(self, sealed: str, place: str) -> str | None:
        """Return the text encrypted again with the newest secret.

        The result is None if the newest secret is already in use, or the text cannot be decrypted.
        """
        try:
            text, is_newest = self._opened(sealed, place)
        except SealError:
            return None
        return None if is_newest else self.seal(text, place)

    def _opened(self, sealed: str, place: str) -> tuple[str, bool]:
        """Return the decrypted text, and whether the newest secret had encrypted it."""
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
