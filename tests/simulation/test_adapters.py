"""Requests seldom wait for their adapter: see docs/adapters.md."""

from dataclasses import replace

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


def test_at_most_two_percent_of_requests_wait_for_a_read() -> None:
    # A seed has some 500 requests, and two of them are 0.4 %.
    seeds = [figures_of(replace(CASE, seed=seed)) for seed in range(3)]
    requests = sum(it.requests for it in seeds)
    assert sum(it.requests * it.read_share for it in seeds) <= 0.02 * requests


def test_the_plan_halves_the_reads_after_a_start() -> None:
    planned, unplanned = (figures_of(replace(CASE, is_planned=it)) for it in (True, False))
    assert planned.read_share < 0.5 * unplanned.read_share
