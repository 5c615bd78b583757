"""Replicas fail under virtual time: the effects on clients of the router's real core and shell.

`RouterWorld` has the core alone, and storms of faults. `fault_world` has the shell as well, and one
fault at a time, with the pauses that clients feel.
"""

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits
from sim import faults
from sim.fault_world import FAULTS, SILENCE_S, FaultReport, FaultScenario, simulate
from sim.router_world import Fault, RouterWorld, Workload
from sluice.wire.router.v1 import router_pb2 as wire


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
    assert figures.detect_s <= 1.2 * SILENCE_S
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


def finished(world: RouterWorld) -> int:
    kinds = (wire.OUTCOME_KIND_STOP, wire.OUTCOME_KIND_LENGTH)
    return sum(client.final is not None and client.final.kind in kinds for client in world.clients)


@pytest.mark.parametrize("seed", range(2))
def test_without_faults_every_request_that_stays_finishes(seed: int):
    world = RouterWorld(seed).play(Workload(cancel_share=0.0))
    assert finished(world) == len(world.clients)


@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_faults_leaves_nothing_behind(seed: int):
    world = RouterWorld(seed, replicas=4)
    kinds = ("die", "freeze", "cut", "busy", "fail", "slow", "lie")
    faults = [
        Fault(
            at_s=world.random.uniform(0.2, 5.0),
            kind=world.random.choice(kinds),
            replica=world.random.randrange(4),
            for_s=world.random.uniform(0.1, 3.0),
        )
        for _ in range(12)
    ]
    world.play(Workload(requests=300, rate_per_s=80, cancel_share=0.15), *faults)


@pytest.mark.parametrize("seed", range(2))
def test_streams_that_are_cut_again_and_again_cost_no_retry(seed: int):
    """Not even when something was on its way: it is sent elsewhere, and nobody pays for it."""
    world = RouterWorld(seed, replicas=3)
    faults = [Fault(0.2 + 0.031 * number, "cut", number % 3, 0.001) for number in range(60)]
    world.play(Workload(cancel_share=0.1), *faults)
    assert all(client.resumes == 0 for client in world.clients)
    finals = [client.final for client in world.clients]
    assert all(final and final.kind != wire.OUTCOME_KIND_FAILED for final in finals)


def test_batch_work_is_interrupted_for_others_and_ends_whole():
    limits = EngineLimits(4096, 6, 128, 256, 16)
    world = RouterWorld(3, replicas=1, limits=limits)
    world.play(Workload(requests=150, rate_per_s=12, output_tokens=80, batch_share=0.6))
    preempted = world.preemptions
    assert preempted > 0
    batch = [client for client in world.clients if client.submit.is_preemptible]
    assert all(client.resumes == 0 for client in batch), "a pause, not an error"


def test_overload_is_bounded_and_told_at_once():
    config = CoreConfig(queue_requests_max=40)
    limits = EngineLimits(4096, 8, 128, 256, 16)
    world = RouterWorld(5, replicas=1, limits=limits, config=config)
    world.play(Workload(requests=400, rate_per_s=200, deadline_ms=3000))
    assert world.queue_max <= 40 + limits.sequences_max  # what comes back is never refused
    codes = {client.final.code for client in world.clients if client.final}
    assert "queue_full" in codes
    for client in world.clients:
        if client.final and client.final.code in {"queue_full", "deadline_exceeded"}:
            assert client.final.retry_after_ms > 0
            assert not client.tokens


TRACE = """
import hashlib
from sim.router_world import Fault, RouterWorld, Workload
world = RouterWorld(11, replicas=3)
world.load(Workload(requests=150))
world.plan(Fault(0.7, "die", 1))
world.plan(Fault(1.5, "freeze", 2, 3.0))
world.run()
world.verify()
print(hashlib.sha256(repr(world.trace).encode()).hexdigest())
"""


def test_a_seed_gives_one_trace_under_every_hash_seed():
    digests = set()
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", TRACE], env=environment, capture_output=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1
    assert len(next(iter(digests)).strip()) == hashlib.sha256().digest_size * 2
