"""Requests seldom wait for their adapter: see docs/adapters.md."""

from dataclasses import replace

import pytest

from sim.adapters import AdapterCase, figures_of

CASE = AdapterCase(
    is_planned=True,
    adapters=300,
    zipf=1.0,
    replicas=8,
    cells=2,
    slots=16,
    memory=128,
    load=2.0,
    duration_s=90.0,
    warm_s=60.0,
    is_shifted=False,
    is_settled=False,
    seed=0,
)


@pytest.mark.parametrize("seed", [0, 1])
def test_at_most_two_percent_of_requests_wait_for_a_read(seed: int) -> None:
    assert figures_of(replace(CASE, seed=seed)).read_share <= 0.02


def test_the_plan_halves_the_reads_after_a_start() -> None:
    planned, unplanned = (figures_of(replace(CASE, is_planned=it)) for it in (True, False))
    assert planned.read_share < 0.5 * unplanned.read_share
