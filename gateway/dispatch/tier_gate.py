"""Decides which requests a gateway refuses before any work, by the gates of routers. Pure.

A router that refuses most requests of a tier reports a gate, which is the share of the tier's
requests that gateways shall still send. The gateway sends this share of each tenant's requests,
evenly spread over time, and refuses the other requests itself.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from sluice.wire.router.v1 import router_pb2 as wire

# Seconds for which a reported gate is valid. Routers repeat their gates every second.
LEASE_S = 2.0
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 30.0
_KEPT_MAX = 4096  # stored entries by cell, tier and tenant, above which all entries are dropped


class ToldGate(NamedTuple):
    """The gate of a tier, or of one tenant in a tier.

    Attributes:
        passing: Share of the requests that are sent to the router.
        retry_s: Seconds from the router's report until a refused request may be retried.
        service_s: Seconds by which each refused request delays the retry of the next refused
            request, so that retries do not arrive together.
    """

    passing: float
    retry_s: float
    service_s: float


# Gates by tier priority and tenant id. The empty id is for all tenants without a gate of their own.
ToldGates = Mapping[tuple[int, str], ToldGate]
NO_GATES: ToldGates = MappingProxyType({})


def told_gates(state: wire.CellState) -> ToldGates:
    """Return the gates in a router's report about a cell."""
    return {
        (it.priority, it.tenant_id): ToldGate(
            it.passing_permille / 1e3, it.retry_ms / 1e3, it.service_us / 1e6
        )
        for it in state.tier_gates
    }


class GatedCell(Protocol):
    """The attributes of `CellView` that this module reads."""

    cell_id: str
    replicas_ready: int
    is_refusing: bool
    gates: ToldGates
    told_at_s: float


class GateAsk(NamedTuple):
    """The traits of a request that are known before its body is processed.

    Attributes:
        priority: Priority of the request's tier at routers.
        tenant_id: Id of the request's tenant.
    """

    priority: int
    tenant_id: str


class GateRefusal(NamedTuple):
    """The refusal of a request by the gates of a pool's cells.

    Attributes:
        cell_id: Cell whose gate passes the largest share.
        retry_after_s: Seconds until the request may be retried.
    """

    cell_id: str
    retry_after_s: float


class EarlyGate:
    """Applies gates to the requests of one gateway worker.

    A request passes when its tenant has collected a credit of 1, and each request adds the passing
    share to the credit. The object stores these credits, and the retry times sent to clients.
    """

    def __init__(self) -> None:
        self._credit: dict[tuple[str, int, str], float] = {}  # by cell, priority and tenant
        # Time of the last report, and the delay in seconds added since, by cell and priority.
        self._promised: dict[tuple[str, int], tuple[float, float]] = {}

    def refusal(self, cells: Sequence[GatedCell], ask: GateAsk, now_s: float) -> GateRefusal | None:
        """Return the refusal of a request, or None if the request may be sent to a router.

        Args:
            cells: Cells of the pool whose routers are connected.
            ask: The request.
            now_s: Current time, on the clock of `GatedCell.told_at_s`.
        """
        found = _widest(cells, ask, now_s)
        if found is None:
            return None
        cell, gate = found
        key = (cell.cell_id, ask.priority, ask.tenant_id)
        if key not in self._credit and len(self._credit) >= _KEPT_MAX:
            self._credit.clear()
        # The first request of a tenant always passes.
        credit = self._credit.get(key, 1.0 - gate.passing) + gate.passing
        if credit >= 1.0 - 1e-9:
            self._credit[key] = credit - 1.0
            return None
        self._credit[key] = credit
        return GateRefusal(cell.cell_id, self._retry_s(cell, ask.priority, gate, now_s))

    def _retry_s(self, cell: GatedCell, priority: int, gate: ToldGate, now_s: float) -> float:
        """Return the seconds until a retry. Each refusal since the last report adds `service_s`."""
        key = (cell.cell_id, priority)
        told_at_s, added_s = self._promised.get(key, (0.0, 0.0))
        if told_at_s != cell.told_at_s:  # the new report includes the earlier refusals
            added_s = 0.0
        if key not in self._promised and len(self._promised) >= _KEPT_MAX:
            self._promised.clear()
        self._promised[key] = cell.told_at_s, added_s + gate.service_s
        retry_s = cell.told_at_s + gate.retry_s + added_s - now_s
        return min(max(retry_s, _RETRY_MIN_S), _RETRY_MAX_S)


def _widest(
    cells: Sequence[GatedCell], ask: GateAsk, now_s: float
) -> tuple[GatedCell, ToldGate] | None:
    """Return the cell whose gate passes the largest share, with its gate.

    Returns:
        None if a cell that serves has no gate for the request, or if no cell serves.
    """
    found: tuple[GatedCell, ToldGate] | None = None
    for cell in cells:
        if not cell.replicas_ready or cell.is_refusing:
            continue
        gates = cell.gates
        if not gates or now_s - cell.told_at_s > LEASE_S:  # the usual case
            return None
        gate = gates.get((ask.priority, ask.tenant_id)) or gates.get((ask.priority, ""))
        if gate is None:
            return None
        if found is None or gate.passing > found[1].passing:
            found = cell, gate
    return found
