"""Three times more than can be served: who is refused, when, and what they are told."""

from collections import Counter

import pytest

from router.core.decide import forecast
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


def test_batch_work_goes_first_and_the_top_tier_last():
    world = overloaded(3, batch_share=0.3)
    served = {
        priority: codes[""] / codes.total()
        for priority in (TOP, LOW, BATCH)
        for codes in [ends(world, priority)]
    }
    assert served[TOP] > 5 * served[LOW]
    assert served[TOP] > 5 * served[BATCH]
