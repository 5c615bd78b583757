"""Computes the delay between the end of an engine step and a token's arrival at its client.

The `sim` driver records when its steps ended, and clients record when tokens arrived, both by the
machine's monotonic clock. A running sequence receives one token in every step. So once its first
step is determined, the steps of all its tokens are known. The module does no I/O.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.load.sse_client import percentile_ms


def delays_s(arrivals_s: Sequence[float], steps_s: Sequence[float]) -> list[float]:
    """Return the delay of each token after its step, or an empty list if no first step fits.

    The function assumes the latest first step for which no token arrived before the end of its own
    step. If every token of the answer was delayed by more than a step, this assumption makes the
    delays too small by whole steps. So the delays are lower bounds, but differences between tokens
    are exact.
    """
    firsts = [
        bisect_right(steps_s, arrived_s) - 1 - index for index, arrived_s in enumerate(arrivals_s)
    ]
    first = min(firsts, default=-1)
    if first < 0:
        return []
    return [at_s - steps_s[first + index] for index, at_s in enumerate(arrivals_s)]


def added(answers_s: Sequence[Sequence[float]], steps_s: Sequence[float]) -> dict[str, Any]:
    """Return the delays of tokens after their steps, and the lengthening of gaps between tokens.

    `delay_ms` is the time from the step's end to the client. `added_gap_ms` is the gap between two
    tokens at the client minus the gap between their steps. About half of these differences are
    negative.
    """
    delays = [delays_s(arrivals_s, steps_s) for arrivals_s in answers_s]
    gaps = [after - before for one in delays for before, after in pairwise(one)]
    return {
        "delay_ms": _percentiles([delay for one in delays for delay in one]),
        "added_gap_ms": _percentiles(gaps),
        "step_gap_ms": _percentiles([after - before for before, after in pairwise(steps_s)]),
    }


def _percentiles(values: list[float]) -> dict[str, float | None]:
    return {f"p{int(q * 100)}": percentile_ms(values, q) for q in (0.5, 0.9, 0.99)}
