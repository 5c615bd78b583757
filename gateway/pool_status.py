"""The status of a model's pool, in the form that callers of the API receive. Pure.

Tenants share pools, so the status must not reveal the current requests of other tenants in detail.
Counts are rounded down to powers of two, and to 0 below eight. Waits are rounded up to steps of 100
ms. A caller can learn about as much from the latencies of its own requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.dispatch.cell_choice import CellView

COUNT_MIN = 8
WAIT_STEP_MS = 100


class PoolReadiness(StrEnum):
    """Whether a model can answer now."""

    READY = "ready"
    LOADING = "loading"  # replicas are starting
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The status of a pool, with exact figures.

    Attributes:
        replicas_ready: Number of replicas that accept requests.
        replicas_starting: Number of replicas that are starting.
        queued: Number of waiting requests.
        running: Number of requests (or texts to embed) that are being computed.
        wait_ms: Predicted wait of a new, short request in milliseconds, or None if unknown.
    """

    replicas_ready: int = 0
    replicas_starting: int = 0
    queued: int = 0
    running: int = 0
    wait_ms: int | None = None

    @property
    def readiness(self) -> PoolReadiness:
        """Whether the pool can answer now, will soon, or cannot."""
        if self.replicas_ready:
            return PoolReadiness.READY
        return PoolReadiness.LOADING if self.replicas_starting else PoolReadiness.UNAVAILABLE

    @property
    def figures(self) -> dict[str, int | None]:
        """The figures in the rounded form for callers of the API."""
        return {
            "replicas_ready": self.replicas_ready,
            "queued": _at_least(self.queued),
            "running": _at_least(self.running),
            "wait_ms": None if self.wait_ms is None else _at_most(self.wait_ms),
        }


def status_of_cells(cells: Iterable[CellView], replicas_starting: int) -> PoolStatus:
    """Return the status of a pool from its cells whose routers are connected."""
    serving = [cell for cell in cells if cell.replicas_ready and not cell.is_refusing]
    return PoolStatus(
        replicas_ready=sum([cell.replicas_ready for cell in serving]),
        replicas_starting=replicas_starting,
        queued=sum([cell.queued for cell in serving]),
        running=sum([cell.running for cell in serving]),
        wait_ms=min([cell.wait_ms for cell in serving], default=None),
    )


def joined(statuses: Sequence[PoolStatus]) -> PoolStatus:
    """Return the combined status of several pools, any of which may answer a request."""
    if len(statuses) == 1:
        return statuses[0]
    waits = [it.wait_ms for it in statuses if it.wait_ms is not None]
    return PoolStatus(
        replicas_ready=sum([it.replicas_ready for it in statuses]),
        replicas_starting=sum([it.replicas_starting for it in statuses]),
        queued=sum([it.queued for it in statuses]),
        running=sum([it.running for it in statuses]),
        wait_ms=min(waits, default=None),
    )


def _at_least(count: int) -> int:
    return 0 if count < COUNT_MIN else 1 << (count.bit_length() - 1)


def _at_most(wait_ms: int) -> int:
    return -(-wait_ms // WAIT_STEP_MS) * WAIT_STEP_MS
