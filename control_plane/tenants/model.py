"""Who uses the platform: tiers, tenants and their API keys."""

import hashlib
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from control_plane.fields import Body, Count, Id, Text

SALT_BYTES = 16
KEY_PREFIX = "sk-sluice"
RESERVED_PERMILLE_MAX = 1000  # of all tiers together


class TierBody(Body):
    """A priority class and its limits; 0 is no limit.

    `reserved_permille` is the share of every cell that the tier gets at least while it has work;
    all tiers together can have 1000. Work of a tier that `is_preemptible` (batch) is shed first,
    and interrupted when a higher tier would miss its deadline.
    """

    priority: Count = 0
    rpm: Count = 0
    tpm: Count = 0
    context_tokens_max: Count = 0
    ttft_deadline_ms: Count = 0
    reserved_permille: Annotated[int, Field(ge=0, le=RESERVED_PERMILLE_MAX)] = 0
    is_preemptible: bool = False


class TenantBody(Body):
    """A customer. Its cache salt is made by us, never changes and is never shown."""

    name: Text = ""
    tier_id: Id
    is_disabled: bool = False
    weight: Annotated[int, Field(ge=1, le=1_000_000)] = 1


class KeyBody(Body):
    """A new API key; limits of 0 are the tier's."""

    expires_at_unix_ms: Annotated[int, Field(ge=0, le=2**53)] = 0
    rpm: Count = 0
    tpm: Count = 0


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the one moment when its text is known."""

    id: str
    text: str

    @property
    def sha256(self) -> bytes:
        """What is stored. The text has 256 random bits, so a plain hash cannot be reversed."""
        return hashlib.sha256(self.text.encode()).digest()
