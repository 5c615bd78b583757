"""What the fair queue promises: shares, weights, bounds, charges, and what its operations cost."""

# pyright: reportPrivateUsage=false

import random
import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.queue.fair_queue import FairQueue
from router.core.types.request import Dispatch, Request
from tests.queue_server import STEP_S, Server, make


def shares(service: dict[tuple[int, str], float], index: int) -> dict[object, float]:
    total = sum(service.values())
    out: dict[object, float] = {}
    for key, amount in service.items():
        out[key[index]] = out.get(key[index], 0.0) + amount / total
    return out


# --- tenants --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_backlogged_tenants_get_their_weights_in_every_minute(seed: Any):
    weights = {"a": 1, "b": 2, "c": 5}
    server = Server(24, seed=seed)
    sizes = {"a": 30, "b": 200, "c": 600}
    for minute in range(4):
        server.service.clear()
        for _ in range(round(60 / STEP_S)):
            for tenant, weight in weights.items():
                while server.queue.tenant_load(0, tenant)[0] < 5:
                    size = 1 + int(server.random.random() * 2 * sizes[tenant])
                    server.push(tenant, size, weight=weight)
            server.step()
        if minute:  # the first one has the ramp
            for tenant, share in shares(server.service, 1).items():
                assert share == pytest.approx(weights[str(tenant)] / 8, rel=0.05)


