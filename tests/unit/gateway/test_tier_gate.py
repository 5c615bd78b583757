"""Requests that a gateway refuses before any work: the share that routers have told, for 2 s."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.tier_gate import LEASE_S, EarlyGate, GateAsk, ToldGate, told_gates
from sluice.wire.router.v1 import router_pb2 as wire

GATE = ToldGate(passing=0.25, retry_s=4.0, service_s=0.5)
SHUT = ToldGate(passing=1 / 64, retry_s=4.0, service_s=0.5)
ASK = GateAsk(priority=3, tenant_id="t")


@dataclass
class View:
    """A cell, from a gateway's side."""

    cell_id: str = "c"
    replicas_ready: int = 1
    is_refusing: bool = False
    gates: dict[tuple[int, str], ToldGate] = field(default_factory=dict)
    told_at_s: float = 10.0


def gated(gate: ToldGate = GATE, tenant_id: str = "", **fields: object) -> View:
    return View(gates={(3, tenant_id): gate}, **fields)  # pyright: ignore[reportArgumentType]


def passed(gate: EarlyGate, cells: list[View], ask: GateAsk = ASK, times: int = 100) -> int:
    return sum(gate.refusal(cells, ask, 11.0) is None for _ in range(times))


def test_the_told_share_goes_on_evenly_and_each_tenant_has_its_own() -> None:
    gate = EarlyGate()
    goes_on = [gate.refusal([gated()], ASK, 11.0) is None for _ in range(12)]
    assert goes_on == [True, False, False, False] * 3
    assert gate.refusal([gated()], ASK._replace(tenant_id="new"), 11.0) is None
    assert passed(EarlyGate(), [gated(SHUT)], times=640) == 10


@pytest.mark.parametrize(
    ("view", "ask", "now_s"),
    [
        (gated(SHUT), ASK._replace(priority=4), 11.0),
        (gated(SHUT, "other"), ASK, 11.0),
        (gated(SHUT), ASK, 10.0 + LEASE_S + 0.1),
        (gated(SHUT, replicas_ready=0), ASK, 11.0),
        (gated(SHUT, is_refusing=True), ASK, 11.0),
        (View(), ASK, 11.0),
    ],
    ids=["other tier", "other tenant", "lease is over", "no replica", "router ends", "open"],
)
def test_all_other_requests_go_to_a_router(view: View, ask: GateAsk, now_s: float) -> None:
    gate = EarlyGate()
    assert all(gate.refusal([view], ask, now_s) is None for _ in range(20))


def test_a_tenants_own_gate_counts_before_that_of_all_others() -> None:
    view = View(gates={(3, ""): SHUT, (3, "t"): ToldGate(0.5, 1.0, 0.0)})
    assert passed(EarlyGate(), [view]) == 50


def test_the_widest_gate_of_a_pools_cells_counts() -> None:
    wide = gated(ToldGate(0.5, 1.0, 0.0), cell_id="wide")
    assert passed(EarlyGate(), [gated(SHUT), wide]) == 50
    assert passed(EarlyGate(), [gated(SHUT), View("open")]) == 100
    gate = EarlyGate()
    gate.refusal([gated(SHUT), wide], ASK, 11.0)
    refusal = gate.refusal([gated(SHUT), wide], ASK, 11.0)
    assert refusal is not None
    assert refusal.cell_id == "wide"


def test_each_refused_request_is_told_a_later_time_until_the_router_counts_them() -> None:
    gate, view = EarlyGate(), gated(SHUT)
    gate.refusal([view], ASK, 11.0)
    told = [gate.refusal([view], ASK, 11.0) for _ in range(3)]
    assert [it and it.retry_after_s for it in told] == [3.0, 3.5, 4.0]
    view.told_at_s = 11.0
    again = gate.refusal([view], ASK, 11.0)
    assert again is not None
    assert again.retry_after_s == 4.0


@given(st.lists(st.tuples(st.floats(0, 2), st.sampled_from("abc")), max_size=60))
def test_times_are_bounded(arrivals: list[tuple[float, str]]) -> None:
    gate, now_s = EarlyGate(), 10.0
    for gap_s, tenant_id in arrivals:
        now_s += gap_s
        view = gated(SHUT._replace(retry_s=29.0), told_at_s=now_s - 0.5)
        found = gate.refusal([view], GateAsk(3, tenant_id), now_s)
        assert found is None or 0.1 <= found.retry_after_s <= 30.0


def test_the_counts_of_tenants_are_bounded() -> None:
    gate = EarlyGate()
    for number in range(10_000):
        gate.refusal([gated(SHUT)], ASK._replace(tenant_id=str(number)), 11.0)
    assert len(gate._credit) <= 4096


def test_gates_are_read_in_their_units() -> None:
    told = wire.TierGate(priority=3, passing_permille=250, retry_ms=4000, service_us=500_000)
    assert told_gates(wire.CellState(tier_gates=[told])) == {(3, ""): GATE}
