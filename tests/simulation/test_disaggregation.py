"""Split requests in the discrete-event world: replicas and transfers fail, no token is lost."""

from functools import partial

import pytest

from router.core.handovers import FEATURE
from router.core.types.actions import Actions, Transfer
from router.core.types.plan import EngineLimits, ReplicaPlan, ReplicaRole
from sim.router_world import CELL, Fault, RouterWorld, Workload
from sluice.hashing import BLOCK_TOKENS, HASH_BYTES
from sluice.wire.router.v1 import router_pb2 as wire

LIMITS = EngineLimits(4096, 16, 256, 512, BLOCK_TOKENS, features=frozenset({FEATURE}))
FINISHED = (wire.OUTCOME_KIND_STOP, wire.OUTCOME_KIND_LENGTH)


class SplitWorld(RouterWorld):
    """Two replicas for prompts, two for answers; transfers take time, fail, or are never over."""

    def __init__(self, seed: int, *, failing: float = 0.0) -> None:
        super().__init__(seed, replicas=4, limits=LIMITS)
        self.failing = failing
        self.transfers: list[Transfer] = []
        self.brought = 0
        roles = (ReplicaRole.PREFILL, ReplicaRole.PREFILL, ReplicaRole.DECODE, ReplicaRole.DECODE)
        plans = [ReplicaPlan(name, CELL, role=roles[int(name[-1])]) for name in self._nodes]
        self.core.on_cells([CELL], plans)

    def load(self, workload: Workload) -> None:
        super().load(workload)
        for client in self.clients:
            blocks = len(client.submit.prompt) // BLOCK_TOKENS
            client.submit.block_hashes = self.random.randbytes(blocks * HASH_BYTES)

    def _perform(self, actions: Actions) -> None:
        super()._perform(actions)
        for transfer in actions.transfers:
            self.transfers.append(transfer)
            blocks, after_s = transfer.blocks, 1e-4 * transfer.blocks
            if self.random.random() < self.failing:
                blocks = self.random.randrange(transfer.blocks)
                after_s = self.random.choice((0.0, transfer.deadline_s, 1e3))
            if after_s < 1e3:
                self._plan(self.now + after_s, partial(self._transferred, transfer, blocks))

    def _transferred(self, transfer: Transfer, blocks: int) -> None:
        self.brought += blocks
        self.core.on_transferred(transfer.dispatch.sequence, blocks, self.now)


LENGTHS = {"rate_per_s": 30, "prompt_tokens": 500, "output_tokens": 40}
WORKLOAD = Workload(requests=80, cancel_share=0.0, **LENGTHS)


@pytest.mark.parametrize("seed", range(2))
def test_prompts_and_answers_run_on_different_replicas(seed: int):
    world = SplitWorld(seed).play(WORKLOAD)
    assert all(client.final and client.final.kind in FINISHED for client in world.clients)
    assert len(world.transfers) > 10
    ways = {(entry.source[-1], entry.dispatch.replica_id[-1]) for entry in world.transfers}
    assert {source for source, _ in ways} <= {"0", "1"}
    assert {target for _, target in ways} <= {"2", "3"}


@pytest.mark.parametrize("seed", range(2))
def test_transfers_that_fail_cost_no_token(seed: int):
    world = SplitWorld(seed, failing=0.3).play(WORKLOAD)
    assert all(client.final and client.final.kind in FINISHED for client in world.clients)
    assert 0 < world.brought < sum(entry.blocks for entry in world.transfers)


@pytest.mark.parametrize("kind", ["die", "freeze", "cut", "busy", "fail"])
@pytest.mark.parametrize("replica", [0, 2])
def test_a_replica_that_fails_on_either_side_costs_no_token(kind: str, replica: int):
    fault = Fault(at_s=1.0, kind=kind, replica=replica, for_s=2.0)
    world = SplitWorld(5, failing=0.1).play(WORKLOAD, fault)
    assert all(client.final and client.final.kind in FINISHED for client in world.clients)


@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_faults_and_cancels_leaves_nothing_behind(seed: int):
    world = SplitWorld(seed, failing=0.3)
    faults = [
        Fault(
            at_s=world.random.uniform(0.2, 6.0),
            kind=world.random.choice(("die", "freeze", "cut", "busy", "fail")),
            replica=world.random.randrange(4),
            for_s=world.random.uniform(0.1, 2.0),
        )
        for _ in range(10)
    ]
    world.play(Workload(requests=120, cancel_share=0.2, batch_share=0.3, **LENGTHS), *faults)