def test_being_away_earns_nothing():
    server = Server(8)
    for _ in range(3000):
        while server.queue.requests < 8:
            server.push("steady", 100)
        server.step()
    server.service.clear()
    for _ in range(3000):  # the other one comes back with a flood
        for tenant in ("steady", "back"):
            while server.queue.tenant_load(0, tenant)[0] < 8:
                server.push(tenant, 100)
        server.step()
    assert shares(server.service, 1)["steady"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("runs", [True, False])
def test_a_tenant_with_running_work_keeps_a_small_allowance_at_its_return(runs: Any):
    queue = FairQueue()
    first = make(1, "brief", 10)
    queue.push(first, 0.0)
    dispatch = begin(queue, first)
    dispatch.is_placed = True
    if not runs:
        queue.settle(dispatch)
    for order in range(2, 200):
        queue.push(make(order, "flood", 100), 0.0)
    for _ in range(100):
        head = queue.peek(0.0)
        assert head is not None
        queue.take(head, 0.0)
    flood = queue.peek(0.0)
    assert flood is not None
    flood_counter = queue._tiers[0]._tenants["flood"].counter
    queue.push(make(300, "brief", 10), 0.0)
    allowance = queue._tiers[0].return_allowance if runs else 0.0
    assert 0.0 < queue._tiers[0].return_allowance < flood_counter - 10.0
    assert dispatch.account.counter == pytest.approx(flood_counter - allowance)


def test_a_light_tenant_goes_next_beside_a_flood():
    queue = FairQueue()
    for order in range(1, 501):
        queue.push(make(order, "flood", 50, overdue_at=1.0), 0.0)
    for now in range(10, 30):
        request = queue.peek(now)
        assert request is not None
        queue.take(request, now)
    light = make(1000, "light", 5000)
    queue.push(light, 30.0)
    ahead = 0
    while queue.peek(30.0) is not light:
        request = queue.peek(30.0)
        assert request is not None
        queue.take(request, 30.0)
        ahead += 1
    assert ahead <= 1, "a lift brings it level with the least served, not behind the queue"


def test_no_request_overtakes_an_overdue_one_of_its_tenant():
    queue = FairQueue()
    long = make(1, prompt=9000, overdue_at=10.0)
    older = make(2, prompt=8000, overdue_at=9.0)
    queue.push(long, 0.0)
    queue.push(older, 0.0)
    for order in range(3, 20):
        queue.push(make(order, prompt=10, overdue_at=50.0), 0.0)
    short = queue.peek(8.0)
    assert short is not None
    assert short.prompt_tokens == 10
    assert queue.peek(9.5) is older
    queue.take(older, 11.0)
    assert queue.peek(11.0) is long


# --- tiers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("permille", [100, 200, 400])
@pytest.mark.parametrize(("low", "high"), [(400, 100), (50, 300)])
def test_a_lower_tier_gets_its_reserved_share_under_saturation(permille: Any, low: Any, high: Any):
    server = Server(32)
    for step in range(12_000):
        if step == 3000:
            server.service.clear()
        while server.queue.tenant_load(9, "a")[0] < 4:
            server.push("a", high, priority=9)
        while server.queue.tenant_load(1, "b")[0] < 4:
            server.push("b", low, priority=1, reserved_permille=permille)
        server.step()
    assert shares(server.service, 0)[1] == pytest.approx(permille / 1000, rel=0.05)


def test_the_rest_of_a_reserved_share_goes_to_any_waiting_tier():
    server = Server(8)
    for _ in range(2000):
        while server.queue.tenant_load(1, "b")[0] < 4:
            server.push("b", 100, priority=1, reserved_permille=100)
        server.step()
    assert shares(server.service, 0) == {1: pytest.approx(1.0)}
    assert len(server.running) == server.room, "an empty higher tier holds nobody up"


def test_after_a_time_alone_a_lower_tier_is_soon_given_its_share_again():
    server = Server(32)
    for step in range(12_000):
        if step == 6000:
            server.service.clear()
        while step > 4000 and server.queue.tenant_load(9, "a")[0] < 4:
            server.push("a", 100, priority=9)
        while server.queue.tenant_load(1, "b")[0] < 4:
            server.push("b", 100, priority=1, reserved_permille=200)
        server.step()
    assert shares(server.service, 0)[1] == pytest.approx(0.2, rel=0.05)


def test_a_tier_without_a_reserve_is_not_starved():
    server = Server(16)
    lowest = [server.push("b", 100, priority=0) for _ in range(20)]
    served_at: list[float] = []
    for _ in range(20_000):
        while server.queue.tenant_load(9, "a")[0] < server.room:
            server.push("a", 100, priority=9)
        seen = len(server.taken)
        server.step()
        total = sum(server.service.values())
        served_at += [total for r in server.taken[seen:] if r.priority == 0]
    assert len(served_at) >= 15
    # One per cost / 1 % of service: 100 tokens and about 50 of output, guessed at 128 at first.
    gaps = [later - earlier for earlier, later in zip([0.0, *served_at], served_at, strict=False)]
    assert max(gaps) <= (100 + 2 * 128) / 0.01 * 1.5
    assert lowest[0] in server.taken


def test_a_higher_tier_goes_first_otherwise():
    queue = FairQueue()
    queue.push(make(1, "b", 10, priority=1, reserved_permille=200), 0.0)
    queue.push(make(2, "a", 5000, priority=2), 0.0)
    head = queue.peek(0.0)
    assert head is not None
    assert head.priority == 2


# --- charges --------------------------------------------------------------------------------


def begin(queue: FairQueue, request: Request) -> Dispatch:
    tenant = queue.take(request, 0.0)
    dispatch = Dispatch(request, tenant, "replica", sequence=request.order, now=0.0)
    request.dispatch = dispatch
    return dispatch


def test_a_retried_request_is_charged_once():
    queue = FairQueue()
    request = make(1, prompt=300)
    queue.push(request, 0.0)
    for _ in range(3):
        dispatch = begin(queue, request)
        assert dispatch.account.counter == 300
        request.attempts += 1
        queue.push_front(request, 0.0)
    dispatch = begin(queue, request)
    dispatch.is_placed = True
    queue.settle(dispatch)
    account: Any = dispatch.account
    assert account.counter == 300
    assert account.running == 0


def test_a_request_that_never_ran_is_not_charged():
    queue = FairQueue()
    ran, cancelled, lost = make(1, prompt=100), make(2, prompt=200), make(3, prompt=400)
    for request in (ran, cancelled, lost):
        queue.push(request, 0.0)
    dispatches = [begin(queue, request) for request in (ran, cancelled, lost)]
    tenant = dispatches[0].account
    assert tenant.counter == 700
    dispatches[0].is_placed = True
    dispatches[0].cached_tokens = 60  # the engine found more than was predicted
    queue.settle(dispatches[0])
    assert tenant.counter == 640
    queue.settle(dispatches[1])  # cancelled before the engine began
    assert tenant.counter == 440
    queue.push_front(lost, 0.0)
    queue.remove(lost)  # cancelled while it waits to be tried again
    assert tenant.counter == 40
    assert tenant.totals.served == 40


def test_cached_tokens_are_free():
    queue = FairQueue()
    request = make(1, prompt=1000)
    queue.push(request, 0.0)
    queue.reprice(request, 10)
    assert begin(queue, request).account.counter == 10


def test_a_preempted_request_pays_no_second_prompt():
    queue = FairQueue()
    request = make(1, prompt=100, is_preemptible=True)
    queue.push(request, 0.0)
    dispatch = begin(queue, request)
    assert request.output is not None
    request.output += [1] * 40
    dispatch.emitted = 40
    dispatch.account.counter += 40 * dispatch.charge
    request.preemptions += 1
    queue.push_front(request, 0.0)
    dispatch = begin(queue, request)
    assert dispatch.account.counter == 180
    queue.push_front(request, 0.0)
    queue.remove(request)
    assert dispatch.account.counter == 180, "its client has had the output"


def test_idle_tenants_are_forgotten_and_running_ones_are_not():
    queue = FairQueue()
    dispatches: list[Dispatch] = []
    for order in range(1, 5001):
        request = make(order, f"t{order}")
        queue.push(request, 0.0)
        dispatch = begin(queue, request)
        if order % 100:
            dispatch.is_placed = True
            queue.settle(dispatch)
        else:
            dispatches.append(dispatch)
    known = queue._tiers[0]._tenants
    assert len(known) <= 2500
    accounts: list[Any] = [dispatch.account for dispatch in dispatches]
    assert all(known[account.tenant_id] is account for account in accounts)


# --- estimates ------------------------------------------------------------------------------

FACTOR = 2.0  # of the true number ahead, and so many requests more for what is rounded
SLACK = 6


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    tenants=st.integers(1, 12),
    tiers=st.sampled_from([(0,), (0, 5)]),
    waiting=st.integers(0, 150),
)
def test_ahead_is_near_the_true_order(seed: Any, tenants: Any, tiers: Any, waiting: Any):
    rng = random.Random(seed)
    queue = FairQueue()
    for order in range(1, waiting + 1):
        name = f"t{rng.randrange(tenants)}"
        size = 1 + int(rng.lognormvariate(5, 1))
        queue.push(
            make(order, name, size, priority=rng.choice(tiers), overdue_at=rng.choice([1.0, 9e9])),
            0.0,
        )
    for _ in range(rng.randrange(20)):  # a history
        head = queue.peek(0.0)
        if head is not None:
            tenant = queue.take(head, 0.0)
            tenant.counter += 2 * rng.randrange(400)
    new = make(9999, f"t{rng.randrange(tenants)}", 1 + int(rng.lognormvariate(5, 1)))
    new.priority = rng.choice(tiers)
    requests, tokens = queue.ahead(
        new.priority, new.tenant_id, new.weight, new.uncached_tokens, 5.0
    )
    queue.push(new, 5.0)
    before: list[Request] = []
    while (head := queue.peek(5.0)) is not new:
        assert head is not None
        before.append(head)
        queue.take(head, 5.0).counter += 2 * 128  # the output that the estimate expects
    assert len(before) <= FACTOR * requests + SLACK
    assert requests <= FACTOR * len(before) + SLACK
    longest = max((r.uncached_tokens for r in before), default=0)
    assert sum(r.uncached_tokens for r in before) <= FACTOR * tokens + SLACK * max(longest, 500)


