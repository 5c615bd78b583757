"""No sequence of rounds breaks the budget, whatever nodes, boots, operators and demand do.

Replicas that drain use their accelerators until they have ended, as in a real fleet. Nodes have no
room for a while, boots fail, replicas that nobody asked for appear, and facts are unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.scaling.model import (
    DECODE,
    PREFILL,
    FleetBudget,
    PoolFacts,
    PoolPlan,
    PoolState,
    ScalingSettings,
)
from control_plane.scaling.plan import plan, remember
from control_plane.scaling.roles import key_of

_LOOK_S = 15.0
_ROUNDS = 20
_NONE = PoolFacts(0, 0, 0.0)


@dataclass
class Replicas:
    """The replicas of a pool or role, and the facts that a round sees of them."""

    state: PoolState
    ready: int = 0
    booting: int = 0
    asleep: int = 0
    leaving: int = 0
    wanted: int = 0
    sleepers: int = 0
    unplaced_s: float = 0.0

    @property
    def placed(self) -> int:
        return self.ready + self.booting + self.asleep

    def see(self, demand: float, backlog_work_s: float, unknown: str) -> None:
        self.state.history.add(demand)
        missing = max(0, self.wanted + self.sleepers - self.placed)
        self.unplaced_s = self.unplaced_s + _LOOK_S if missing else 0.0
        self.state.facts = PoolFacts(
            self.ready,
            self.booting,
            backlog_work_s,
            planned=self.wanted,
            unplaced=missing,
            # Ten minutes are over after few rounds, so that a run has many of them.
            unplaced_s=20 * self.unplaced_s,
            asleep=self.asleep,
            sleepers=self.sleepers,
            unknown=unknown,
            placed=self.placed,
            leaving=self.leaving,
        )

    def take(self, decided: PoolPlan, now: float, *, has_places: bool) -> None:
        """Wake, put to sleep, drain and boot, as the fleet's loop does."""
        remember(self.state, decided, now)
        self.wanted, self.sleepers = decided.wanted, decided.asleep
        woken = max(0, min(self.asleep, self.wanted - self.ready - self.booting))
        self.ready, self.asleep = self.ready + woken, self.asleep - woken
        for name in ("booting", "ready"):
            surplus = min(getattr(self, name), self.ready + self.booting - self.wanted)
            if surplus <= 0:
                continue
            setattr(self, name, getattr(self, name) - surplus)
            slept = min(surplus, self.sleepers - self.asleep) if name == "ready" else 0
            self.asleep += max(0, slept)
            self.leaving += surplus - max(0, slept)
        gone = max(0, self.asleep - self.sleepers)
        self.asleep, self.leaving = self.asleep - gone, self.leaving + gone
        if has_places:
            self.booting += max(0, self.wanted + self.sleepers - self.placed)

    def pass_time(self, boots: int, fails: int, ends: int) -> None:
        come = min(boots, self.booting)
        self.ready, self.booting = self.ready + come, self.booting - come
        self.booting -= min(fails, self.booting)
        self.leaving -= min(ends, self.leaving)


@dataclass
class Fleet:
    """Pools, some with two roles, under one budget."""

    budget: FleetBudget
    replicas: dict[str, Replicas] = field(default_factory=dict)

    def used(self) -> tuple[float, float]:
        rows = [(it, it.state.settings) for it in self.replicas.values()]
        return (
            sum((it.placed + it.leaving) * own.accelerators for it, own in rows),
            sum((it.placed + it.leaving) * own.price for it, own in rows),
        )


def _relabel(fleet: Fleet, plans: Mapping[str, PoolPlan]) -> None:
    """Let replicas change their role without a boot, where one role grows and the other shrinks."""
    for key, it in fleet.replicas.items():
        if not it.state.role:
            continue
        other, more = fleet.replicas[it.state.partner], plans[key].wanted - it.placed
        for name in ("ready", "booting"):
            left = min(more, other.placed - plans[it.state.partner].wanted, getattr(other, name))
            if left > 0:
                setattr(other, name, getattr(other, name) - left)
                setattr(it, name, getattr(it, name) + left)
                more -= left


_POOLS = st.lists(
    st.tuples(
        st.integers(0, 4),  # minimum
        st.integers(1, 20),  # maximum
        st.integers(0, 4),  # accelerators
        st.floats(0, 3),  # price
        st.integers(0, 2),  # least number of sleepers
        st.booleans(),  # whether the pool has two roles
    ),
    min_size=1,
    max_size=4,
)


