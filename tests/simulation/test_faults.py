"""What clients feel of a replica's faults, with the router's real shell and core."""

import json
from functools import cache
from pathlib import Path

import pytest

from sim import faults
from sim.fault_world import FAULTS, SILENCE_S, FaultReport, FaultScenario, simulate


@cache
def report(fault: str) -> FaultReport:
    """What clients feel of it; each run takes seconds, so all tests look at one of each fault."""
    return run(fault)


def run(fault: str) -> FaultReport:
    return simulate(
        FaultScenario(fault, 1, replicas=4, rate_per_s=20.0, fault_at_s=4.0, fault_s=4.0, run_s=9.0)
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_costs_a_request_or_doubles_a_token(fault: str):
    figures = report(fault)
    assert figures.requests > 100
    assert (figures.lost, figures.duplicated, figures.wrong_later) == (0, 0, 0)
    assert not figures.wrong_tokens or fault == "lie"
    assert figures.back_s is None or figures.back_s < 30.0


def test_a_frozen_replica_is_a_pause_of_little_more_than_the_silence():
    figures = report("freeze")
    assert figures.resumed > 0
    assert SILENCE_S <= figures.pause_s <= 1.3 * SILENCE_S


def test_a_killed_replica_is_a_pause_of_milliseconds():
    figures = report("kill")
    assert figures.resumed > 0
    assert figures.detect_s <= 0.01
    assert figures.pause_s <= 0.2


def test_a_broken_stream_is_no_loss_at_all():
    figures = report("cut")
    assert figures.resumed == 0
    assert figures.pause_s <= 0.1


def test_a_liar_is_ejected_and_its_work_is_given_to_others():
    figures = report("lie")
    assert figures.ejected == ("lying",)
    assert figures.wrong_tokens > 0
    assert figures.resumed > 0
    assert figures.back_s is not None


def test_a_slow_replica_is_ejected_and_finishes_its_requests():
    figures = report("slow")
    assert figures.ejected == ("slow",)
    assert figures.resumed == 0
    assert figures.back_s is not None


def test_a_busy_replica_is_not_ill():
    figures = report("busy")
    assert figures.ejected == ()
    assert figures.detect_s is None


def test_a_scenario_is_the_same_every_time():
    assert run("cut") == report("cut")


def test_the_command_writes_its_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "out.json"
    assert (
        faults.main(["--replicas=2", "--plan=cut", "--seeds=5", "--rate=2", f"--json={file}"]) == 0
    )
    figures = json.loads(file.read_text())["plans"]["cut"]
    assert figures["lost"] == figures["duplicated"] == 0
    assert figures["requests"] == figures["by_seed"][0]["requests"] > 0
    assert "cut" in capsys.readouterr().out


def test_an_unknown_plan_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        faults.main(["--plan=burn"])
    assert "unknown: burn" in capsys.readouterr().err