def test_the_tenant_that_would_be_served_last_loses_its_youngest_request():
    queue = FairQueue()
    for order in range(1, 31):
        queue.push(make(order, "greedy", 100, is_preemptible=True), 0.0)
    for order in range(31, 34):
        queue.push(make(order, "modest", 100, is_preemptible=True), 0.0)
    queue.push(make(50, "other", 10_000, priority=5), 0.0)
    lost: list[Request] = []
    for _ in range(27):
        victim = queue.cheapest_to_lose(9, 0.0)
        assert victim is not None
        queue.remove(victim)
        lost.append(victim)
    assert [request.order for request in lost] == list(range(30, 3, -1))
    assert queue.tenant_load(0, "modest")[0] == 3
    assert queue.cheapest_to_lose(0, 0.0) is None


def test_preemptible_tiers_are_shed_before_lower_ones():
    queue = FairQueue()
    queue.push(make(1, priority=3, is_preemptible=True), 0.0)
    queue.push(make(2, priority=1), 0.0)
    first = queue.cheapest_to_lose(9, 0.0)
    assert first is not None
    assert first.order == 1
    assert queue.cheapest_to_lose(3, 0.0) is not first
    assert queue.waiting_below(3) == (1, 100)


# --- cost -----------------------------------------------------------------------------------


class Counted(int):
    """A size whose comparisons are counted, also those inside of heap functions."""

    comparisons = 0

    def __lt__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int.__lt__(self, other)  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


def operations(queue: FairQueue, sizes: Iterator[int], orders: Iterator[int], tenants: int) -> int:
    """Run a fixed mix of calls; return lines of the queue's code run plus comparisons."""
    lines = 0

    def trace(frame: Any, event: Any, _argument: Any):
        nonlocal lines
        lines += event == "line"
        return trace if "core" in frame.f_code.co_filename else None

    Counted.comparisons = 0
    sys.settrace(trace)
    try:
        for number in range(200):
            order = next(orders)
            request = make(order, f"t{number % tenants}", Counted(next(sizes)), overdue_at=1e6)
            queue.push(request, 0.0)
            head = queue.peek(0.0)
            assert head is not None
            further = queue.skip(head)
            assert further is not None
            queue.take(further, 0.0)
            queue.reprice(head, Counted(next(sizes)))
            head = queue.peek(0.0)
            assert head is not None
            queue.remove(head)
            queue.push(make(next(orders), "t1", Counted(next(sizes)), overdue_at=1e6), 0.0)
    finally:
        sys.settrace(None)
    return lines + Counted.comparisons


def test_no_operation_looks_at_all_that_waits():
    rng = random.Random(3)
    sizes = iter(lambda: 1 + int(rng.lognormvariate(6, 1)), 0)
    costs: list[int] = []
    for waiting in (250, 16_000):
        queue = FairQueue()
        tenants = waiting // 25
        orders = count(1)
        for number in range(waiting):
            request = make(next(orders), f"t{number % tenants}", Counted(next(sizes)))
            request.overdue_at = 1e6
            queue.push(request, 0.0)
        costs.append(operations(queue, sizes, orders, tenants))
    assert costs[1] <= 2 * costs[0], "64 times as many requests and tenants: O(log n)"