def _fleet(rows: list[tuple[int, int, int, float, int, bool]], budget: FleetBudget) -> Fleet:
    fleet = Fleet(budget)
    for number, (least, most, accelerators, price, sleepers, has_roles) in enumerate(rows):
        bounds = ScalingSettings(
            least,
            max(least, most),
            accelerators=accelerators,
            price=price,
            sleepers_min=0 if has_roles else sleepers,
            hold_s=30.0,
        )
        for role in (PREFILL, DECODE) if has_roles else ("",):
            other = {PREFILL: DECODE, DECODE: PREFILL}.get(role, "")
            partner = key_of(str(number), other) if other else ""
            state = PoolState(bounds, PoolFacts(0, 0, 0.0), role=role, partner=partner)
            fleet.replicas[key_of(str(number), role)] = Replicas(state)
    return fleet


@settings(max_examples=25, deadline=None)
@given(_POOLS, st.integers(0, 60), st.floats(0, 60), st.randoms(use_true_random=False))
def test_no_sequence_of_rounds_breaks_the_budget(rows, accelerators, price, drawn) -> None:
    fleet = _fleet(rows, FleetBudget(accelerators, price))
    now = 1e6
    for _ in range(_ROUNDS):
        now += _LOOK_S
        before = fleet.used()
        pin = drawn.choice([None, None, None, 0, 7])
        for it in fleet.replicas.values():
            if not it.state.role:
                it.state.settings = replace(
                    it.state.settings, pin=pin, is_paused=drawn.random() < 0.1
                )
            unknown = "not heard" if drawn.random() < 0.1 else ""
            it.see(drawn.choice([0.0, 2.0, 15.0]), drawn.choice([0.0, 0.0, 300.0]), unknown)
        states = {key: it.state for key, it in fleet.replicas.items()}
        open_ = plan(states, FleetBudget(), now)
        plans = plan(states, fleet.budget, now)
        for key, it in fleet.replicas.items():
            served = min(it.ready, open_[key].wanted)
            assert it.state.role or plans[key].wanted >= served, "what serves is not stopped"
        _relabel(fleet, plans)
        for key, it in fleet.replicas.items():
            it.take(plans[key], now, has_places=drawn.random() < 0.7)
        after = fleet.used()
        assert after[0] <= max(accelerators, before[0])
        assert after[1] <= max(price, before[1]) + 1e-6
        for it in fleet.replicas.values():
            it.pass_time(*(drawn.randrange(4) for _ in range(3)))
        lying = drawn.choice(list(fleet.replicas.values()))
        lying.booting += drawn.choice([0] * 9 + [1])  # a replica that nobody has asked for


@pytest.mark.parametrize(("leaving", "granted"), [(7, 2), (4, 5), (0, 9)])
def test_a_replica_that_drains_keeps_its_part_of_the_budget(leaving: int, granted: int) -> None:
    small, big = (Replicas(PoolState(ScalingSettings(1, 20, accelerators=1), _NONE)) for _ in "ab")
    small.ready = small.wanted = 1
    small.leaving = leaving
    big.ready = big.wanted = 2
    for _ in range(40):
        small.see(0.1, 0.0, "not heard")
        big.see(30.0, 900.0, "")
    plans = plan({"small": small.state, "big": big.state}, FleetBudget(accelerators=10), 1e6)
    assert (plans["small"].wanted, plans["big"].wanted) == (1, granted)
    assert plans["big"].reasons[-1].text.startswith(f"the budget leaves {granted} of ")


def test_a_pool_waits_without_a_warning_until_another_ones_replicas_have_ended() -> None:
    leaving, growing = (
        Replicas(PoolState(ScalingSettings(0, 4, accelerators=1), _NONE)) for _ in "ab"
    )
    leaving.leaving = 4
    for _ in range(40):
        leaving.see(0.0, 0.0, "")
        growing.see(9.0, 900.0, "")
    budget = FleetBudget(accelerators=6)
    plans = plan({"leaving": leaving.state, "growing": growing.state}, budget, 1e6)
    assert plans["growing"].wanted == 2
    told = plans["growing"].reasons[-1].text
    assert told == "the budget leaves 2 of 4 until replicas that leave have ended"
    assert not plans["growing"].warnings
