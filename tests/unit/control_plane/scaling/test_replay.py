"""Replays of kept demand: the same demand with other bounds, in the same words."""

from dataclasses import replace

import pytest

from control_plane.scaling.demand import DemandHistory
from control_plane.scaling.fluid import Terms
from control_plane.scaling.fluid_roles import RoleSights, play_roles
from control_plane.scaling.model import (
    DECODE,
    PREFILL,
    PoolFacts,
    PoolState,
    ScalingSettings,
)
from control_plane.scaling.replay import Replay, kept_curve, replay, trace_curve
from control_plane.scaling.work import PoolSpeed

SETTINGS = ScalingSettings(1, 20, accelerators=2, price=3.0, minute_worth=0.0)


def _history(*quarters: float) -> DemandHistory:
    history = DemandHistory()
    history.days.extend(quarters)
    return history


def test_the_kept_demand_comes_back_second_by_second() -> None:
    curve = kept_curve(_history(*[1.0] * 8, *[4.0] * 4), 2)
    assert len(curve) == 7200
    assert abs(sum(curve[3600:]) / 3600 - 4.0) < 0.2
    assert len(set(curve)) > 100
    assert curve == kept_curve(_history(*[9.0] * 20, *[1.0] * 4, *[4.0] * 4), 2)


def test_too_few_replicas_cost_minutes_and_enough_cost_money() -> None:
    history = _history(*[2.0] * 4, *[6.0] * 8)
    state = PoolState(SETTINGS, PoolFacts(0, 0, 0.0), history)
    curve = kept_curve(history, 3)
    enough, few = (
        replay({"": curve}, state, {"": replace(SETTINGS, replicas_max=it)}) for it in (20, 4)
    )
    assert few.violation_minutes > 100 > enough.violation_minutes
    assert few.replicas_most == 4 < enough.replicas_most <= 20
    assert few.replica_hours < enough.replica_hours
    assert enough.accelerator_hours == pytest.approx(2 * enough.replica_hours, abs=0.02)
    assert abs(enough.price - 3 * enough.replica_hours) < 0.1


def _roles(prefill: list[float], decode: list[float], settings: ScalingSettings) -> Replay:
    state = PoolState(settings, PoolFacts(0, 0, 0.0))
    curves = {PREFILL: prefill, DECODE: decode}
    return replay(curves, state, dict.fromkeys(curves, settings))


def _curve(*quarters: float) -> list[float]:
    return kept_curve(_history(*quarters), len(quarters) // 4)


def test_a_pool_with_roles_is_replayed_with_the_plan_of_both() -> None:
    prefill, decode = _curve(*[1.0] * 4, *[2.0] * 8), _curve(*[2.0] * 4, *[5.0] * 8)
    enough, few = (_roles(prefill, decode, replace(SETTINGS, replicas_max=it)) for it in (30, 5))
    assert few.violation_minutes > 90 > 30 > enough.violation_minutes
    assert few.replicas_most == 5 < 9 <= enough.replicas_most <= 30
    one = replay(
        {"": [sum(it) for it in zip(prefill, decode, strict=True)]},
        PoolState(SETTINGS, PoolFacts(0, 0, 0.0)),
        {"": SETTINGS},
    )
    assert one.replica_hours < enough.replica_hours < 1.4 * one.replica_hours


def test_sleepers_of_a_replayed_pool_with_roles_shorten_a_surge() -> None:
    prefill, decode = ([level] * 3600 + [2 * level] * 900 + [level] * 2700 for level in (2.0, 6.0))
    settings = replace(SETTINGS, replicas_max=60)
    awake = _roles(prefill, decode, settings)
    sleepy = _roles(prefill, decode, replace(settings, sleepers_min=4))
    assert sleepy.violation_minutes < awake.violation_minutes
    assert sleepy.violated_work_share < awake.violated_work_share


def test_a_single_replica_of_a_pool_with_roles_does_both() -> None:
    outcome = _roles([0.3] * 3600, [0.4] * 3600, replace(SETTINGS, replicas_max=1))
    assert (outcome.replicas_most, outcome.violation_minutes) == (1, 0)


class _Fixed:
    """A policy with constant numbers."""

    every_s, sleepers = 15, 0

    def __init__(self, **numbers: int) -> None:
        self.numbers = numbers

    def targets(self, t: int, sights: RoleSights) -> dict[str, int]:
        return self.numbers

    def woken(self, t: int, sights: RoleSights) -> dict[str, int]:
        return dict.fromkeys(sights, 0)


def test_the_replayed_work_of_a_role_waits_for_its_own_replicas() -> None:
    """Five work-seconds per second come for eight replicas, which only the right split serves."""
    curves = {PREFILL: [1.0] * 3600, DECODE: [4.0] * 3600}
    right, wrong = (
        play_roles(curves, _Fixed(prefill=number, decode=8 - number), Terms(replicas_max=8))
        for number in (2, 6)
    )
    assert right.violation_minutes == 0
    assert wrong.violation_minutes > 50
    assert right.changes + wrong.changes <= 2, "a change of role needs no boot"
    assert set(wrong.provisioned) == {8} == set(right.provisioned)


def test_the_tokens_of_a_trace_become_work_of_the_pools_replicas() -> None:
    curve = trace_curve([1000, 0], [100, 50], 15, PoolSpeed(0.001, 0.05))
    assert curve == [6.0 / 15] * 15 + [2.5 / 15] * 15
