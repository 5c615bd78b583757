"""What artifacts and uploads are; pure."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

UPLOADS_MAX = 32  # of one tenant at once
# How often an upload is worked on before it is given up; with the pauses below, 23 minutes.
ATTEMPTS_MAX = 12
_PAUSE_MAX_S = 300


class Kind(StrEnum):
    """What an artifact is; it decides what is looked at before it is accepted."""

    ADAPTER = "adapter"
    BASE = "base"


class UploadState(StrEnum):
    """Where an upload stands; the last three are its ends."""

    IMPORTING = "importing"  # the control plane fetches it
    UPLOADING = "uploading"
    VALIDATING = "validating"
    READY = "ready"
    REFUSED = "refused"
    CANCELLED = "cancelled"


LIVE_STATES = (UploadState.IMPORTING, UploadState.UPLOADING, UploadState.VALIDATING)


def pause_after(attempts: int) -> timedelta:
    """Return how long an upload rests after so many attempts that came to no end."""
    return timedelta(seconds=min(2**attempts, _PAUSE_MAX_S))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What artifacts may be.

    Attributes:
        rank_max: Of adapters whose base no pool with adapters serves.
        adapter_bytes_max: Of one adapter's files.
        tenant_bytes_max: Of all artifacts of a tenant; 0: any.
        are_signed: Nothing is accepted without a signature.
    """

    rank_max: int
    adapter_bytes_max: int
    tenant_bytes_max: int
    are_signed: bool


def quota_problem(held_bytes: int, added_bytes: int, quota_bytes: int) -> str:
    """Return why a tenant may not add so much; empty when it may, or when the quota is 0."""
    if not quota_bytes or held_bytes + added_bytes <= quota_bytes:
        return ""
    return (
        f"{added_bytes} bytes more than the {held_bytes} that the tenant has are above its quota of"
        f" {quota_bytes} bytes: remove artifacts, or ask for a larger quota"
    )
