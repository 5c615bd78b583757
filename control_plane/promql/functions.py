"""Functions over ranges and histograms, as Prometheus defines them. Pure.

A range consists of times in milliseconds and of values. It excludes `after_ms` and includes
`until_ms`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# The gap between an end of the range and the nearest sample may exceed this many usual gaps. Then
# the series itself begins or ends in the range.
_GAP = 1.1


@dataclass(frozen=True, slots=True)
class SampleRange:
    """The samples of one series in a time range.

    Attributes:
        times: Times of the samples in milliseconds, ascending.
        values: Value of each sample.
        after_ms: Start of the range in milliseconds, exclusive.
        until_ms: End of the range in milliseconds, inclusive.
    """

    times: Sequence[int]
    values: Sequence[float]
    after_ms: int
    until_ms: int


RangeFunction = Callable[[SampleRange], float | None]


def _change(found: SampleRange, *, is_counter: bool) -> float | None:
    """Return the change over the whole range, extrapolated to the ends of the range."""
    times, values = found.times, found.values
    if len(times) < 2:
        return None
    change = values[-1] - values[0]
    if is_counter:
        change += sum(before for before, after in pairwise(values) if after < before)
    took_ms = times[-1] - times[0]
    usual_ms = took_ms / (len(times) - 1)
    start_ms, end_ms = float(times[0] - found.after_ms), float(found.until_ms - times[-1])
    if start_ms >= usual_ms * _GAP:
        start_ms = usual_ms / 2
    if end_ms >= usual_ms * _GAP:
        end_ms = usual_ms / 2
    if is_counter and change > 0 and values[0] >= 0:  # a counter is not extrapolated below zero
        start_ms = min(start_ms, took_ms * (values[0] / change))
    return change * (took_ms + start_ms + end_ms) / took_ms


def increase(found: SampleRange) -> float | None:
    """Return the increase of a counter, including increases across restarts."""
    return _change(found, is_counter=True)


def rate(found: SampleRange) -> float | None:
    """Return the increase of a counter per second."""
    change = increase(found)
    return None if change is None else change * 1000 / (found.until_ms - found.after_ms)


def delta(found: SampleRange) -> float | None:
    """Return the change of a gauge."""
    return _change(found, is_counter=False)


def irate(found: SampleRange) -> float | None:
    """Return the increase per second between the last two samples."""
    if len(found.times) < 2:
        return None
    before, after = found.values[-2:]
    change = after if after < before else after - before
    return change * 1000 / (found.times[-1] - found.times[-2])


def deriv(found: SampleRange) -> float | None:
    """Return the slope of a line through the samples, per second."""
    if len(found.times) < 2:
        return None
    if all(value == found.values[0] for value in found.values):
        return 0.0
    seconds = [(at - found.times[0]) / 1000 for at in found.times]
    mean_s, mean = math.fsum(seconds) / len(seconds), math.fsum(found.values) / len(seconds)
    spread = math.fsum((it - mean_s) ** 2 for it in seconds)
    both = zip(seconds, found.values, strict=True)
    return math.fsum((at - mean_s) * (value - mean) for at, value in both) / spread


def _of_values(function: Callable[[Sequence[float]], float]) -> RangeFunction:
    return lambda found: function(found.values) if found.values else None


def largest(values: Iterable[float]) -> float:
    """Return the largest number that is not NaN, or NaN without such a number."""
    return max((it for it in values if not math.isnan(it)), default=math.nan)


def smallest(values: Iterable[float]) -> float:
    """Return the smallest number that is not NaN, or NaN without such a number."""
    return min((it for it in values if not math.isnan(it)), default=math.nan)


def total(values: Sequence[float]) -> float:
    """Return the sum, without rounding errors if all numbers are finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one number."""
    return total(values) / len(values)


RANGE_FUNCTIONS: Mapping[str, RangeFunction] = {
    "rate": rate,
    "increase": increase,
    "delta": delta,
    "irate": irate,
    "deriv": deriv,
    "max_over_time": _of_values(largest),
    "min_over_time": _of_values(smallest),
    "avg_over_time": _of_values(mean),
    "sum_over_time": _of_values(total),
    "count_over_time": _of_values(len),
    "last_over_time": _of_values(lambda values: values[-1]),
}


def histogram_quantile(share: float, buckets: Mapping[float, float]) -> float:
    """Return a quantile of a histogram, interpolated linearly within a bucket.

    Args:
        share: Share of the values that the quantile exceeds, from 0 to 1.
        buckets: Number of values at or below each edge. Without the edge +Inf the result is NaN.
    """
    if not 0 <= share <= 1:
        return math.nan if math.isnan(share) else math.copysign(math.inf, share)
    edges = sorted(buckets)
    # Pages of several processes are not scraped at the same instant, so the counts are first made
    # monotonic.
    counts = list(accumulate((buckets[edge] for edge in edges), max))
    if len(edges) < 2 or edges[-1] != math.inf or not counts[-1] > 0:
        return math.nan
    wanted = share * counts[-1]
    place = next(at for at, count in enumerate(counts) if count >= wanted or at == len(counts) - 1)
    if place == len(edges) - 1 or (place == 0 and edges[0] <= 0):
        return edges[max(0, place - 1)]
    low, below = (edges[place - 1], counts[place - 1]) if place else (0.0, 0.0)
    within = counts[place] - below
    return low + (edges[place] - low) * ((wanted - below) / within if within else math.nan)
