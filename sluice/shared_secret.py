"""The secret that all processes of an installation share, and digests derived from it.

A caller of a platform port must prove that it belongs to the installation. A process sends only
keyed digests of the secret, a different digest for each purpose. So a digest that is intercepted on
the way to one service is useless at another service. The secret itself is never sent, logged or
passed to an engine.
"""

import hashlib
import hmac
import os
import sys
from collections.abc import Sequence
from functools import lru_cache

from pydantic import SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from sluice.settings import ServiceSettings

CHARACTERS_MIN = 32
VARIABLE = "INSTALLATION__SECRET"
_MAC_BYTES = 32
_PURPOSES_MAX = 64  # most cached purposes, which are the services' names


class InstallationSettings(ServiceSettings):
    """The setting that all processes of an installation share, and no other process has.

    Attributes:
        secret: Secret of at least 32 characters, the same in every process. To replace the secret,
            set the new and the old secret, separated by a comma. The first secret signs, and all
            secrets are accepted.
        is_required: Whether calls and events without a proof are refused. False only while a
            platform is upgraded from a version without the secret.
    """

    model_config = SettingsConfigDict(env_prefix="INSTALLATION__")

    secret: SecretStr
    is_required: bool = True

    @field_validator("secret")
    @classmethod
    def _long_enough(cls, secret: SecretStr) -> SecretStr:
        if any(len(one) < CHARACTERS_MIN for one in listed(secret.get_secret_value())):
            raise ValueError(
                f"want at least {CHARACTERS_MIN} characters, as `openssl rand -hex 32` makes them;"
                " the same in every process"
            )
        return secret


def listed(text: str) -> list[str]:
    """Return the secrets of a setting, the signing secret first.

    An empty text is an empty secret.
    """
    return [part.strip() for part in text.split(",")]


class SharedSecret:
    """Signs and verifies proofs with the installation's secrets. Thread-safe.

    Attributes:
        is_required: Whether callers without a proof are refused.
    """

    def __init__(self, secrets: Sequence[str], *, is_required: bool = True) -> None:
        """Store the secrets, of which the first signs and all are accepted."""
        self.is_required = is_required
        self._keys = tuple(one.encode() for one in secrets)
        self.tokens = lru_cache(_PURPOSES_MAX)(self._tokens)
        self._macs = lru_cache(_PURPOSES_MAX)(self._empty_macs)

    def _tokens(self, purpose: str) -> tuple[str, ...]:
        """Return the token of each secret for one purpose, 64 hex digits."""
        return tuple(_digest(key, b"token", purpose.encode()).hex() for key in self._keys)

    def is_token(self, purpose: str, given: Sequence[str | bytes]) -> bool:
        """Return whether any of the tokens is valid for a purpose, in constant time."""
        shown = [one.encode() if isinstance(one, str) else one for one in given]
        matches = [
            hmac.compare_digest(token.encode(), one)
            for token in self.tokens(purpose)
            for one in shown
        ]
        return any(matches)

    def mac(self, purpose: str, data: bytes) -> bytes:
        """Return a MAC of 32 bytes, which proves that a platform process wrote the data."""
        return _mac(self._macs(purpose)[0], data)

    def short_macs(self, purpose: str, data: bytes, size: int) -> tuple[bytes, ...]:
        """Return the first bytes of each secret's MAC.

        The first MAC is for signing, all are valid.
        """
        return tuple(_mac(empty, data)[:size] for empty in self._macs(purpose))

    def is_mac(self, purpose: str, data: bytes, given: bytes) -> bool:
        """Return whether a MAC proves that a platform process wrote the data, in constant time."""
        macs = self._macs(purpose)
        matches = [hmac.compare_digest(_mac(empty, data), given) for empty in macs]
        return any(matches)

    def sealing_keys(self, purpose: str) -> tuple[bytes, ...]:
        """Return each secret's 32-byte encryption key. The first key encrypts, all can decrypt."""
        return tuple(_digest(key, b"seal", purpose.encode()) for key in self._keys)

    def _empty_macs(self, purpose: str) -> tuple[hashlib.blake2b, ...]:
        """Return, for each secret, an empty BLAKE2b hash keyed for one purpose."""
        name = purpose.encode()
        keys = (_digest(key, b"mac", name) for key in self._keys)
        return tuple(hashlib.blake2b(key=key, digest_size=_MAC_BYTES) for key in keys)


def _mac(empty: hashlib.blake2b, data: bytes) -> bytes:
    made = empty.copy()  # costs half of an HMAC, because the key is already hashed
    made.update(data)
    return made.digest()


def _digest(key: bytes, kind: bytes, data: bytes) -> bytes:
    return hmac.digest(key, len(kind).to_bytes(2, "big") + kind + data, hashlib.sha256)


class _Ours:
    secret: SharedSecret | None = None


def environment() -> dict[str, str]:
    """Return the environment variables by which a child process joins the installation."""
    return {VARIABLE: os.environ[VARIABLE]}


def use() -> None:
    """Read this process's secret from the environment.

    Without a valid secret, the process ends with status 2 and an error message on stderr.
    """
    settings, problems = InstallationSettings.check()
    if settings is None or problems:
        sys.stderr.write("\n".join(problems) + "\n")
        sys.stderr.write(
            "INSTALLATION__SECRET proves that a process belongs to this installation: give all of"
            " them the same one; docs/security.md says how to make it\n"
        )
        raise SystemExit(2)
    secrets = listed(settings.secret.get_secret_value())
    install(SharedSecret(secrets, is_required=settings.is_required))


def install(secret: SharedSecret) -> None:
    """Set this process's secret."""
    _Ours.secret = secret


def ours() -> SharedSecret:
    """Return this process's secret.

    Raises:
        RuntimeError: The process has no secret.
    """
    if _Ours.secret is None:
        raise RuntimeError("no INSTALLATION__SECRET is set: call sluice.shared_secret.use first")
    return _Ours.secret
