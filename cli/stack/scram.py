"""The server's side of SCRAM-SHA-256 (RFC 5802, RFC 7677), for the local stack's broker.

Client and server each prove possession of the password, which is never sent. So a foreign process
on the broker's port receives neither the password nor events. There is no I/O, only a random salt.
"""

import hashlib
import hmac
import secrets
from base64 import b64decode, b64encode
from dataclasses import dataclass, field

MECHANISM = "SCRAM-SHA-256"
_ITERATIONS = 4096  # the minimum of RFC 7677, which suffices for a random password
_SALT_BYTES = 16
_HEADERS = ("n,,", "y,,")  # without channel binding, because the connection is plain


class ScramError(Exception):
    """The client did not prove possession of the password."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A verifier, which checks a password without storing it."""

    user: str
    salt: bytes
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)

    @classmethod
    def of(cls, user: str, password: str, salt: bytes = b"") -> "Credential":
        """Derive a verifier from a password, which costs some milliseconds of CPU."""
        salt = salt or secrets.token_bytes(_SALT_BYTES)
        salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, _ITERATIONS)
        stored = hashlib.sha256(_mac(salted, b"Client Key")).digest()
        return cls(user, salt, stored, _mac(salted, b"Server Key"))


class ScramExchange:
    """The exchange with one client, in which `first` is called before `final`."""

    def __init__(self, credential: Credential, nonce: str = "") -> None:
        """Create an exchange with one client. `nonce` is random unless a test sets it."""
        self._credential = credential
        self._nonce = nonce or secrets.token_urlsafe(18)
        self._header = self._client_first = self._server_first = ""

    def first(self, message: bytes) -> bytes:
        """Return the answer to the client's first message. Raises ScramError."""
        text = _text(message)
        self._header, self._client_first = text[:3], text[3:]
        said = _attributes(self._client_first)
        if self._header not in _HEADERS or not said.keys() >= {"n", "r"} or not said["r"]:
            raise ScramError("this is no first message of SCRAM")
        if said["n"] != self._credential.user:
            raise ScramError("the user is unknown")
        self._nonce = said["r"] + self._nonce
        salt = b64encode(self._credential.salt).decode()
        self._server_first = f"r={self._nonce},s={salt},i={_ITERATIONS}"
        return self._server_first.encode()

    def final(self, message: bytes) -> bytes:
        """Return the server's proof if the client's proof is right. Raises ScramError otherwise."""
        text = _text(message)
        without_proof, _, shown = text.rpartition(",p=")
        said = _attributes(without_proof)
        if (
            said.get("r") != self._nonce
            or said.get("c") != b64encode(self._header.encode()).decode()
        ):
            raise ScramError("this is no final message of this exchange")
        signed = f"{self._client_first},{self._server_first},{without_proof}".encode()
        if not self._is_proof(_decoded(shown), signed):
            raise ScramError("the password is wrong")
        return b"v=" + b64encode(_mac(self._credential.server_key, signed))

    def _is_proof(self, proof: bytes, signed: bytes) -> bool:
        signature = _mac(self._credential.stored_key, signed)
        if len(proof) != len(signature):
            return False
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        found = hashlib.sha256(client_key).digest()
        return hmac.compare_digest(found, self._credential.stored_key)


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


def _text(message: bytes) -> str:
    try:
        return message.decode()
    except UnicodeDecodeError:
        raise ScramError("the message is no text") from None


def _attributes(text: str) -> dict[str, str]:
    """Return the values of `a=value` parts by their letter."""
    return {part[:1]: part[2:] for part in text.split(",") if part[1:2] == "="}


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise ScramError("the proof is not base64") from None
