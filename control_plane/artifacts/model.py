"""Kinds, states and limits of artifacts and uploads. Pure."""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

UPLOADS_MAX = 32  # largest number of open uploads per tenant
# Attempts to process an upload before it is refused. With the pauses of `pause_after` they last 23
# minutes.
ATTEMPTS_MAX = 12
_PAUSE_MAX_S = 300


class Kind(StrEnum):
    """The kind of an artifact, which determines its inspection."""

    ADAPTER = "adapter"
    BASE = "base"


class UploadState(StrEnum):
    """The state of an upload. The last three states are final."""

    IMPORTING = "importing"  # the control plane fetches the files of an import
    UPLOADING = "uploading"
    VALIDATING = "validating"
    READY = "ready"
    REFUSED = "refused"
    CANCELLED = "cancelled"


LIVE_STATES = (UploadState.IMPORTING, UploadState.UPLOADING, UploadState.VALIDATING)


def pause_after(attempts: int) -> timedelta:
    """Return the pause of an upload after a number of failed attempts."""
    return timedelta(seconds=min(2**attempts, _PAUSE_MAX_S))


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of artifacts.

    Attributes:
        rank_max: Largest rank of an adapter if no pool of its base serves adapters.
        adapter_bytes_max: Largest size of one adapter's files together, in bytes.
        tenant_bytes_max: Largest size of all artifacts of a tenant, in bytes. Zero means no limit.
        are_signed: Whether an artifact needs a signature.
    """

    rank_max: int
    adapter_bytes_max: int
    tenant_bytes_max: int
    are_signed: bool


def quota_problem(held_bytes: int, added_bytes: int, quota_bytes: int) -> str:
    """Return the reason why a tenant may not add this many bytes, or an empty text."""
    if not quota_bytes or held_bytes + added_bytes <= quota_bytes:
        return ""
    return (
        f"{added_bytes} bytes more than the {held_bytes} that the tenant has are above its quota of"
        f" {quota_bytes} bytes: remove artifacts, or ask for a larger quota"
    )
