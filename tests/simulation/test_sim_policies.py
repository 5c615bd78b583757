"""Peers decide as published, and the orders known from the study hold on generated traffic."""

import pytest

from replica.drivers.sim_costs import MODELS_BY_NAME
from sim.engines import Job
from sim.metrics import Metrics
from sim.policies import registry
from sim.policies.hold import HoldQueue
from sim.pool import SimPool, SimPoolPlan
from sim.runs import Run, RunSource, capacity, metrics_of
from sim.workload import TraceRequest

CONVERSATIONS = RunSource("requests=1200,prompt=4000,turns=4,systems=3,output=200", "synthetic")
SINGLE = RunSource("requests=1200,prompt=2000,burst=5", "synthetic")


def figures(source: RunSource, policy: str, load: float) -> Metrics:
    run = Run(source, replicas=4, cost="h70", load=load, policy=policy)
    return metrics_of(run, capacity(source, 4, "h70"))


def job(number: int, prompt: int, blocks: tuple[int, ...] = (), session: int = -1) -> Job:
    blocks = blocks or tuple(range(1000 * (number + 1), 1000 * (number + 1) + -(-prompt // 512)))
    return Job(TraceRequest(0.0, prompt, 10, blocks, session), number, 0.0)


def pool_of(policy: str, replicas: int = 4) -> SimPool:
    cost = MODELS_BY_NAME["h70"]
    return SimPool(registry.entry(policy).make(), cost, SimPoolPlan(replicas), block_tokens=512)


def placed(pool: SimPool, *jobs: Job) -> list[int]:
    for item in jobs:
        pool.policy.arrive(item)
    return [item.replica for item in jobs]


def test_round_robin_takes_turns_among_the_living():
    pool = pool_of("round_robin")
    assert placed(pool, *(job(n, 100) for n in range(5))) == [0, 1, 2, 3, 0]


def test_least_requests_and_least_tokens_level_out():
    pool = pool_of("least_requests")
    assert sorted(placed(pool, *(job(n, 100 * (n + 1)) for n in range(8)))) == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    pool = pool_of("least_tokens", 2)
    one, two, *rest = placed(pool, job(0, 9000), job(1, 500), job(2, 500), job(3, 500))
    assert one != two
    assert rest == [two, two]


def test_sessions_stay_unless_a_bound_is_reached():
    pool = pool_of("session_sticky")
    assert len(set(placed(pool, *(job(n, 100, session=5) for n in range(6))))) == 1
    pool = pool_of("chwbl")
    counts = placed(pool, *(job(n, 100, session=5) for n in range(16)))
    assert max(counts.count(replica) for replica in range(4)) <= 5  # 1.25 of the mean


def test_sglang_follows_a_long_match_until_loads_differ_too_much():
    blocks = tuple(range(10))
    pool = pool_of("sglang_0.3_4_1.1", 2)
    homes = placed(pool, *(job(n, 5120, blocks) for n in range(8)))
    assert homes[:5] == [homes[0]] * 5
    assert 1 - homes[0] in homes[5:]


def test_dynamo_prefers_a_cached_replica_by_the_savings_of_a_match():
    pool = pool_of("dynamo_kv", 2)
    blocks = tuple(range(20))
    for block in blocks[:15]:
        pool.on_stored(1, block)
    assert placed(pool, job(0, 10_240, blocks)) == [1]
    busy = job(1, 40_000)
    pool.policy.arrive(busy)
    assert busy.replica == 0, "the other one owes less"


def test_the_queue_of_dynamo_holds_and_lets_the_shortest_go_first():
    pool = pool_of("dynq_1_0_wspt", 1)
    first, long, short = job(0, 6000), job(1, 9000), job(2, 600)
    for item in (first, long, short):
        pool.policy.arrive(item)
    assert [item.replica for item in (first, long, short)] == [0, -1, -1]
    pool.timeline.run()
    assert first.first_at < short.first_at < long.first_at  # type: ignore[operator]


def test_a_held_job_moves_up_when_its_prompt_appears_in_a_cache():
    cached: set[int] = set()
    queue = HoldQueue(lambda item: len(set(item.blocks) - cached))
    one, two, three = job(0, 2000), job(1, 3000), job(2, 4000)
    for item in (one, two, three):
        queue.push(item)
    cached |= set(three.blocks)
    for block in three.blocks:
        queue.changed(block)
    assert queue.pop() is three
    cached.clear()
    assert queue.pop() is one
    assert len(queue) == 1
    assert queue.pop() is two
    assert not queue


@pytest.mark.parametrize("name", ["nobody", "dynq_1_2", "dynq_1_2_lifo", "sglang_1"])
def test_an_unknown_policy_is_refused_with_the_known_ones(name: str):
    with pytest.raises(registry.PolicyError, match="known: sluice, round_robin"):
        registry.entry(name)


def test_every_member_of_a_group_is_a_policy():
    for members in registry.GROUPS.values():
        assert len(set(members)) == len(members)
        for name in members:
            assert registry.entry(name).make().name == name


def test_where_prompts_are_shared_the_known_order_holds():
    goodput = {
        name: figures(CONVERSATIONS, name, 0.8)
        for name in ("round_robin", "session_sticky", "dynq_16_0_wspt", "oracle_0.2")
    }
    ordered = [
        goodput[name].goodput
        for name in ("round_robin", "session_sticky", "dynq_16_0_wspt", "oracle_0.2")
    ]
    assert ordered == sorted(ordered)
    assert goodput["session_sticky"].hit_ratio > goodput["round_robin"].hit_ratio + 0.1
    assert goodput["oracle_0.2"].hit_ratio > goodput["session_sticky"].hit_ratio


def test_where_nothing_is_shared_a_queue_that_sorts_wins_bursts():
    sorted_queue = figures(SINGLE, "dynq_16_0_wspt", 0.9)
    for name in ("random", "round_robin", "dynamo_kv", "dynq_1_16_fcfs"):
        other = figures(SINGLE, name, 0.9)
        assert sorted_queue.goodput > other.goodput + 0.1
        assert other.hit_ratio == 0.0
    # It wins by letting long prompts wait.
    least = figures(SINGLE, "least_tokens", 0.9)
    assert sorted_queue.ttft_longest_decile_p99_s > least.ttft_longest_decile_p99_s
