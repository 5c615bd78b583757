"""Text, hash and expiry, which tenants' keys and admin keys have in common. Pure."""

import hashlib
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from control_plane.fields import AdminBody

KEY_PREFIX = "sk-sluice"
ADMIN_KEY_PREFIX = f"{KEY_PREFIX}-admin"
GRACE_DAYS_MAX = 90
_DAY_S = 86_400


class RotationBody(AdminBody):
    """The body of a key's rotation. The old key still works for `grace_s` seconds."""

    grace_s: Annotated[int, Field(ge=0, le=GRACE_DAYS_MAX * _DAY_S)] = _DAY_S


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key with its text, which is shown only once."""

    id: str
    text: str

    @property
    def sha256(self) -> bytes:
        """The hash to store. A key has 256 random bits, so a plain hash cannot be reversed."""
        return hashlib.sha256(self.text.encode()).digest()


def is_expired(expires_at_unix_ms: int, now_unix_ms: int) -> bool:
    """Return whether a key has expired at `now_unix_ms`. An expiry of 0 is never."""
    return 0 < expires_at_unix_ms < now_unix_ms


def expiry_after_grace(expires_at_unix_ms: int, now_unix_ms: int, grace_s: int) -> int:
    """Return the expiry of a replaced key, which is the end of its grace time.

    An expiry that is already earlier does not change.
    """
    end = now_unix_ms + grace_s * 1000
    return min(expires_at_unix_ms, end) if expires_at_unix_ms else end
