"""The gates that a router tells: only of tiers that it refuses itself, soon, and with a margin."""

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.tier_gates import GateShare
from tests.unit.router.test_admission import Cell, slow

if TYPE_CHECKING:
    from sluice.wire.router.v1 import router_pb2 as wire

HIGH, LOW = 11, 7  # queue priorities of two tiers
TIER = {"deadline_s": 30.0, "admission_s": 1.5}


class Heard(Cell):
    """A slow cell, and the gates that a gateway hears of."""

    def __init__(self, **config: object) -> None:
        self.gates: dict[tuple[int, str], wire.TierGate] = {}
        self.heard_at: list[float] = []
        super().__init__(sequences=100, **config)
        slow(self, 0.001)

    def ask(self, priority: int = LOW, tenant_id: str = "flood", **fields: object) -> int:
        return self.submit(500, priority=priority, tenant_id=tenant_id, **{**TIER, **fields})

    def tick(self, advance_s: float = 0.0) -> None:
        self.now += advance_s
        for _, batch in self.core.tick(self.now).batches:
            self.outcomes.update({entry.handle: entry for entry in batch.outcomes})
            for state in batch.cells:
                self.gates = {(it.priority, it.tenant_id): it for it in state.tier_gates}
                self.heard_at.append(self.now)

    def press(self, priority: int = LOW, tenant_id: str = "flood", for_s: float = 1.3) -> None:
        """Submit 100 requests per second, of which hardly any finds room."""
        for _ in range(round(for_s * 10)):
            for _ in range(10):
                self.ask(priority, tenant_id)
            self.tick(0.1)

    def flood(self, priority: int = LOW, tenant_id: str = "flood", times: int = 1) -> None:
        """Submit until so many are refused."""
        refused = 0
        for _ in range(400):
            refused += bool(self.code(self.ask(priority, tenant_id)))
            if refused == times:
                return
        raise AssertionError("everything is let in")


def test_gateways_hear_within_100_ms_of_a_second_of_refusals() -> None:
    world = Heard()
    world.flood(HIGH, "crowd")
    world.press(for_s=0.9)
    assert not world.gates, "a moment of refusals closes no gate"
    world.tick(0.15)
    saturated_at = world.now
    world.ask()
    while not world.gates:
        world.now = max(world.core.next_tick_at(world.now), world.now + 1e-6)
        world.tick()
    assert world.now - saturated_at <= 0.1
    told = world.gates[LOW, "flood"]
    assert told.passing_permille < 500
    assert told.service_us > 0


def test_few_refusals_close_no_gate() -> None:
    world = Heard()
    world.flood(HIGH, "crowd")
    for _ in range(12):
        world.flood()
        world.tick(0.25)
    assert not world.gates


def test_a_tenant_that_finds_room_has_no_gate() -> None:
    world = Heard()
    world.flood(HIGH, "crowd")
    world.press(HIGH, "crowd")
    assert world.gates.keys() == {(HIGH, "crowd")}


def test_requests_with_deadlines_of_their_own_close_no_gate() -> None:
    world = Heard()
    world.flood(HIGH, "crowd")
    for _ in range(30):
        refused = [world.code(world.ask(admission_s=0.0, deadline_s=1.5)) for _ in range(3)]
        assert all(refused)
        world.tick(0.05)
    assert not world.gates


def test_a_gate_opens_at_once_when_there_is_room() -> None:
    world = Heard()
    world.flood(HIGH, "crowd")
    world.press()
    assert world.gates
    for request in list(world.cell.queue.waiting()):
        world.core.cancel(1, request.handle)
    world.tick(0.2)
    world.tick(0.2)
    assert not world.gates


def test_a_shut_gate_lets_a_probe_through() -> None:
    world = Heard()
    world.flood(HIGH, "crowd")
    world.press(for_s=3.0)
    assert world.gates[LOW, "flood"].passing_permille == round(1000 / 64)


def _stepped(share: float, came: int, fitted: int, after_s: float = 0.25) -> float:
    """Return a share one step after the requests that came and fitted since the last one."""
    gate = GateShare(0.0)
    gate.share = share
    gate._came, gate._fitted, gate._at = float(came), float(fitted), after_s
    gate.step(after_s)
    return gate.share


def test_a_share_falls_by_refusals_and_stays_without_requests() -> None:
    assert _stepped(0.2, came=20, fitted=0) == 0.1
    assert 0.1 < _stepped(0.2, came=1, fitted=0) < 0.2, "one refusal changes little"
    assert _stepped(0.2, came=2, fitted=1) == pytest.approx(0.2)
    assert _stepped(0.2, came=0, fitted=0) == 0.2


def test_a_share_rises_at_once_when_most_requests_fit_or_none_come() -> None:
    assert _stepped(0.1, came=1, fitted=1) == pytest.approx(0.4)
    assert _stepped(0.5, came=3, fitted=2) == 1.0
    gate = GateShare(0.0)
    gate.share = 0.1
    for step in range(1, 5):
        assert gate.share == 0.1
        gate.step(0.25 * step)
    assert gate.share == pytest.approx(0.4)


def test_refusals_before_a_share_changed_do_not_lower_it_again() -> None:
    gate = GateShare(0.0)
    gate.share, gate._came, gate._at = 0.4, 40.0, 0.25
    gate.step(0.25)
    assert gate.share == 0.2
    gate.step(0.5)
    assert gate.share == 0.2


def test_requests_that_gateways_refuse_are_demand_and_later_ones_come_behind_them() -> None:
    world = Heard()
    world.flood(HIGH, "crowd")
    world.press()
    told = world.gates[LOW, "flood"]
    before = world.cell.work.tiers[LOW // 4]
    sums = before.requests, before.prompt_tokens, before.refused
    world.core.turned_away("cell", LOW, 5, world.now)
    world.core.turned_away("elsewhere", LOW, 5, world.now)
    after = world.cell.work.tiers[LOW // 4]
    assert after.requests - sums[0] == after.refused - sums[2] == 5
    assert after.prompt_tokens - sums[1] == round(5 * world.cell.uncached_mean)
    world.cell.is_dirty = True
    world.tick(0.11)
    later_ms = world.gates[LOW, "flood"].retry_ms + 110 - told.retry_ms
    assert later_ms > 0


@given(st.lists(st.sampled_from(["one", "two", "three"]), min_size=40, max_size=120))
def test_a_gate_is_only_of_tenants_that_the_router_refuses(tenants: list[str]) -> None:
    world = Heard()
    world.flood(HIGH, "crowd")
    refused = set()
    for tenant_id in tenants:
        if world.code(world.ask(LOW, tenant_id)):
            refused.add(tenant_id)
        world.tick(0.03)
    world.tick(0.2)
    assert {tenant_id for _, tenant_id in world.gates} <= refused | {"crowd"}


def test_no_more_tenants_are_told_apart_than_are_kept() -> None:
    world = Heard(tenant_requests_max=10_000)
    world.flood(HIGH, "crowd")
    for round_number in range(130):
        for number in range(8):
            world.ask(LOW, f"tenant-{(8 * round_number + number) % 50}")
        world.tick(0.01)
    world.tick(0.2)
    assert 1 <= len(world.gates) <= 34
    assert (LOW, "") in world.gates
