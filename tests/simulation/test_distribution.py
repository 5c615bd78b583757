"""Distribution on simulated links: the real planner, at the size that a test affords."""

from dataclasses import replace
from typing import Any

import pytest

from sim import distribution
from sim.distribution import SCENARIOS, bound_s, simulate
from sim.distribution_links import Links, Widths


def test_a_hundred_megabytes_are_on_a_thousand_nodes_within_seconds():
    figures = simulate(SCENARIOS["adapter"], 0, at_most_s=60.0)
    assert figures["done"] == 1000
    assert figures["last_s"] <= 10.0, "60 s are allowed"
    copies = figures["copies_from"]
    assert copies["store"] <= 5.0, "two copies for each of two regions, and what was drawn twice"
    assert copies["rack"] > copies["region"]


def test_time_grows_with_the_logarithm_of_the_fleet():
    last_s = [
        simulate(replace(SCENARIOS["adapter"], nodes=nodes), 0, at_most_s=60.0)["last_s"]
        for nodes in (50, 800)
    ]
    assert last_s[1] <= 2 * last_s[0], "sixteen times the nodes"


def test_dead_and_corrupt_nodes_delay_no_other():
    scenario = replace(SCENARIOS["base-faults"], nodes=60, size_bytes=7e9)
    figures = simulate(scenario, 0, at_most_s=120.0)
    assert figures["done"] == figures["up"] == 60 - 2, "three were killed and one came back"
    assert figures["spoiled_chunks"] > 0
    assert figures["last_s"] <= 60.0


def test_a_store_that_is_away_is_waited_for():
    scenario = replace(
        SCENARIOS["base"], nodes=20, size_bytes=2e9, step_s=0.05, store_down_s=(0.0, 20.0)
    )
    figures = simulate(scenario, 0, at_most_s=120.0)
    assert figures["done"] == 20
    assert 20.0 < figures["last_s"] <= 60.0


def test_one_seed_is_one_run():
    scenario = replace(SCENARIOS["adapter-faults"], nodes=60)

    def run(seed: int) -> dict[str, Any]:
        figures = simulate(scenario, seed, at_most_s=60.0)
        return {key: value for key, value in figures.items() if not key.startswith("planner")}

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_flows_share_a_bottleneck_and_take_the_remaining_rate():
    links = Links([0, 0, 0], [0, 0, 0], Widths(node=8.0, rack=100.0, region=100.0, store=100.0))
    one, two = links.begin(0, 2, 100.0), links.begin(1, 2, 100.0)
    other = links.begin(0, 1, 100.0)
    assert links.step(1.0) == []
    assert links.left[[one, two, other]] == pytest.approx([96.0, 96.0, 96.0])
    links.end(two)
    links.end(one)
    assert links.step(12.0) == [other]


def test_the_bound_is_the_narrowest():
    assert bound_s(SCENARIOS["base"], Widths()) == pytest.approx(112.0)
    assert bound_s(SCENARIOS["base"], Widths(store=1e9)) == pytest.approx(111.1, abs=1.0)


def test_the_command_line(tmp_path, capsys):
    out = tmp_path / "out.json"
    distribution.main(["--scenario", "adapter", "--nodes", "40", "--json", str(out)])
    assert '"done": 40' in capsys.readouterr().out
    assert '"adapter"' in out.read_text()
