"""Sessions of the console, which replace an admin key in the browser. Pure.

The browser sends a cookie that scripts cannot read. Writes also have a header whose value only the
console's page receives. So another site cannot send a write.
"""

import hashlib
import hmac
from dataclasses import dataclass
from datetime import datetime

from control_plane.access.roles import Actor
from sluice.ids import new_secret

COOKIE = "sluice_console"
CSRF_HEADER = "x-csrf-token"
SESSIONS_MAX = 50  # Largest number of sessions per actor. A further session ends the oldest one.
_PREFIX = "console"
_SECRET_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class ConsoleSession:
    """A session that has not ended.

    Attributes:
        actor: Actor of the session's requests.
        expires_at: Time at which the session expires.
    """

    id: str
    actor: Actor
    expires_at: datetime


def new_session_secret() -> str:
    """Return the text of a new cookie, which has 256 random bits."""
    return new_secret(_PREFIX)


def secret_hash(secret: str) -> bytes:
    """Return the hash of a cookie, which is stored instead of the cookie."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def is_secret(text: str) -> bool:
    """Return whether a cookie has the right form. Other cookies are refused without a query."""
    return text.startswith(f"{_PREFIX}-") and len(text) <= _SECRET_CHARS_MAX


def csrf_token(secret: str) -> str:
    """Return the header's value for a cookie. The cookie cannot be derived from this value."""
    return hmac.new(secret.encode(), b"csrf", hashlib.sha256).hexdigest()


def is_csrf_token(given: str, secret: str) -> bool:
    """Return, in constant time, whether a header's value belongs to a cookie."""
    return hmac.compare_digest(
        given.encode("utf-8", "surrogateescape"), csrf_token(secret).encode()
    )
