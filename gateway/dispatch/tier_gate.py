"""Decides which requests a gateway refuses before any work, by the gates that routers tell; pure.

A router that refuses most requests of a tier tells which share of them shall come through. This
share of each tenant's requests goes on, evenly spread; the others are refused here.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from sluice.wire.router.v1 import router_pb2 as wire

# A router repeats its gates every second. An older one is open.
LEASE_S = 2.0
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 30.0
_KEPT_MAX = 4096  # tenants whose share is counted


class ToldGate(NamedTuple):
    """The gate of a tier, or of a tenant in it.

    Attributes:
        passing: Share of the requests that go on.
        retry_s: Seconds from when it was told until a refused request may come again.
        service_s: Seconds by which each refused request makes this later for the next one.
    """

    passing: float
    retry_s: float
    service_s: float


# By priority and tenant; the empty tenant stands for all others.
ToldGates = Mapping[tuple[int, str], ToldGate]
NO_GATES: ToldGates = MappingProxyType({})


def told_gates(state: wire.CellState) -> ToldGates:
    """Return the gates of a cell's tiers."""
    return {
        (it.priority, it.tenant_id): ToldGate(
            it.passing_permille / 1e3, it.retry_ms / 1e3, it.service_us / 1e6
        )
        for it in state.tier_gates
    }


class GatedCell(Protocol):
    """The part of `CellView` that is read here."""

    cell_id: str
    replicas_ready: int
    is_refusing: bool
    gates: ToldGates
    told_at_s: float


class GateAsk(NamedTuple):
    """The traits of a request that are known before any work.

    Attributes:
        priority: Priority at routers.
        tenant_id: Id of its tenant.
    """

    priority: int
    tenant_id: str


class GateRefusal(NamedTuple):
    """A refusal.

    Attributes:
        cell_id: Cell whose gate is the widest.
        retry_after_s: Seconds until the request may come again.
    """

    cell_id: str
    retry_after_s: float


class EarlyGate:
    """The gates of one gateway worker, with the counts and promises that they need."""

    def __init__(self) -> None:
        self._credit: dict[tuple[str, int, str], float] = {}  # by cell, priority and tenant
        self._promised: dict[tuple[str, int], tuple[float, float]] = {}  # see `_retry_s`

    def refusal(self, cells: Sequence[GatedCell], ask: GateAsk, now_s: float) -> GateRefusal | None:
        """Return why a request is refused, with an honest time; None: it goes to a router.

        Args:
            cells: Cells of the pool that can be reached.
            ask: The request.
            now_s: The time of `GatedCell.told_at_s`.
        """
        found = _widest(cells, ask, now_s)
        if found is None:
            return None
        cell, gate = found
        key = (cell.cell_id, ask.priority, ask.tenant_id)
        if key not in self._credit and len(self._credit) >= _KEPT_MAX:
            self._credit.clear()
        # A new tenant's first request goes on.
        credit = self._credit.get(key, 1.0 - gate.passing) + gate.passing
        if credit >= 1.0 - 1e-9:
            self._credit[key] = credit - 1.0
            return None
        self._credit[key] = credit
        return GateRefusal(cell.cell_id, self._retry_s(cell, ask.priority, gate, now_s))

    def _retry_s(self, cell: GatedCell, priority: int, gate: ToldGate, now_s: float) -> float:
        """Return a time behind all requests that were refused since the router's message."""
        key = (cell.cell_id, priority)
        told_at_s, added_s = self._promised.get(key, (0.0, 0.0))
        if told_at_s != cell.told_at_s:  # its time counts the earlier ones
            added_s = 0.0
        if key not in self._promised and len(self._promised) >= _KEPT_MAX:
            self._promised.clear()
        self._promised[key] = cell.told_at_s, added_s + gate.service_s
        retry_s = cell.told_at_s + gate.retry_s + added_s - now_s
        return min(max(retry_s, _RETRY_MIN_S), _RETRY_MAX_S)


def _widest(
    cells: Sequence[GatedCell], ask: GateAsk, now_s: float
) -> tuple[GatedCell, ToldGate] | None:
    """Return the cell that lets most through; None: one lets all through, or none serves."""
    found: tuple[GatedCell, ToldGate] | None = None
    for cell in cells:
        if not cell.replicas_ready or cell.is_refusing:
            continue
        gates = cell.gates
        if not gates or now_s - cell.told_at_s > LEASE_S:  # as nearly always
            return None
        gate = gates.get((ask.priority, ask.tenant_id)) or gates.get((ask.priority, ""))
        if gate is None:
            return None
        if found is None or gate.passing > found[1].passing:
            found = cell, gate
    return found
