"""The fairness simulation: its metrics by hand, its schedulers, and the command."""

import json
import math
from itertools import count
from pathlib import Path

import pytest

from sim import fair_cells, fairness
from sim.engines import Job
from sim.fairness import BLOCK, Load, Services, behind_lower_s, play, scenario
from sim.workload import TraceRequest

SHORT_S = 20.0  # instead of 240 s


NUMBERS = count()


def job(tenant: str, *, at: float, prompt=100, output=50, priority=0) -> Job:
    """A job that was served at once, its output evenly over ten seconds."""
    made = Job(TraceRequest(at, prompt, output, (), -1, tenant, priority), next(NUMBERS), at)
    made.admitted_at = made.dispatched_at = made.first_at = at
    made.ended_at = at + 10.0
    return made


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overloads that end early."""
    loads = (
        Load("A", 10, 256, 256, ((0.0, SHORT_S),)),
        Load("B", 20, 256, 256, ((0.0, SHORT_S),)),
    )
    tiers = (
        Load("high", 2, 256, 64, ((0.0, SHORT_S),), priority=9),
        Load("low", 20, 256, 256, ((0.0, SHORT_S),), priority=1, reserved_permille=100),
    )
    monkeypatch.setitem(fairness.SCENARIOS, "overload2", loads)
    monkeypatch.setitem(fairness.SCENARIOS, "tiers", tiers)
    monkeypatch.setattr(fairness, "HALF_WINDOW_S", 5)


def test_service_is_counted_when_it_is_delivered():
    services = Services([job("a", at=0.5)], 20.0)
    served = services._served["a"]
    assert served[0] == 0.0
    assert served[1] == pytest.approx(100 + 5)  # half a second of 10 per second
    assert served[11] == pytest.approx(200)
    assert services.demand() == {"a": 200.0}


def test_the_gap_is_the_lag_behind_other_tenants_and_at_most_the_demand():
    busy = [job("busy", at=float(second)) for second in range(100)]
    light = [job("light", at=45.5)]
    services = Services([*busy, *light], 120.0)
    gaps = services.gaps(100)
    assert len(gaps) == 40
    assert max(gaps) == 0.0, "who has all it asked for has no claim"
    late = job("light", at=45.5)
    late.admitted_at = late.first_at = 110.0
    late.ended_at = 119.0
    gaps = Services([*busy, late], 120.0).gaps(100)
    assert gaps[0] == 200.0, "all that it asked for by then is unmet"


def test_weights_are_judged_only_where_all_wait():
    jobs = [job(tenant, at=second / 2) for second in range(200) for tenant in "ab"]
    assert Services(jobs, 120.0).weight_error({"a": 1, "b": 3}, 100) == 0.0
    for made in jobs:
        made.admitted_at = made.arrived_at + 2.0
        made.first_at, made.ended_at = made.admitted_at, made.admitted_at + 1.0
    assert Services(jobs, 120.0).weight_error({"a": 1, "b": 1}, 100) == pytest.approx(0.0)
    assert Services(jobs, 120.0).weight_error({"a": 1, "b": 3}, 100) == pytest.approx(1.0)


def test_waiting_behind_a_lower_tier_begins_when_that_is_preferred():
    high, low = job("h", at=10.0, priority=9), job("l", at=5.0)
    high.dispatched_at, low.dispatched_at = 12.0, 9.0
    assert behind_lower_s([low, high]) == 0.0
    low.dispatched_at = 11.0
    assert behind_lower_s([low, high]) == pytest.approx(1.0)
    assert math.isnan(behind_lower_s([high]))


def test_a_scenario_is_the_same_every_time_and_grows_with_the_replicas():
    first = scenario("short_long", seed=3, replicas=1, arena=None)
    assert first == scenario("short_long", seed=3, replicas=1, arena=None)
    many = scenario("short_long", seed=3, replicas=8, arena=None)
    assert len(many.requests) / len(first.requests) == pytest.approx(8, rel=0.1)
    blocks = [block for request in first.requests for block in request.blocks]
    assert len(set(blocks)) == len(blocks), "nothing is shared"
    assert all(len(r.blocks) == -(-r.prompt_tokens // BLOCK) for r in first.requests)


@pytest.mark.usefixtures("short")
def test_fair_schedulers_beat_arrival_order_and_so_does_the_router():
    figures = {name: play("overload2", name) for name in ("fcfs", "vtc", "sfq", "sluice")}
    for name in ("vtc", "sluice"):
        assert figures[name].mean_gap < figures["fcfs"].mean_gap / 3
    assert figures["sfq"].mean_gap < figures["fcfs"].mean_gap
    for one in figures.values():
        assert one.tokens_per_s > 0.9 * figures["fcfs"].tokens_per_s
        assert math.isnan(one.behind_lower_s)


@pytest.mark.usefixtures("short")
def test_a_higher_tier_is_hardly_noticed_by_a_lower_one_s_flood():
    mixed = play("tiers", "sluice")
    assert mixed.behind_lower_s < play("tiers", "fcfs").behind_lower_s
    assert mixed.tokens_per_s > 0.0


@pytest.mark.usefixtures("short")
def test_the_command_writes_one_object_per_result(tmp_path: Path, capsys):
    trace = tmp_path / "arena.csv"
    rows = "".join(f"{number / 2},c{number % 3},100,50\n" for number in range(400))
    trace.write_text("t_s,client,prompt_tokens,output_tokens\n" + rows)
    out = tmp_path / "out.json"
    words = ["--scenario", "overload2,arena", "--scheduler", "vtc,lcf", "--seeds", "0,1"]
    fairness.main([*words, "--trace", str(trace), "--json", str(out)])
    records = json.loads(out.read_text())
    assert [(r["scenario"], r["scheduler"]) for r in records] == [
        *(("overload2", "vtc"), ("overload2", "lcf"), ("arena", "vtc"), ("arena", "lcf"))
    ]
    assert all(len(record["by_seed"]) == 2 for record in records)
    assert records[0]["weight_error"] is None
    assert "overload2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["--scenario", "arena"], ["--scenario", "nothing"], ["--scheduler", "lottery"]],
)
def test_the_command_refuses_impossible_cases(words, capsys):
    with pytest.raises(SystemExit):
        fairness.main(words)
    assert "error" in capsys.readouterr().err


def test_a_tenant_with_two_cells_gets_its_share_of_simulated_engines(tmp_path: Path, capsys):
    out = tmp_path / "cells.json"
    words = ["--cells", "2", "--age-s", "0.3", "--duration-s", "60", "--json", str(out)]
    fair_cells.main(words)
    (shared,) = json.loads(out.read_text())
    assert shared["shares"][0] == pytest.approx(1.0, abs=0.2), "1.5 if each cell counts by itself"
    assert "| age 0.3 s |" in capsys.readouterr().out
