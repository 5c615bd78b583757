"""The engine and the pool of the routing study: nothing lost, nothing left, times as modelled."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.drivers.sim_costs import MODELS_BY_NAME, StepWork
from sim.blocks import BlockCache
from sim.engines import Job
from sim.metrics import measure, prefill_s, ttft_objective_s
from sim.percentiles import percentile
from sim.policies import registry
from sim.policies.simple import LeastRequests, RoundRobin
from sim.pool import SimPool, SimPoolPlan
from sim.synthetic import Synthetic, generate
from sim.workload import Trace, TraceRequest

H70 = MODELS_BY_NAME["h70"]
SMALL = Synthetic(requests=300, rate=4.0, prompt=3000, output=60, turns=4, systems=2)


def request(at_s: float, prompt: int, output: int, blocks: range | None = None) -> TraceRequest:
    size = -(-prompt // 512)
    chosen = range(1000 * int(at_s * 1000 + 1), 1000 * int(at_s * 1000 + 1) + size)
    return TraceRequest(at_s, prompt, output, tuple(blocks or chosen), session=-1)


def play(*requests: TraceRequest, plan: SimPoolPlan | None = None, cost: str = "h70") -> SimPool:
    pool = SimPool(RoundRobin(), MODELS_BY_NAME[cost], plan or SimPoolPlan(1), block_tokens=512)
    pool.run(Trace("t", 512, requests))
    return pool


def check_at_rest(pool: SimPool) -> None:
    """Assert that nothing was lost and nothing is left."""
    held: dict[int, int] = {}
    for replica in pool.engines:
        assert replica.cache.is_at_rest
        assert replica.is_idle
        counters = (replica.held, replica.owed_tokens, replica.context_tokens, replica.running)
        assert counters == (0, 0, 0, 0)
        assert len(tuple(replica.cache.cached)) <= replica.cache.capacity
        for block in replica.cache.cached:
            held[block] = held.get(block, 0) | 1 << replica.number
    assert held == pool.index


@pytest.mark.parametrize("name", [*registry.TABLE, "dynq_16_0_wspt", "dynq_1_4_fcfs", "aibrix_2"])
def test_no_policy_loses_or_invents_work(name: str):
    found = registry.entry(name)
    plan = SimPoolPlan(3, speed_spread=0.2, seed=2, is_shared=found.is_shared)
    pool = SimPool(found.make(), H70, plan, block_tokens=512)
    assert pool.policy.name == name
    pool.run(generate(SMALL, seed=1))
    check_at_rest(pool)
    jobs = pool.jobs
    assert all(j.ended_at >= j.first_at > j.arrived_at for j in jobs)  # type: ignore[operator]
    computed = sum(replica.prefilled_tokens for replica in pool.engines)
    assert computed == sum(job.prompt_tokens - job.hit_tokens for job in jobs)
    decoded = sum(replica.decoded_tokens for replica in pool.engines)
    assert decoded == sum(job.output_tokens - 1 for job in jobs)
    assert measure(pool).unserved == 0.0


@pytest.mark.parametrize("name", [*registry.TABLE, "dynq_16_0_wspt", "dynq_1_0_fcfs"])
def test_every_policy_survives_a_loss_and_uses_joining_replicas(name: str):
    found = registry.entry(name)
    plan = SimPoolPlan(3, lose_at_s=20.0, add_at_s=30.0, is_shared=found.is_shared)
    pool = SimPool(found.make(), H70, plan, block_tokens=512)
    pool.run(generate(SMALL, seed=1))
    assert pool.alive == [1, 2, 3]
    check_at_rest(pool)
    assert all(job.ended_at is not None for job in pool.jobs)
    assert any(job.emitted for job in pool.jobs), "somebody was interrupted in its answer"
    assert all(job.emitted + job.output_tokens == job.request.output_tokens for job in pool.jobs)
    assert pool.engines[3].prefilled_tokens > 0


def test_a_prompt_alone_takes_its_full_steps_and_every_token_a_decode_step():
    pool = play(request(0.0, 5000, 3))
    job = pool.jobs[0]
    first_s = (
        H70.step_s(StepWork(2048, 2048 * 1024.0, 0))
        + H70.step_s(StepWork(2048, 2048 * (2048 + 1024.0), 2048))
        + H70.step_s(StepWork(904, 904 * (4096 + 452.0), 4096))
    )
    assert job.first_at == pytest.approx(first_s)
    assert job.first_at == pytest.approx(prefill_s(H70, 5000))
    assert ttft_objective_s(H70, 5000) == pytest.approx(0.5 + 2 * first_s)
    # The mean context of both steps; the study does not look at each.
    decode_s = H70.step_s(StepWork(decode_tokens=1, decode_context=5001))
    assert job.ended_at == pytest.approx(first_s + 2 * decode_s)


def test_published_times_of_prompts_alone():
    # Of the study.
    for name, times_s in (("h70", (0.063, 0.440, 1.921)), ("m8", (0.032, 0.214, 1.181))):
        for tokens, expected_s in zip((1000, 8000, 32_000), times_s, strict=True):
            assert prefill_s(MODELS_BY_NAME[name], tokens) == pytest.approx(expected_s, rel=0.02)


def test_a_slow_replica_takes_longer():
    fast = play(request(0.0, 3000, 40), plan=SimPoolPlan(1))
    seed = next(
        seed
        for seed in range(50)
        if play(request(0.0, 9, 1), plan=SimPoolPlan(1, 0.3, seed)).engines[0].speed < 0.8
    )
    slow = play(request(0.0, 3000, 40), plan=SimPoolPlan(1, 0.3, seed))
    ratio = slow.jobs[0].ended_at / fast.jobs[0].ended_at  # type: ignore[operator]
    assert ratio == pytest.approx(1 / slow.engines[0].speed)


def test_a_prompt_is_found_again_only_after_its_prefill():
    blocks = range(8)
    pool = play(
        request(0.0, 4096, 2, blocks),
        request(0.01, 4096, 2, blocks),  # comes while the first one is computed
        request(5.0, 4096, 2, blocks),
        request(9.0, 4000, 2, range(40, 48)),
    )
    assert [job.hit_tokens for job in pool.jobs] == [0, 0, 3584, 0]  # the last token is computed


def test_the_oldest_tails_are_evicted_first():
    plan = SimPoolPlan(1, kv_tokens=512 * 10)
    pool = play(
        request(0.0, 2048, 1, range(4)),
        request(5.0, 2048, 1, range(10, 14)),
        request(10.0, 2048, 1, range(20, 24)),  # with 1 for the answer: 3 must go
        plan=plan,
    )
    assert set(pool.engines[0].cache.cached) == {0, *range(10, 14), *range(20, 24)}


def test_a_sequence_larger_than_the_memory_runs_alone():
    pool = play(
        request(0.0, 400, 300), request(0.1, 9000, 5), request(0.2, 400, 5), plan=SimPoolPlan(1, kv_tokens=4096)
    )  # fmt: skip
    small, large, last = pool.jobs
    assert large.admitted_at >= small.ended_at  # type: ignore[operator]
    assert last.admitted_at >= large.ended_at  # type: ignore[operator]
    check_at_rest(pool)


@given(st.integers(0, 10_000))
@settings(max_examples=30)
def test_cancelled_jobs_leave_nothing_behind(seed: int):
    draw = random.Random(seed)
    pool = SimPool(LeastRequests(), H70, SimPoolPlan(2, kv_tokens=40_000), block_tokens=512)
    trace = generate(Synthetic(requests=40, rate=8.0, prompt=2000, output=60, turns=3), seed=seed)

    def cancel(job: Job) -> None:
        if job.replica >= 0 and job.ended_at is None and not job.is_cancelled:
            pool.engines[job.replica].cancel(job)
            cancelled.append(job)

    cancelled: list[Job] = []
    for number in draw.sample(range(40), 15):
        at_s = trace.requests[number].arrived_s + draw.expovariate(0.5)
        pool.timeline.at(at_s, lambda n=number: cancel(pool.jobs[n]))
    pool.run(trace)
    check_at_rest(pool)
    for job in pool.jobs:
        if job.ended_at is None:  # else it ended in the step in which it was to be cancelled
            assert job in cancelled
            assert job.emitted < job.request.output_tokens
    assert any(job.ended_at is None for job in cancelled)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 3)), max_size=40))
def test_the_cache_never_holds_more_than_it_can(steps: list[tuple[int, int, int]]):
    stored: set[int] = set()
    cache = BlockCache(16, on_stored=stored.add, on_removed=stored.discard)
    running: list[tuple[tuple[int, ...], int]] = []
    for chain, length, out in steps:
        blocks = tuple(range(chain * 100, chain * 100 + length))
        matched = cache.match(blocks)
        assert set(blocks[:matched]) <= stored
        new = length - matched + out
        if not cache.has_room(blocks[:matched], new):
            for used, reserved in running:
                cache.release(used, reserved)
            running.clear()
            matched = cache.match(blocks)
            new = length - matched + out
        cache.take(blocks[:matched], new)
        cache.publish(blocks[matched:])
        running.append((blocks, out))
        assert cache.used <= cache.capacity or len(running) == 1
        assert stored == set(cache.cached)
        assert len(stored) + cache.reserved <= cache.capacity
    for used, reserved in running:
        cache.release(used, reserved)
    assert cache.is_at_rest


def test_percentiles_are_interpolated():
    assert percentile([], 50) == 0.0
    assert percentile([3.0], 99) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile(range(101), 99) == 99.0
