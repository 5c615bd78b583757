"""Replays of kept demand: the same demand with other bounds, in the same words."""

from dataclasses import replace

import pytest

from control_plane.scaling.demand import DemandHistory
from control_plane.scaling.model import PoolFacts, PoolState, ScalingSettings
from control_plane.scaling.replay import kept_curve, replay, trace_curve
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
    enough, few = (replay(curve, state, replace(SETTINGS, replicas_max=it)) for it in (20, 4))
    assert few.violation_minutes > 100 > enough.violation_minutes
    assert few.replicas_most == 4 < enough.replicas_most <= 20
    assert few.replica_hours < enough.replica_hours
    assert enough.accelerator_hours == pytest.approx(2 * enough.replica_hours, abs=0.02)
    assert abs(enough.price - 3 * enough.replica_hours) < 0.1


def test_the_tokens_of_a_trace_become_work_of_the_pools_replicas() -> None:
    curve = trace_curve([1000, 0], [100, 50], 15, PoolSpeed(0.001, 0.05))
    assert curve == [6.0 / 15] * 15 + [2.5 / 15] * 15
