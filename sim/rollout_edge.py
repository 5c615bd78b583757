"""False alarms of a release that is worse by exactly the tolerance, in every gate at once.

This release is the worst case for the stated false-alarm rate. An identical release is well within
the tolerance, and a gate hardly ever accuses it. The rates of bad requests are set directly,
without simulated requests, because only rates define the edge of the tolerance. The tests, the
gates and the division of alpha are the real code.
"""

from math import sin

import numpy as np

from control_plane.rollouts.evidence import Metric
from control_plane.rollouts.plan import Plan, Stage
from control_plane.rollouts.sequential import Count, SequentialTest, observe
from sluice.split import SHARE_MAX

# Rates of bad requests in control, each of which varies by half of its value.
_RATES = {
    Metric.ERRORS: 0.01,
    Metric.SLOW_FIRST_TOKEN: 0.05,
    Metric.SLOW_TOKENS: 0.05,
    Metric.LONG_ANSWERS: 0.05,
    Metric.SHORT_ANSWERS: 0.05,
    Metric.REFUSALS: 0.02,
    Metric.FEWER_REFUSALS: 0.02,
    Metric.EMPTY_ANSWERS: 0.002,
    Metric.REPETITIVE_ANSWERS: 0.01,
    Metric.CUT_ANSWERS: 0.05,
    Metric.BASE_LIKE_ANSWERS: 0.03,
    Metric.UNLIKELY_ANSWERS: 0.05,
    Metric.UNSURE_ANSWERS: 0.05,
    Metric.GOLDEN: 0.02,
}
_SWING_WINDOWS = 40
_PAST = 2_000  # requests of control that are counted before a stage


def is_accused(plan: Plan, requests_per_window: float, seed: int) -> bool:
    """Return whether a gate is breached in any stage, each of which ends at its minimum sample."""
    draw = np.random.default_rng(seed)
    return any(_in_stage(plan, s, requests_per_window, draw) for s in plan.stages if s.is_compared)


def _in_stage(plan: Plan, stage: Stage, requests: float, draw: np.random.Generator) -> bool:
    share = stage.share / SHARE_MAX
    tests = {
        gate.metric: observe(
            SequentialTest(gate.tolerated), Count(0, 0), _count(draw, _PAST, _RATES[gate.metric])
        )
        for gate in plan.gates
    }
    counted = number = 0
    while counted < stage.sample_min:
        canary = int(draw.poisson(requests * share))
        control = int(draw.poisson(requests * (1 - share)))
        counted, number = counted + canary, number + 1
        for metric, test in tests.items():
            rate = _RATES[metric] * (1 + sin(number / _SWING_WINDOWS) / 2)
            edge = rate + test.margin * (1 - rate)
            tests[metric] = observe(test, _count(draw, canary, edge), _count(draw, control, rate))
        if any(test.is_worse(plan.alpha_of_test) for test in tests.values()):
            return True
    return False


def _count(draw: np.random.Generator, total: int, rate: float) -> Count:
    return Count(int(draw.binomial(total, rate)), total)
