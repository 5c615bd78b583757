"""Three times more than can be served: who is refused, when, and what they are told."""

from collections import Counter

import pytest

from cli.stack.seed import TIERS
from router.core.decide import forecast
from sim import retries
from sim.router_world import RouterWorld, Workload

TOP, LOW, BATCH = 10, 5, 0


def overloaded(seed: int, *, batch_share: float) -> RouterWorld:
    world = RouterWorld(seed)
    world.load(
        Workload(
            requests=1200,
            rate_per_s=200,
            deadline_ms=2000,
            cancel_share=0.0,
            batch_share=batch_share,
        )
    )
    world.run()
    world.verify()
    return world


def ends(world: RouterWorld, priority: int) -> Counter[str]:
    """Outcome codes of one tier; the empty one is an answer."""
    return Counter(
        client.final.code
        for client in world.clients
        if client.final is not None and client.submit.tier_priority == priority
    )


@pytest.mark.parametrize("seed", range(2))
def test_most_unservable_requests_are_refused_at_once(seed: int):
    world = overloaded(seed, batch_share=0.0)
    top, low = ends(world, TOP), ends(world, LOW)
    assert set(top) | set(low) == {"", "overloaded", "deadline_exceeded"}
    assert low["overloaded"] > 4 * low["deadline_exceeded"]
    assert top[""] > 10 * low[""]  # the lower tier has its smallest share, and not more
    assert top["overloaded"] < low["overloaded"]
    told = [c.final.retry_after_ms / 1000 for c in world.clients if c.final and c.final.code]
    assert min(told) >= forecast.RETRY_AFTER_MIN_S
    assert max(told) <= forecast.RETRY_AFTER_MAX_S


def test_at_the_deadline_of_people_a_first_token_is_in_time_or_refused():
    """The deadline of the tiers `standard` and `free`, as a new installation has them."""
    deadline_s = TIERS["standard"]["ttft_deadline_ms"] / 1000
    assert deadline_s == 1.5
    world = RouterWorld(0)
    load = {"cancel_share": 0.0, "batch_share": 0.0, "deadline_ms": round(deadline_s * 1000)}
    world.load(Workload(requests=300, rate_per_s=120, **load))
    world.run()
    world.verify()
    codes = Counter(client.final.code for client in world.clients if client.final)
    assert codes.keys() == {"", "overloaded", "deadline_exceeded"}
    waits = [it.first_at - it.arrived_at for it in world.clients if it.first_at is not None]
    assert len(waits) == codes[""] > 100, "no answer begins and is refused then"
    assert 0.5 * deadline_s < max(waits) <= deadline_s


def test_batch_work_goes_first_and_the_top_tier_last():
    world = overloaded(3, batch_share=0.3)
    served = {
        priority: codes[""] / codes.total()
        for priority in (TOP, LOW, BATCH)
        for codes in [ends(world, priority)]
    }
    assert served[TOP] > 5 * served[LOW]
    assert served[TOP] > 5 * served[BATCH]


def test_more_clients_are_served_within_two_retries_if_retry_times_are_spread():
    case = retries.OverloadCase("short", requests=300, rate_per_s=200)
    spread, equal = (retries.play(case, 0, is_spread=it) for it in (True, False))
    assert spread.refusals < equal.refusals
    assert spread.served_share > equal.served_share
