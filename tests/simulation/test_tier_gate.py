"""Gateways that refuse before any work, in a world with the real router: hardly an answer is lost."""

from collections import Counter

import pytest

from gateway.dispatch.cell_choice import CellView
from gateway.dispatch.tier_gate import EarlyGate, GateAsk, told_gates
from router.core.types.batch import GatewayBatch
from sim.router_world import CELL, RouterWorld, Workload, WorldClient
from sluice.wire.router.v1 import router_pb2 as wire

TOP, LOW, BATCH = 10, 5, 0
GATEWAYS = 4
_LINK_S = 0.001
_ADMISSION_MS = 1500  # as of the tiers of a new installation
_MOST_LOST = 0.01  # of what gates refuse


class GatedWorld(RouterWorld):
    """A world whose gateways hear of tiers without room.

    Attributes:
        is_gated: Whether gateways act by it.
        turned_away: Clients that gateways refuse, with the time that they are told.
        saturated_at: Time at which a tenant's tier is saturated first, by priority and tenant.
        heard_at: Time at which gateways hear of its gate first.
    """

    def __init__(self, seed: int, *, is_gated: bool = True) -> None:
        self.is_gated = is_gated
        self.turned_away: list[tuple[WorldClient, float]] = []
        self.saturated_at: dict[tuple[int, str], float] = {}
        self.heard_at: dict[tuple[int, str], float] = {}
        self._gates = [EarlyGate() for _ in range(GATEWAYS)]
        self._view = CellView(CELL)
        super().__init__(seed)

    def _submit(self, client: WorldClient) -> None:
        submit = client.submit
        submit.admission_ms = _ADMISSION_MS
        if self.is_gated and submit.tier_priority != TOP:
            gate = self._gates[client.submit.output_tokens_max % GATEWAYS]
            ask = GateAsk(submit.tier_priority, submit.tenant_id)
            refusal = gate.refusal([self._view], ask, self.now)
            if refusal is not None:
                self.turned_away.append((client, refusal.retry_after_s))
                client.final = wire.Outcome(kind=wire.OUTCOME_KIND_REJECTED, code="overloaded")
                self.core.turned_away(CELL, submit.tier_priority, 1, self.now)
                return
        super()._submit(client)
        for gates in self.core._cell_news._gates.values():
            for key, share in gates._shares.items():
                if share.is_saturated(self.now):
                    self.saturated_at.setdefault(key, self.now)

    def _receive(self, batch: GatewayBatch) -> None:
        super()._receive(batch)
        for state in batch.cells:
            self.at(self.now + _LINK_S, lambda told=state: self._hear(told))

    def _hear(self, state: wire.CellState) -> None:
        gates = told_gates(state)
        self._view = CellView(
            CELL, replicas_ready=state.replicas_ready, gates=gates, told_at_s=self.now
        )
        for key in gates:
            self.heard_at.setdefault(key, self.now)

    def served(self) -> Counter[int]:
        """Answers by tier."""
        return Counter(
            client.submit.tier_priority
            for client in self.clients
            if client.final is not None and not client.final.code
        )


def crowd(seed: int, *, is_gated: bool, requests: int = 1500) -> GatedWorld:
    """Play a crowd of four times more than can be served."""
    world = GatedWorld(seed, is_gated=is_gated)
    world.load(Workload(requests=requests, rate_per_s=300, cancel_share=0.0, batch_share=0.5))
    world.run()
    world.verify()
    return world


@pytest.fixture(scope="module")
def gated() -> list[GatedWorld]:
    """Return crowds whose gateways act by gates."""
    return [crowd(seed, is_gated=True) for seed in range(2)]


def test_hardly_a_request_is_refused_that_would_have_been_served(gated: list[GatedWorld]) -> None:
    """Two worlds of the same requests: with gates as many are served, to a hundredth of refusals."""
    plain, served, turned_away, refusals = Counter[int](), Counter[int](), 0, 0
    for seed, world in enumerate(gated):
        plain += crowd(seed, is_gated=False).served()
        served += world.served()
        turned_away += len(world.turned_away)
        refusals += sum(it.final is not None and bool(it.final.code) for it in world.clients)
        assert not any(it.submit.tier_priority == TOP for it, _ in world.turned_away)
    assert turned_away > 0.5 * refusals, "most refusals cost no tokens"
    assert plain.total() - served.total() <= _MOST_LOST * turned_away
    assert served[TOP] == plain[TOP]


def test_gateways_hear_within_100_ms_of_saturation(gated: list[GatedWorld]) -> None:
    late = [
        heard_at - world.saturated_at[key]
        for world in gated
        for key, heard_at in world.heard_at.items()
    ]
    assert len(late) >= 6, "each tenant of each lower tier has a gate"
    assert 0.0 <= min(late) <= max(late) <= 0.1


def test_told_times_are_bounded(gated: list[GatedWorld]) -> None:
    told = [retry_s for world in gated for _, retry_s in world.turned_away]
    assert 0.1 <= min(told) <= max(told) <= 30.0


def test_all_is_let_through_when_the_crowd_is_gone() -> None:
    world = crowd(0, is_gated=True, requests=800)
    before = len(world.turned_away)
    assert before
    world.load(Workload(requests=60, rate_per_s=10, cancel_share=0.0), begin_s=world.now + 1.0)
    world.run()
    world.verify()
    assert len(world.turned_away) == before
