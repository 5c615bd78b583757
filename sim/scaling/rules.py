"""The published scaling rules and the product's `plan` over the fluid model, with their sources."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean

from control_plane.scaling.fluid import ScalingRule, Sight, Terms
from control_plane.scaling.model import ScalingSettings
from control_plane.scaling.replay import PlanRule

_EVERY_S = 15


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _sluice(terms: Terms) -> PlanRule:
    settings = ScalingSettings(
        terms.replicas_min,
        terms.replicas_max,
        sleepers_share=terms.sleepers_share,
        sleepers_min=terms.sleepers_min,
    )
    return PlanRule(settings, terms)


@dataclass(slots=True)
class StaticRule:
    """One number of replicas all day, for the mean demand at 70 % utilisation."""

    terms: Terms
    replicas: int = 1
    every_s: int = _EVERY_S

    def target(self, t: int, sight: Sight) -> float:
        """Return the constant number of replicas."""
        del t, sight
        return self.replicas


@dataclass(slots=True)
class StepRule:
    """The platform's required rule, which adds 5 or 10 %, and removes a replica when idle."""

    terms: Terms
    every_s: int = _EVERY_S
    _up_at: float = -999.0
    _down_at: float = -999.0

    def target(self, t: int, sight: Sight) -> float:
        """Return the replicas after one step of the rule."""
        have = want = sight.provisioned
        if t - self._up_at >= 60:
            slow_s = 1.2 * self.terms.objective_s
            if t >= 60 and _percentile(sight.ttft_s[-60:], 0.99) > slow_s:
                want = max(want, ceil(have * 1.10))
            if sight.backlog_s[-1] > 0.5:
                want = max(want, ceil(have * 1.05))
            if t >= 180 and fmean(sight.utilisation[-180:]) > 0.85:
                want = max(want, ceil(have * 1.05))
        if want > have:
            self._up_at = t
            return want
        windows = (
            [fmean(sight.utilisation[at : at + 15]) for at in range(t - 899, t + 1, 15)]
            if t >= 900
            else [1.0]
        )
        if max(windows) < 0.40 and t - self._down_at >= 60:
            self._down_at = t
            return have - 1
        return have


@dataclass(slots=True)
class _RecentAsk:
    """The target numbers of the last `hold_s` seconds, of which `most` returns the greatest."""

    hold_s: float
    asks: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])

    def most(self, t: int, ask: float) -> float:
        """Add a target number, and return the greatest one within the hold time."""
        self.asks = [(at, value) for at, value in self.asks if at > t - self.hold_s]
        self.asks.append((t, ask))
        return max(value for _, value in self.asks)


@dataclass(slots=True)
class HpaRule:
    """Kubernetes' HorizontalPodAutoscaler on utilisation 0.7, with its default behaviour."""

    terms: Terms
    every_s: int = _EVERY_S
    _held: _RecentAsk = field(default_factory=lambda: _RecentAsk(300))

    def target(self, t: int, sight: Sight) -> float:
        """Return the replicas by the ratio of utilisation to its target."""
        have, ready = sight.provisioned, sight.ready
        work = fmean(sight.demand[-30:]) + sight.backlog_s[-1] * ready / 60
        ratio = work / max(ready, 1) / 0.7
        if have > ready:
            ratio *= ready / max(have, 1)
        want = have if abs(ratio - 1) < 0.1 else ceil(have * ratio)
        want = min(want, max(2 * have, have + 4))
        most = self._held.most(t, want)
        return want if want >= have else min(have, most)


@dataclass(slots=True)
class KpaRule:
    """AIBrix' KPA, with a stable window of 180 s, and a panic window of 60 s.

    A panic begins when the demand is twice the capacity.
    """

    terms: Terms
    every_s: int = _EVERY_S
    _panic_at: float = -999.0
    _held: _RecentAsk = field(default_factory=lambda: _RecentAsk(300))

    def target(self, t: int, sight: Sight) -> float:
        """Return the replicas by the stable window, or by the panic window."""
        have = sight.provisioned
        stable, panic = (fmean(sight.demand[-window:]) / 0.7 for window in (180, 60))
        if panic >= 2.0 * sight.ready:
            self._panic_at = t
        want = ceil(max(panic, have) if t - self._panic_at < 180 else stable)
        most = self._held.most(t, want)
        return want if want >= have else most


@dataclass(slots=True)
class ThroughputRule:
    """Dynamo's throughput loop without corrections, for 1 / 0.9 of the mean demand of 180 s."""

    terms: Terms
    every_s: int = 180

    def target(self, t: int, sight: Sight) -> float:
        """Return the replicas for the last window's mean."""
        del t
        return ceil(fmean(sight.demand[-180:]) / 0.9)


@dataclass(slots=True)
class SloRule:
    """llm-d's law for TTFT, which adds above 0.55 of the objective, and removes below 0.40."""

    terms: Terms
    every_s: int = _EVERY_S
    _smooth: float | None = None
    _up_at: float = -999.0
    _down_at: float = -999.0

    def target(self, t: int, sight: Sight) -> float:
        """Return the replicas by the smoothed share of the objective."""
        have = sight.provisioned
        if t < 60:
            return have
        share = min(2.0, _percentile(sight.ttft_s[-60:], 0.90) / self.terms.objective_s)
        smooth = share if self._smooth is None else self._smooth * 2 / 3 + share / 3
        self._smooth = smooth
        if smooth > 0.55 and t - self._up_at >= 60:
            self._up_at = t
            asked = ceil(have * smooth / 0.55 * sight.ready / have)
            return min(max(2 * have, have + 4), max(have, asked))
        if smooth < 0.40 and t - self._down_at >= 120:
            self._down_at = t
            return have - 1
        return have


@dataclass(slots=True)
class OracleRule:
    """Scales by the true demand until a replica that boots now would be ready."""

    terms: Terms
    every_s: int = _EVERY_S
    _smooth: list[float] = field(default_factory=list[float])

    def target(self, t: int, sight: Sight) -> float:
        """Return the replicas for the greatest ten-second mean demand until a replica is ready."""
        if not self._smooth:
            curve = sight.future
            self._smooth = [sum(curve[max(0, at - 5) : at + 5]) / 10 for at in range(len(curve))]
        ahead = int(self.terms.boot_s[1]) + self.every_s
        return ceil(max(self._smooth[t : t + ahead + 1]) / 0.96)


RULES: dict[str, Callable[[Terms], ScalingRule]] = {
    "sluice": _sluice,
    "static": StaticRule,
    "requirements": StepRule,
    "hpa": HpaRule,
    "kpa": KpaRule,
    "throughput": ThroughputRule,
    "slo": SloRule,
    "oracle": OracleRule,
}


def rule_of(name: str, terms: Terms, demand: Sequence[float]) -> ScalingRule:
    """Return the rule of a policy by its name.

    Raises:
        KeyError: No policy has this name.
    """
    rule = RULES[name](terms)
    if isinstance(rule, StaticRule):
        rule.replicas = max(1, ceil(fmean(demand) / 0.7))
    return rule
