"""The command `python -m sim.routing`: what it writes, and how it refuses."""

import json
from pathlib import Path

import pytest

from sim import routing
from sim.runs import Run, RunSource, capacity

WORKLOAD = "requests=150,rate=4,prompt=2000,output=40,turns=3,systems=2"
KEYS = {
    *("policy", "trace", "replicas", "load", "goodput_mean", "goodput_by_seed", "ttft_s"),
    *("ttft_longest_decile_p99_s", "tpot_ms", "hit_ratio", "settings"),
}


def command(*arguments: str) -> None:
    routing.main(["--trace", WORKLOAD, "--format", "synthetic", "--replicas", "2", *arguments])


def test_one_policy_writes_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.json"
    command("--policy", "sluice", "--seeds", "0,1", "--load", "0.8", "--json", str(out))
    record = json.loads(out.read_text())
    assert record.keys() >= KEYS
    assert record["policy"] == "sluice"
    assert record["trace"] == "synthetic"
    assert (record["replicas"], record["load"]) == (2, 0.8)
    assert len(record["goodput_by_seed"]) == 2
    assert record["goodput_mean"] == pytest.approx(sum(record["goodput_by_seed"]) / 2, abs=1e-4)
    assert record["ttft_s"].keys() == {"p50", "p90", "p99"}
    settings = record["settings"]
    assert settings["seeds"] == [0, 1]
    assert (settings["report_age_s"], settings["index_delay_s"]) == (0.1, 3.0)
    printed = capsys.readouterr()
    assert "sluice" in printed.out
    assert "seed 1: goodput" in printed.err


def test_several_policies_and_loads_write_a_list_and_draw_it(tmp_path: Path):
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    command(
        *("--policy", "round_robin,oracle", "--load", "0.5,0.9", "--json", str(out)),
        *("--plot", str(picture)),
    )
    records = json.loads(out.read_text())
    assert [(record["policy"], record["load"]) for record in records] == [
        ("round_robin", 0.5),
        ("oracle", 0.5),
        ("round_robin", 0.9),
        ("oracle", 0.9),
    ]
    assert records[1]["settings"]["winner"] in ("oracle_0", "oracle_0.2")
    assert records[1]["goodput_mean"] == max(records[1]["settings"]["candidates"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_processes_change_nothing(tmp_path: Path):
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    for path, jobs in ((one, "1"), (two, "2")):
        command("--policy", "least_tokens", "--seeds", "0,1", "--jobs", jobs, "--json", str(path))
    assert one.read_text() == two.read_text()


def test_faults_and_speeds_reach_the_run(tmp_path: Path):
    out = tmp_path / "out.json"
    command(
        *("--policy", "least_tokens", "--speed-spread", "0.3", "--lose-replica-at-s", "5"),
        *("--add-replica-at-s", "6", "--json", str(out)),
    )
    settings = json.loads(out.read_text())["settings"]
    assert (settings["speed_spread"], settings["lose_at_s"], settings["add_at_s"]) == (0.3, 5, 6)


def test_load_one_is_the_joint_capacity_of_the_replicas():
    source = RunSource(WORKLOAD, "synthetic")
    alone, together = capacity(source, 1, "h70"), capacity(source, 4, "h70")
    assert 2.0 < together / alone < 4.5
    assert capacity(source, 1, "m8") > alone


def test_a_group_runs_its_best_on_all_seeds():
    base = Run(RunSource(WORKLOAD, "synthetic"), replicas=2, cost="h70", load=0.0, policy="")
    (result,) = routing.compare(base, ["oracle"], [0.9], [0, 1])
    assert result.policy == "oracle"
    assert result.run.policy == result.winner
    assert len(result.by_seed) == 2
    assert result.candidates.keys() == {"oracle_0", "oracle_0.2"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--policy", "nobody"), "unknown policy 'nobody'"),
        (("--policy", "round_robin,dynq_x"), "unknown policy 'dynq_x'"),
        (("--trace", "speed=3"), "unknown setting 'speed'"),
        (("--load", "fast"), "'fast' is no list of numbers"),
        (("--load", "0.9,0"), "too small"),
        (("--replicas", "0"), "0 is not above 0"),
        (("--speed-spread", "1"), "1 is not in [0, 1)"),
        (("--replicas", "1", "--lose-replica-at-s", "5"), "the only replica cannot be lost"),
        (("--cells", "3"), "3 cells need at least as many replicas"),
        (("--format", "mooncake", "--trace", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_senseless_arguments_are_refused(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as raised:
        command(*arguments)
    assert raised.value.code == 2
    assert problem in capsys.readouterr().err
