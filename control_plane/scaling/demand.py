"""Holds a pool's demand, and forecasts what it must serve while a replica boots; pure.

Demand is measured in work-seconds per second: the work that one ready replica does in one second.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import repeat
from math import log, sqrt
from statistics import fmean, median
from typing import Any

BUCKET_S = 15.0
_NOW = 2  # buckets whose mean is the demand of now
_BASE = 40  # buckets (10 minutes) whose median is the demand without its noise
_NOISE_SAMPLES = 240  # buckets: an hour
_NOISE_LEAST = 0.03
_NOISE_SAMPLE_MAX = 1.0  # squared logarithm: a first bucket of almost nothing says little
# Until a pool's own noise is measured, it is as noisy as the public conversation trace. The prior
# weighs as much as five minutes of buckets.
_NOISE_PRIOR, _NOISE_PRIOR_SAMPLES = 0.08, 20
# A demand this many standard deviations above the base is a surge; a quarter of it is the least.
_SURGE_SIGMAS, _SURGE_LEAST = 3.5, 1.25
# A surge counts as over once demand is back at the base for this many buckets.
_SURGE_OVER = 8
# Before a pool's own surges are known it has one in four hours, with these peaks over the base,
# each as likely as the others. The prior weighs as much as eight hours of observation.
_PRIOR_SURGES, _PRIOR_HOURS = 2.0, 8.0
_PRIOR_PEAKS = (1.5, 1.75, 2.0, 2.25, 2.5)
_PEAKS_KEPT = 32
_SLOTS = 96  # quarters of an hour in a day
_DAYS = 8  # days whose quarters are kept: the same time last week is in them
_SLOT_S = 900.0
# A rise between yesterday's quarters counts up to this factor: a day may hold an outage.
_GROWTH_MAX = 2.0


@dataclass(frozen=True, slots=True)
class WorkForecast:
    """The demand that a pool must expect within the time that a replica needs to boot.

    Attributes:
        now: Work-seconds per second of the last half minute.
        base: Work-seconds per second of the last ten minutes, by their median.
        expected: Work-seconds per second to serve: the base with its growth, or a surge's end.
        noise: Standard deviation of the logarithm of a bucket's demand over the base.
        is_surge: Whether noise does not explain the demand of now.
        surges_per_hour: Rate at which surges begin.
        peaks: Peaks of surges over the base before them; each is as likely as the others.
    """

    now: float
    base: float
    expected: float
    noise: float
    is_surge: bool
    surges_per_hour: float
    peaks: tuple[float, ...]


def _floats(length: int) -> "deque[float]":
    return deque(maxlen=length)


@dataclass(slots=True)
class DemandHistory:
    """The demand of one pool in buckets of 15 s, and what was learned from it.

    Attributes:
        buckets: Mean demand of each bucket, the newest last; half an hour.
        days: Mean demand of each quarter of an hour; eight days, the newest last.
        bucket_s: Seconds of a bucket.
    """

    buckets: "deque[float]" = field(default_factory=lambda: _floats(120))
    days: "deque[float]" = field(default_factory=lambda: _floats(_SLOTS * _DAYS))
    _usual: "deque[float]" = field(default_factory=lambda: _floats(_BASE))
    _noise: "deque[float]" = field(default_factory=lambda: _floats(_NOISE_SAMPLES))
    _peaks: "deque[float]" = field(default_factory=lambda: _floats(_PEAKS_KEPT))
    _hours: float = 0.0
    _surges: int = 0
    _quarter: list[float] = field(default_factory=list[float])
    _before: float = 0.0  # base before the surge that goes on; 0: there is none
    _peak: float = 0.0
    _calm: int = 0  # buckets since demand was last above the surge's threshold
    bucket_s: float = BUCKET_S

    def add(self, demand: float) -> None:
        """Append the mean demand of one bucket, in work-seconds per second."""
        demand = max(0.0, demand)
        base = self.base
        self.buckets.append(demand)
        self._hours += self.bucket_s / 3600
        self._quarter.append(demand)
        if len(self._quarter) * self.bucket_s >= _SLOT_S:
            self.days.append(fmean(self._quarter))
            self._quarter.clear()
        if base > 0 and len(self._usual) >= _BASE // 4:
            self._follow_surge(base)
            # A fall is no noise, as a surge is none: until the base has followed, demand that has
            # gone would ask for replicas.
            if not self._before and demand > 0 and self.now > base / self._limit():
                # Not the log of their ratio, which may be too small for a float.
                self._noise.append(min(_NOISE_SAMPLE_MAX, (log(demand) - log(base)) ** 2))
        if not self._before:
            self._usual.append(demand)

    def fill(self, demand: float, seconds: float) -> None:
        """Append an unobserved time with only a mean demand.

        Days stay in step with the clock. At most as many buckets are appended as are kept.
        """
        count = max(1, round(seconds / self.bucket_s))
        kept = min(count, self.buckets.maxlen or 1)
        quarters = int((count - kept) * self.bucket_s / _SLOT_S)
        self.days.extend(repeat(demand, min(quarters, _SLOTS * _DAYS)))
        for _ in range(kept):
            self.add(demand)

    def as_json(self) -> dict[str, Any]:
        """Return the history in the form of `from_json`."""
        return {
            "bucket_s": self.bucket_s,
            **{name: [round(one, 6) for one in getattr(self, name)] for name in _SERIES},
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    @classmethod
    def from_json(cls, kept: dict[str, Any], bucket_s: float = BUCKET_S) -> "DemandHistory":
        """Return a stored history; with other bucket lengths only its days and surges are kept."""
        found = cls(bucket_s=bucket_s)
        is_same = kept.get("bucket_s") == bucket_s
        for name in _SERIES if is_same else ("days", "_peaks"):
            getattr(found, name).extend(map(float, kept.get(name, ())))
        for name in _NUMBERS if is_same else ("_hours", "_surges"):
            setattr(found, name, kept.get(name, 0))
        return found

    @property
    def base(self) -> float:
        """Median demand of the last ten minutes outside surges."""
        return median(self._usual) if self._usual else 0.0

    @property
    def now(self) -> float:
        """Mean demand of the last half minute."""
        recent = list(self.buckets)[-_NOW:]
        return fmean(recent) if recent else 0.0

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of a bucket's demand over the base."""
        known = len(self._noise)
        prior = _NOISE_PRIOR_SAMPLES * _NOISE_PRIOR**2
        # A spike that was no surge must not count as noise for ever: the largest samples are cut.
        kept = sorted(self._noise)[: known - known // 50]
        return max(_NOISE_LEAST, sqrt((sum(kept) + prior) / (len(kept) + _NOISE_PRIOR_SAMPLES)))

    def forecast(self, horizon_s: float) -> WorkForecast:
        """Return the demand to expect within `horizon_s` seconds."""
        base, now = self.base, self.now
        expected = base * self._growth(horizon_s)
        if self._before:
            expected = max(expected, self._projected())
        weight = self._surges + _PRIOR_SURGES
        return WorkForecast(
            now=now,
            base=base,
            expected=expected,
            noise=self.noise,
            is_surge=self._before > 0,
            surges_per_hour=weight / (self._hours + _PRIOR_HOURS),
            peaks=(*_PRIOR_PEAKS, *self._peaks),
        )

    def _follow_surge(self, base: float) -> None:
        if self.now > base * self._limit():
            self._before = base
            self._peak = max(self._peak, self.now / base)
            self._calm = 0
        elif self._before:
            self._calm += 1
            if self._calm >= _SURGE_OVER:
                self._end_surge()
        if self._before and self._lasting() > 2 * _BASE:
            # Demand that stays is the new base.
            self._usual.extend(list(self.buckets)[-_BASE:])
            self._end_surge()

    def _limit(self) -> float:
        """Return the factor over the base from which noise does not explain demand."""
        return max(_SURGE_LEAST, 1 + _SURGE_SIGMAS * self.noise)

    def _end_surge(self) -> None:
        self._surges += 1
        self._peaks.append(self._peak)
        self._before = self._peak = 0.0
        self._calm = 0

    def _lasting(self) -> int:
        """Return how many buckets ago the surge began, up to the history's length."""
        recent = list(self.buckets)
        half_way = self._before * (1 + (_SURGE_LEAST - 1) / 2)
        for age, demand in enumerate(reversed(recent)):
            if demand < half_way and age > self._calm:
                return age
        return len(recent)

    def _projected(self) -> float:
        """Return the demand at a surge's end, if the rise lasts as long again as it has so far."""
        lasting = self._lasting()
        recent = list(self.buckets)
        top = max(fmean(recent[-_NOW - 2 : -2] or recent), self.now)
        if lasting <= 1:
            return self.now
        rise = self.now - fmean(recent[-_NOW - 2 : -2]) if len(recent) > 2 + _NOW else 0.0
        if rise <= 2 * self.noise * self.now or lasting > 12:
            return top
        return self.now + rise / _NOW * min(lasting, 4)

    def _growth(self, horizon_s: float) -> float:
        """Return the base's growth up to the horizon on earlier days; 1 if unknown."""
        ahead = max(1, round(horizon_s / _SLOT_S))
        known = list(self.days)
        ratios: list[float] = []
        for slots in (_SLOTS, 7 * _SLOTS):
            at = len(known) - slots
            if at >= 0 and at + ahead < len(known) and min(known[at], known[at + ahead]) > 0:
                ratios.append(known[at + ahead] / known[at])
        if not ratios:
            return 1.0
        # Two days that agree are believed; of two that do not, the one nearer to no change.
        ratio = min(ratios, key=lambda it: abs(log(it)))
        return min(_GROWTH_MAX, max(1.0, ratio))


_SERIES = ("buckets", "days", "_usual", "_noise", "_peaks", "_quarter")
_NUMBERS = ("_hours", "_surges", "_before", "_peak", "_calm")
