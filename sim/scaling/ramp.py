"""The stepped load for which llm-d publishes figures, as a curve of work-seconds.

Prompts have about 4,000 tokens and answers about 1,000. A replica is Qwen3-32B on two H100s, and 3
to 8 replicas are ready 100 s after their start. The published result is 95.8 % of requests within
3 s to the first token and 0.1 s per token, with 5.93 replicas on average.
"""

import random

from control_plane.scaling.fluid import ScalingOutcome, Terms

# Requests per second, and the seconds for which this rate lasts.
STAGES = ((2, 330), (4, 360), (6, 360), (8, 360), (10, 360), (4, 360), (1, 300))
PROMPT_TOKENS, ANSWER_TOKENS = 4000, 1000
_DRAINED_S = 600  # seconds after the last request in which the pool shrinks to its minimum
_LENGTHS_SIGMA = 0.05  # sigma of the work per second, because lengths are published as "about"

# Speed of one replica, with prefill as published. A step launches kernels, and reads the weights,
# 32 GB per GPU at 3.35 TB/s. It also reads the KV memory of each sequence (64 layers, 8 heads of
# 128, 2 bytes, over 2 GPUs).
_PREFILL_TOKENS_S = 15_928.0
_STEP_S = 0.015
_STEP_PER_SEQUENCE_S = 0.0002
_KV_TOKENS = 305_000  # tokens that fit into 90 % of 160 GB less 64 GB of weights
TERMS = Terms(boot_s=(100.0, 100.0), replicas_min=3, replicas_max=8, objective_s=3.0)


def requests_s() -> float:
    """Return the requests per second that one replica serves when its KV memory is full."""
    sequences = _KV_TOKENS / (PROMPT_TOKENS + ANSWER_TOKENS / 2)
    step_s = _STEP_S + _STEP_PER_SEQUENCE_S * sequences
    # Prefill uses a part of each second, and decode steps use the rest. On average, the number of
    # sequences is rate x answer tokens x seconds per token.
    prefill_s = PROMPT_TOKENS / _PREFILL_TOKENS_S
    return sequences / (ANSWER_TOKENS * step_s + prefill_s * sequences)


def token_s() -> float:
    """Return the mean seconds per token of a replica whose KV memory is full."""
    sequences = _KV_TOKENS / (PROMPT_TOKENS + ANSWER_TOKENS / 2)
    return sequences / (requests_s() * ANSWER_TOKENS)


def curve(seed: int = 0) -> list[float]:
    """Return the work-seconds of each second, including the time in which the pool shrinks."""
    drawn = random.Random(seed)  # noqa: S311 - a simulation is to be repeatable
    each_s = 1 / requests_s()
    rates = [rate for rate, for_s in STAGES for _ in range(for_s)]
    noisy = [rate * each_s * drawn.lognormvariate(0, _LENGTHS_SIGMA) for rate in rates]
    return noisy + [0.0] * _DRAINED_S


def replicas_mean(outcome: ScalingOutcome) -> float:
    """Return the mean replicas from the first request until the pool is at its minimum again.

    Sleeping replicas are counted.
    """
    minutes = outcome.provisioned
    end = sum(for_s for _, for_s in STAGES) // 60
    least = min(minutes[end:])
    while end < len(minutes) and minutes[end] > least:
        end += 1
    return sum(minutes[:end]) / end
