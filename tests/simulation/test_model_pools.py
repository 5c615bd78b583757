"""Two pools behind one model, chosen by gateways whose view is 100 ms old: nobody waits for nothing.

The pools are queues with several servers; the choice is the product's.
"""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from gateway.pool_choice import PoolReason, ServingPool, choose_pool

VIEW_S = 0.1  # routers tell their wait ten times a second
GATEWAYS = 4


@dataclass
class Queue:
    """A pool: replicas that serve one request each, first come first served.

    Attributes:
        serve_s: Mean seconds of a request on a replica.
        told_ms: Wait that gateways have been told.
        load: Requests that came.
    """

    replicas: int
    serve_s: float
    told_ms: float = 0.0
    load: int = 0
    free_at: list[float] = field(default_factory=list)

    def take(self, now: float, draw: random.Random) -> float:
        """Return the seconds until a request that comes now begins."""
        self.load += 1
        if not self.free_at:
            self.free_at = [0.0] * self.replicas
        begins = max(now, heapq.heappop(self.free_at))
        heapq.heappush(self.free_at, begins + draw.expovariate(1 / self.serve_s))
        return begins - now

    def tell(self, now: float) -> None:
        """Tell the gateways how long a request waits that comes now."""
        self.told_ms = max(0.0, min(self.free_at, default=0.0) - now) * 1000


@dataclass
class Outcome:
    """Waits of requests in seconds, and the number of sessions in each pool at each turn."""

    waits_s: list[float]
    homes: dict[int, list[PoolReason]]


def play(pools, queues, rate: float, seconds: float, sessions: int = 0, seed: int = 1) -> Outcome:
    """Let requests come at a rate, each of a session if there are some."""
    draw, now, told_at = random.Random(seed), 0.0, 0.0
    found = Outcome([], {})
    while now < seconds:
        now += draw.expovariate(rate)
        while told_at <= now:
            for queue in queues:
                queue.tell(told_at)
            told_at += VIEW_S
        session = draw.randrange(1, sessions + 1) * 0x9E3779B97F4A7C15 % 2**64 if sessions else 0
        told = [queue.told_ms if queue.replicas else None for queue in queues]
        number, reason = choose_pool(pools, told, session, draw.getrandbits(32))
        found.waits_s.append(queues[number].take(now, draw))
        found.homes.setdefault(session, []).append(reason)
    return found


def _p99(waits_s: list[float]) -> float:
    return sorted(waits_s)[int(0.99 * len(waits_s))]


@pytest.mark.parametrize("load", [0.6, 0.9])
def test_two_kinds_of_hardware_wait_about_as_long_as_one_queue_before_both(load: float) -> None:
    """The second pool is half as fast per replica; the weight says nothing of that."""
    pools = [ServingPool("fast", 1, 1), ServingPool("slow", 1, 1)]
    queues = [Queue(20, 0.5), Queue(20, 1.0)]
    rate = load * (20 / 0.5 + 20 / 1.0)
    found = play(pools, queues, rate, 200)
    # One queue before replicas of the mean speed cannot be beaten by far.
    ideal = play(pools[:1], [Queue(40, 40 / (20 / 0.5 + 20 / 1.0))], rate, 200)
    assert _p99(found.waits_s) < _p99(ideal.waits_s) + 0.6
    mean = sum(found.waits_s) / len(found.waits_s)
    assert mean < sum(ideal.waits_s) / len(ideal.waits_s) + 0.1


def test_an_expensive_pool_stays_idle_until_the_cheap_one_waits() -> None:
    pools = [ServingPool("own", 1, 1), ServingPool("rented", 1, 5)]
    calm, full = [Queue(20, 0.5), Queue(20, 0.5)], [Queue(20, 0.5), Queue(20, 0.5)]
    play(pools, calm, 0.6 * 40, 150)
    assert calm[1].load == 0
    crowd = play(pools, full, 1.5 * 40, 150)
    assert 0.25 < full[1].load / len(crowd.waits_s) < 0.45, "what the cheap one cannot serve"
    assert _p99(crowd.waits_s) < 2.5, "a wait that is worth the price of the other"


def test_sessions_stay_while_their_pool_is_no_worse_and_all_go_with_it() -> None:
    pools = [ServingPool("a", 1, 1), ServingPool("b", 1, 1)]
    found = play(pools, [Queue(20, 0.5), Queue(20, 0.5)], 0.8 * 80, 100, sessions=400)
    turns = [reason for reasons in found.homes.values() for reason in reasons]
    assert turns.count(PoolReason.HOME) / len(turns) > 0.99
    gone = play(pools, [Queue(20, 0.5), Queue(0, 0.5)], 0.4 * 80, 60, sessions=400)
    assert _p99(gone.waits_s) < 5
