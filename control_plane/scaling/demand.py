"""Stores a pool's demand, and forecasts it for the time at which a new replica is ready. Pure.

Demand is measured in work-seconds per second. A work-second is the work that one ready replica does
in one second.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import repeat
from math import log, sqrt
from statistics import fmean, median
from typing import Any

BUCKET_S = 15.0
_NOW = 2  # number of latest buckets (30 s) whose mean is the present demand
_BASE = 40  # Number of latest buckets (10 minutes). Their median is the base, which has no noise.
_LEVEL = 8  # number of latest buckets (two minutes) after which a lasting change is the new level
_NOISE_SAMPLES = 240  # number of latest buckets (one hour) from which the noise is estimated
_NOISE_LEAST = 0.03
# Largest squared logarithm of one sample. A first bucket with almost no demand has a huge ratio.
_NOISE_SAMPLE_MAX = 1.0
# Until a pool's own noise is measured, the noise of the public conversation trace is assumed. The
# prior weighs as much as five minutes of buckets.
_NOISE_PRIOR, _NOISE_PRIOR_SAMPLES = 0.08, 20
# Demand that exceeds the base by this many standard deviations is a surge. The threshold is at
# least 1.25 times the base.
_SURGE_SIGMAS, _SURGE_LEAST = 3.5, 1.25
# A surge has ended when demand has been near the base for this many buckets.
_SURGE_OVER = 8
# Until a pool's own surges are known, one surge in four hours is assumed, with one of five peaks. A
# peak is a multiple of the base, and all five are equally likely. The prior weighs as much as eight
# hours of observation.
_PRIOR_SURGES, _PRIOR_HOURS = 2.0, 8.0
_PRIOR_PEAKS = (1.5, 1.75, 2.0, 2.25, 2.5)
_PEAKS_KEPT = 32
_SLOTS = 96  # quarter-hours in a day
_DAYS = 8  # Days of stored quarter-hours, which include the same time of last week.
_SLOT_S = 900.0
# Largest growth, as a factor, that the forecast takes from two quarter-hours of an earlier day.
# That day may include an outage, after which demand rises sharply.
_GROWTH_MAX = 2.0


@dataclass(frozen=True, slots=True)
class WorkForecast:
    """The demand that a pool must expect during the time that a replica takes to boot.

    Attributes:
        now: Mean demand of the last half minute, in work-seconds per second.
        base: Median demand of the last ten minutes, in work-seconds per second.
        expected: Demand to provide for, in work-seconds per second. It is the base with its growth
            or, in a surge, the projected peak.
        noise: Standard deviation of the logarithm of a bucket's demand over the base.
        is_surge: Whether the present demand is higher than noise explains.
        surges_per_hour: Rate at which surges begin.
        peaks: Peaks of past surges as multiples of the base before the surge. All peaks are equally
            likely.
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
    """The demand of one pool in buckets of 15 s, and the noise and surges estimated from it.

    Attributes:
        buckets: Mean demand of each bucket of the last half hour, the newest last.
        days: Mean demand of each quarter-hour of the last eight days, the newest last.
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
    _before: float = 0.0  # base before the present surge, or 0 without a surge
    _peak: float = 0.0
    _calm: int = 0  # number of buckets since demand last exceeded the threshold of the surge
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
            # In a surge each further rise is noise, so that a load in steps has much noise. A fall
            # is none, because samples of the vanished demand would add replicas.
            level = median(list(self.buckets)[-_LEVEL - 1 : -1]) if self._before else base
            if demand > 0 and level > 0 and self.now > level / self._limit():
                # The difference of two logarithms, because the ratio may be too small for a float.
                self._noise.append(min(_NOISE_SAMPLE_MAX, (log(demand) - log(level)) ** 2))
        if not self._before:
            self._usual.append(demand)

    def fill(self, demand: float, seconds: float) -> None:
        """Append a period that was not observed, with an assumed mean demand.

        The stored quarter-hours stay aligned with the clock. Buckets beyond the stored half hour
        are not appended.
        """
        count = max(1, round(seconds / self.bucket_s))
        kept = min(count, self.buckets.maxlen or 1)
        quarters = int((count - kept) * self.bucket_s / _SLOT_S)
        self.days.extend(repeat(demand, min(quarters, _SLOTS * _DAYS)))
        for _ in range(kept):
            self.add(demand)

    def as_json(self) -> dict[str, Any]:
        """Return the history as JSON, to be read by `from_json`."""
        return {
            "bucket_s": self.bucket_s,
            **{name: [round(one, 6) for one in getattr(self, name)] for name in _SERIES},
            **{name: getattr(self, name) for name in _NUMBERS},
        }

    @classmethod
    def from_json(cls, kept: dict[str, Any], bucket_s: float = BUCKET_S) -> "DemandHistory":
        """Return a stored history.

        If the bucket length differs, only the days and surges are restored.
        """
        found = cls(bucket_s=bucket_s)
        is_same = kept.get("bucket_s") == bucket_s
        for name in _SERIES if is_same else ("days", "_peaks"):
            getattr(found, name).extend(map(float, kept.get(name, ())))
        for name in _NUMBERS if is_same else ("_hours", "_surges"):
            setattr(found, name, kept.get(name, 0))
        return found

    @property
    def base(self) -> float:
        """Median demand of the last ten minutes without surges."""
        return median(self._usual) if self._usual else 0.0

    @property
    def now(self) -> float:
        """Mean demand of the last half minute."""
        recent = list(self.buckets)[-_NOW:]
        return fmean(recent) if recent else 0.0

    @property
    def is_falling(self) -> bool:
        """Whether the present demand is below the base by more than noise, and outside a surge."""
        return not self._before and self.now * self._limit() < self._followed()

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of a bucket's demand over the base."""
        known = len(self._noise)
        prior = _NOISE_PRIOR_SAMPLES * _NOISE_PRIOR**2
        # The largest samples are dropped. Otherwise a short spike would raise the noise for an
        # hour.
        kept = sorted(self._noise)[: known - known // 50]
        return max(_NOISE_LEAST, sqrt((sum(kept) + prior) / (len(kept) + _NOISE_PRIOR_SAMPLES)))

    def forecast(self, horizon_s: float) -> WorkForecast:
        """Return the demand to expect within `horizon_s` seconds."""
        base, now = self._followed(), self.now
        expected = base * self._growth(horizon_s)
        if self._before:
            expected = max(expected, self._projected())
        weight, noise = self._surges + _PRIOR_SURGES, self.noise
        return WorkForecast(
            now=now,
            base=base,
            expected=expected,
            noise=noise,
            is_surge=self._before > 0,
            surges_per_hour=weight / (self._hours + _PRIOR_HOURS),
            # A measured peak contains noise already, an assumed peak does not.
            peaks=(*(peak * (1 + noise) for peak in _PRIOR_PEAKS), *self._peaks),
        )

    def _followed(self) -> float:
        """Return the base, which follows a fall late, or the most recent demand if that is less."""
        return min(self.base, max(list(self.buckets)[-_LEVEL:], default=0.0))

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
            # Demand that stays high after a surge is the new base.
            self._usual.clear()
            self._usual.extend(list(self.buckets)[-_LEVEL:])
            self._end_surge()

    def _limit(self) -> float:
        """Return the factor over the base above which demand is a surge rather than noise."""
        return max(_SURGE_LEAST, 1 + _SURGE_SIGMAS * self.noise)

    def _end_surge(self) -> None:
        self._surges += 1
        self._peaks.append(self._peak)
        self._before = self._peak = 0.0
        self._calm = 0

    def _lasting(self) -> int:
        """Return the number of buckets since the surge began, at most the length of the history."""
        recent = list(self.buckets)
        half_way = self._before * (1 + (_SURGE_LEAST - 1) / 2)
        for age, demand in enumerate(reversed(recent)):
            if demand < half_way and age > self._calm:
                return age
        return len(recent)

    def _projected(self) -> float:
        """Return the demand at a surge's end, if the rise goes on for as long as it has lasted."""
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
        """Return the base's growth factor up to the horizon on earlier days, or 1 if unknown."""
        ahead = max(1, round(horizon_s / _SLOT_S))
        known = list(self.days)
        ratios: list[float] = []
        for slots in (_SLOTS, 7 * _SLOTS):
            at = len(known) - slots
            if at >= 0 and at + ahead < len(known) and min(known[at], known[at + ahead]) > 0:
                ratios.append(known[at + ahead] / known[at])
        if not ratios:
            return 1.0
        # If the growth of two days differs, the smaller change is used.
        ratio = min(ratios, key=lambda it: abs(log(it)))
        return min(_GROWTH_MAX, max(1.0, ratio))


_SERIES = ("buckets", "days", "_usual", "_noise", "_peaks", "_quarter")
_NUMBERS = ("_hours", "_surges", "_before", "_peak", "_calm")
