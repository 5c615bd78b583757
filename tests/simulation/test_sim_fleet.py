"""A short day of a small fleet: budgets hold, strata weigh one, and a cell is played in full."""

import pytest

from sim.fleet.day import STEP_S, FleetDay, Stratum, strata_of
from sim.fleet.pools import FleetOfPools
from sim.fleet.windows import play, window_of

DAY = FleetDay(
    accelerators=300, bases=5, adapters=400, tenants=1000, peak_rps=4000.0, crowds=2, hours=1.0
)


def test_a_lost_zone_moves_its_cells_and_no_budget_is_broken() -> None:
    fleet = FleetOfPools(DAY, {"small": 40.0, "large": 20.0})
    for number in range(int(3600 / STEP_S)):
        fleet.step(number * STEP_S)
    assert fleet.cell_moves > 0
    assert max(row["paid"] for row in fleet.timeline) <= DAY.accelerators
    strata = strata_of(fleet.moments)
    assert sum(stratum.share for stratum in strata) == pytest.approx(1.0)
    assert {stratum.kind for stratum in strata} == {"small", "large"}


def test_a_busy_cell_serves_its_tenants_within_the_objectives() -> None:
    stratum = Stratum("small", 0.6, 1.0, has_bad=False)
    window = window_of(DAY, stratum, capacity_rps=40.0, replicas=2, duration_s=6.0)
    figures = play(window)
    assert figures.requests > 50
    assert figures.goodput > 0.95
    assert figures.adapter_read_share < 0.02
