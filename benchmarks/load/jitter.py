"""Times between the end of an engine step and a token's arrival at its client.

The `sim` driver writes down when its steps ended, clients when tokens came, both by the machine's
monotonic clock. A sequence that has begun gets one token in every step, so that only its first step
has to be found. Pure functions.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.load.sse_client import percentile_ms


def delays_s(arrivals_s: Sequence[float], steps_s: Sequence[float]) -> list[float]:
    """Return how long after its step each token of one answer came; nothing if none fits.

    The first step is the latest for which no token came before its own step had ended. An answer
    whose every token took longer than a step is therefore taken for a faster one: what is found is
    a lower bound, and differences from token to token are exact.
    """
    firsts = [
        bisect_right(steps_s, arrived_s) - 1 - index for index, arrived_s in enumerate(arrivals_s)
    ]
    first = min(firsts, default=-1)
    if first < 0:
        return []
    return [at_s - steps_s[first + index] for index, at_s in enumerate(arrivals_s)]


def added(answers_s: Sequence[Sequence[float]], steps_s: Sequence[float]) -> dict[str, Any]:
    """Return what everything behind the engine has added to its tokens and to their gaps.

    `delay_ms`: from the step's end to the client. `added_gap_ms`: by how much a gap between two
    tokens was longer at the client than in the engine; as many gaps are shorter.
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
