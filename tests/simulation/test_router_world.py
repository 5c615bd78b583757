"""The real router core in a discrete-event world: promises to clients hold under every fault."""

import hashlib
import os
import subprocess
import sys

import pytest

from router.core.types.config import CoreConfig
from router.core.types.plan import EngineLimits
from sim.router_world import Fault, RouterWorld, Workload
from sluice.wire.router.v1 import router_pb2 as wire


def finished(world: RouterWorld) -> int:
    kinds = (wire.OUTCOME_KIND_STOP, wire.OUTCOME_KIND_LENGTH)
    return sum(client.final is not None and client.final.kind in kinds for client in world.clients)


def run(world: RouterWorld, workload: Workload, *faults: Fault) -> RouterWorld:
    world.load(workload)
    for fault in faults:
        world.plan(fault)
    world.run()
    world.verify()
    return world


@pytest.mark.parametrize("seed", range(2))
def test_without_faults_every_request_that_stays_finishes(seed: int):
    world = run(RouterWorld(seed), Workload(cancel_share=0.0))
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
    run(world, Workload(requests=300, rate_per_s=80, cancel_share=0.15), *faults)


@pytest.mark.parametrize("seed", range(2))
def test_streams_that_are_cut_again_and_again_cost_no_retry(seed: int):
    """Not even when something was on its way: it is sent elsewhere, and nobody pays for it."""
    world = RouterWorld(seed, replicas=3)
    faults = [Fault(0.2 + 0.031 * number, "cut", number % 3, 0.001) for number in range(60)]
    run(world, Workload(cancel_share=0.1), *faults)
    assert all(client.resumes == 0 for client in world.clients)
    finals = [client.final for client in world.clients]
    assert all(final and final.kind != wire.OUTCOME_KIND_FAILED for final in finals)


def test_batch_work_is_interrupted_for_others_and_ends_whole():
    limits = EngineLimits(4096, 6, 128, 256, 16)
    world = RouterWorld(3, replicas=1, limits=limits)
    run(world, Workload(requests=150, rate_per_s=12, output_tokens=80, batch_share=0.6))
    preempted = world.preemptions
    assert preempted > 0
    batch = [client for client in world.clients if client.submit.is_preemptible]
    assert all(client.resumes == 0 for client in batch), "a pause, not an error"


def test_overload_is_bounded_and_told_at_once():
    config = CoreConfig(queue_requests_max=40)
    limits = EngineLimits(4096, 8, 128, 256, 16)
    world = RouterWorld(5, replicas=1, limits=limits, config=config)
    run(world, Workload(requests=400, rate_per_s=200, deadline_ms=3000))
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
