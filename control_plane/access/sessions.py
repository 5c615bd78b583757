"""Sessions of the console, which replace an admin key in the browser; pure.

The browser sends a cookie that its scripts cannot read. Writes also carry a header with a value
that only the console's own page gets: other sites can send neither.
"""

import hashlib
import hmac
from dataclasses import dataclass
from datetime import datetime

from control_plane.access.roles import Actor
from sluice.ids import new_secret

COOKIE = "sluice_console"
CSRF_HEADER = "x-csrf-token"
SESSIONS_MAX = 50  # per actor: the oldest ends when one more begins
_PREFIX = "console"
_SECRET_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """A session that has not ended.

    Attributes:
        actor: Actor of its requests.
        expires_at: Time at which it ends by itself.
    """

    id: str
    actor: Actor
    expires_at: datetime


def new_session_secret() -> str:
    """Return the text of a new cookie: 256 random bits."""
    return new_secret(_PREFIX)


def secret_hash(secret: str) -> bytes:
    """Return the stored hash of a cookie."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def is_secret(text: str) -> bool:
    """Return whether a cookie has the right form: others are refused without a query."""
    return text.startswith(f"{_PREFIX}-") and len(text) <= _SECRET_CHARS_MAX


def csrf_token(secret: str) -> str:
    """Return the header's value for a cookie; the cookie cannot be derived from it."""
    return hmac.new(secret.encode(), b"csrf", hashlib.sha256).hexdigest()


def is_csrf_token(given: str, secret: str) -> bool:
    """Return whether a header belongs to a cookie; compared in constant time."""
    return hmac.compare_digest(
        given.encode("utf-8", "surrogateescape"), csrf_token(secret).encode()
    )
