"""What a gateway says of a request that its router placed again: where it was, why, and when."""

from typing import Any

import pytest

from gateway.dispatch import attempts
from gateway.dispatch.generation import WholeGeneration
from router.core.types.batch import GatewayBatch
from router.wire import submit_message
from sluice.tracecontext import attempt_traceparent
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire
from tests.unit.gateway.test_streamed import SPEC
from tests.unit.router.conftest import GATEWAY, Bench

STOP = engine.FINISH_REASON_STOP
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LOST = "replica replica-0 was lost"


class Asked:
    """A core, and a gateway with one request."""

    def __init__(self, bench: Any, **more: Any) -> None:
        self.world: Bench = bench(replicas=1, **more)
        self.generation = WholeGeneration(SPEC._replace(traceparent=PARENT))
        self.epoch = 1
        self.began_at = self.world.now
        self.traceparents: list[str] = []
        self.submit()

    def submit(self, **fields: Any) -> None:
        self.generation.begin_attempt()
        self.generation.begin_submission("cell", "router-1", self.world.now)
        payload = self.generation.submit_message(1, "cell", 0)
        self.handle = self.world.submit(payload=payload, **fields)
        self.note_dispatch()

    def note_dispatch(self) -> None:
        [sequence] = submit_message(1, [self.world.dispatch(self.handle)]).sequences
        self.traceparents.append(sequence.traceparent)

    def admit(self) -> None:
        self.world.frame("replica-0", self.epoch, admitted=[self.world.dispatch(self.handle)])

    def lose(self, after_s: float) -> None:
        self.world.tick(after_s)
        self.world.core.on_replica_lost("replica-0", self.epoch, self.world.now)
        self.world.tick()

    def come_back(self, after_s: float) -> None:
        self.world.tick(after_s)
        self.epoch += 1
        self.world.attach("replica-0", self.epoch)
        self.world.tick()
        self.note_dispatch()

    def finish(self) -> None:
        dispatch = self.world.dispatch(self.handle)
        self.world.frame("replica-0", self.epoch, tokens={dispatch: [7]}, finished={dispatch: STOP})

    def hear(self) -> None:
        """Let the gateway take what it was told, as its link does."""
        batch = self.world.heard.pop(GATEWAY, GatewayBatch())
        for placed in batch.placed:
            self.generation.place(placed)
        if batch.tokens:
            self.generation.push(batch.tokens, self.world.now)
        for outcome in batch.outcomes:
            self.generation.learn_outcome(outcome)
            self.generation.end_submission(self.world.now)

    def told(self) -> list[tuple[str, str, str]]:
        self.hear()
        found = attempts.rows([self.generation.attempts], self.began_at, self.world.now)
        self.times = [(it.submitted_us, it.queue_us, it.ended_us) for it in found]
        numbers = [it.number for it in found]
        assert self.traceparents == [
            attempt_traceparent(PARENT, 0, number) for number in numbers[: len(self.traceparents)]
        ]
        return [(it.replica_id, it.outcome, it.reason) for it in found]


@pytest.mark.parametrize("is_admitted", [True, False])
def test_an_engine_that_dies_before_the_first_token_is_an_attempt(bench, is_admitted) -> None:
    asked = Asked(bench)
    if is_admitted:
        asked.admit()
        asked.hear()
    asked.lose(2.0)
    asked.come_back(3.0)
    asked.admit()
    asked.world.tick(1.0)
    asked.finish()
    assert asked.told() == [("replica-0", "replica_lost", LOST), ("replica-0", "stop", "")]
    assert asked.times == [(0, 0, 2_000_000), (2_000_000, 3_000_000, 6_000_000)]
    assert asked.generation.placed is not None
    assert asked.generation.resumes == 0


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_request_that_is_never_placed_again_names_the_engine_that_it_lost(
    bench, is_admitted
) -> None:
    asked = Asked(bench, deadline_default_s=30.0)
    if is_admitted:
        asked.admit()
    asked.lose(2.0)
    asked.world.tick(28.0)
    [lost, waited] = asked.told()
    assert lost == ("replica-0", "replica_lost", LOST)
    assert waited[:2] == ("", "no_capacity")
    assert asked.times == [(0, 0, 2_000_000), (2_000_000, 0, 30_000_000)]
    assert (asked.generation.placed is not None) == is_admitted  # else nothing is billed


def test_attempts_go_on_counting_over_losses_with_and_without_tokens(bench) -> None:
    asked = Asked(bench)
    asked.lose(1.0)
    asked.come_back(1.0)
    dispatch = asked.world.dispatch(asked.handle)
    asked.world.frame("replica-0", asked.epoch, tokens={dispatch: [7]})
    asked.lose(1.0)
    asked.hear()
    asked.epoch += 1
    asked.world.attach("replica-0", asked.epoch)
    asked.submit()
    asked.lose(1.0)
    asked.come_back(0.0)
    asked.finish()
    assert [outcome for _, outcome, _ in asked.told()] == [*["replica_lost"] * 3, "stop"]
    assert [it.number for it in asked.generation.attempts] == [0, 1, 2, 3]
    assert [it.output_tokens for it in asked.generation.attempts] == [0, 1, 0, 1]


def test_an_engine_that_has_no_room_is_no_attempt(bench) -> None:
    asked = Asked(bench)
    dispatch = asked.world.dispatch(asked.handle)
    asked.world.frame("replica-0", finished={dispatch: engine.FINISH_REASON_BUSY})
    asked.world.tick(1.0)
    asked.finish()
    asked.hear()
    assert len(asked.generation.attempts) == 1
    assert asked.generation.attempts[0].number == 0


def test_batch_work_that_gives_way_says_so_however_long_it_ran(bench) -> None:
    asked = Asked(bench, sequences=1)
    asked.finish()
    asked.hear()
    asked.submit(is_preemptible=True, output=50)
    asked.admit()
    asked.world.frame("replica-0", tokens={asked.world.dispatch(asked.handle): [7]})
    asked.hear()
    asked.world.tick(5000.0)  # more than microseconds of 32 bits can say
    asked.world.core.lifecycle.preempt(asked.world.dispatch(asked.handle), asked.world.now)
    requests = asked.world.core.gateways[GATEWAY].requests
    [untold] = requests[asked.handle].untold or []
    assert (untold.code, untold.ended_us) == ("", 0xFFFFFFFF)
    asked.generation.place(wire.Placed(replica_id="r2", before=[untold]))
    [_, first, second] = asked.generation.attempts
    assert (first.outcome, first.reason) == (
        "requeued",
        "replica replica-0: interrupted for work of a higher tier",
    )
    assert second.placed is not None
