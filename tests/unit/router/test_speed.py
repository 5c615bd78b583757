"""How fast a replica is, learned from steps of cost models that the simulated engines use."""

import random
from typing import Any

import pytest

from replica.drivers.sim_costs import CostModel, H70Cost, M8Cost, StepWork
from router.core.fleet.speed import MeanSpeed, Speed
from sluice.wire.engine.v1 import engine_pb2 as engine

BUDGET = 2048
DECODES = 16
DECODE_CONTEXT = 16 * 1500
LONGEST = 64 * 1024


def step_s(cost: CostModel, tokens: int = 0, before: int = 0) -> float:
    pairs = tokens * (before + tokens / 2)
    return cost.step_s(StepWork(tokens, pairs, before, DECODES, DECODE_CONTEXT))


def observed(speed: Speed, duration_s: float, tokens: int = 0, before: int = 0) -> None:
    state = engine.EngineState(
        running=DECODES, step_us=round(duration_s * 1e6), step_prompt_tokens=tokens
    )
    speed.observe(state, before + tokens / 2)


def learn(speed: Speed, cost: CostModel, steps: int, seed: int, noise: float = 0.01) -> None:
    """Let it see steps full of prompt tokens and steps without any, in turn."""
    dice = random.Random(seed)
    full = BUDGET - DECODES
    for _ in range(steps):
        observed(speed, step_s(cost) * dice.uniform(1 - noise, 1 + noise))
        before = dice.randrange(0, LONGEST, full)
        duration_s = step_s(cost, full, before) * dice.uniform(1 - noise, 1 + noise)
        observed(speed, duration_s, full, before)


@pytest.mark.parametrize("cost", [H70Cost(), M8Cost()], ids=["h70", "m8"])
@pytest.mark.parametrize("seed", range(5))
def test_the_cost_of_a_decode_step_a_token_and_its_context_is_learned(cost: Any, seed: Any):
    speed = Speed(BUDGET)
    learn(speed, cost, 400, seed)
    full = BUDGET - DECODES
    base_s = step_s(cost)
    assert speed.decode_step_s == pytest.approx(base_s, rel=0.05)
    # The slope of the truth, and what is left at no context: m8 has a part per step besides.
    attention_s = (step_s(cost, full, LONGEST) - step_s(cost, full)) / (full * LONGEST)
    token_s = (step_s(cost, full) - base_s) / full - attention_s * full / 2
    assert speed.attention_s == pytest.approx(attention_s, rel=0.05)
    assert speed.token_s == pytest.approx(token_s, rel=0.05)
    for prompt in (2032, 20_320):
        alone_s = sum(step_s(cost, full, before) for before in range(0, prompt, full))
        assert speed.prefill_s(prompt, 0) == pytest.approx(alone_s, rel=0.05)
    with_cache_s = step_s(cost, full, 40 * full)
    assert speed.prefill_s(full, 40 * full) == pytest.approx(with_cache_s, rel=0.05)


def test_contexts_that_are_all_alike_tell_the_cost_and_no_trend():
    speed, cost = Speed(BUDGET), H70Cost()
    dice = random.Random(3)
    for _ in range(200):
        observed(speed, step_s(cost))
        duration_s = step_s(cost, 1024, 100) * dice.uniform(0.9, 1.1)
        observed(speed, duration_s, 1024, 100)
    assert speed.attention_s == 0.0
    assert speed.prefill_s(1024, 100) == pytest.approx(
        step_s(cost, 1024, 100) - step_s(cost) / 2, rel=0.05
    )


def test_a_replica_that_slows_down_is_seen_within_some_dozens_of_steps():
    speed, cost = Speed(BUDGET), H70Cost()
    learn(speed, cost, 200, seed=1)
    before_s = speed.prefill_s(4000, 0)
    dice = random.Random(2)
    full = BUDGET - DECODES
    for _ in range(80):
        context = dice.randrange(0, LONGEST, full)
        observed(speed, 3 * step_s(cost))
        observed(speed, 3 * step_s(cost, full, context), full, context)
    assert 2.5 * before_s < speed.prefill_s(4000, 0) < 3.5 * before_s
    assert speed.decode_step_s == pytest.approx(3 * step_s(cost), rel=0.05)


def test_steps_with_little_of_a_prompt_and_idle_ones_teach_nothing():
    speed = Speed(BUDGET)
    known = (speed.decode_step_s, speed.token_s, speed.attention_s)
    observed(speed, 5.0, tokens=BUDGET // 4 - 1)
    observed(speed, 0.0, tokens=BUDGET)
    speed.observe(engine.EngineState(step_us=5_000_000), 0.0)  # nothing runs
    assert (speed.decode_step_s, speed.token_s, speed.attention_s) == known


def test_after_bad_times_a_replica_begins_with_the_median_speed_of_its_peers():
    peers = [Speed(BUDGET) for _ in range(3)]
    for seed, peer in enumerate(peers):
        learn(peer, H70Cost(), 200, seed)
    speed = Speed(BUDGET)
    learn(speed, M8Cost(), 200, seed=9)
    speed.adopt(peers)
    costs = sorted(peer.prefill_s(4000, 2000) for peer in peers)
    assert costs[0] <= speed.prefill_s(4000, 2000) <= costs[-1]
    learn(speed, M8Cost(), 200, seed=9)
    own = Speed(BUDGET)
    learn(own, M8Cost(), 200, seed=9)
    assert speed.prefill_s(4000, 2000) == pytest.approx(own.prefill_s(4000, 2000), rel=0.05)


def test_the_median_speed_is_the_mean_and_free_without_replicas():
    assert MeanSpeed().prefill_s(1000, 0) == 0.0
    fast, slow = Speed(BUDGET), Speed(BUDGET)
    learn(fast, M8Cost(), 200, seed=1)
    learn(slow, H70Cost(), 200, seed=1)
    mean_speed = MeanSpeed([fast, slow])
    mean_s = (fast.prefill_s(5000, 3000) + slow.prefill_s(5000, 3000)) / 2
    assert mean_speed.prefill_s(5000, 3000) == pytest.approx(mean_s)
