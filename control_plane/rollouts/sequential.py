"""Tests at any time whether canary's failure rate exceeds control's by more than the margin. Pure.

Null hypothesis, in every window: p1 <= p0 + margin * (1 - p0), whatever p0 is in that window.

- E-value of a window: the two-sample e-variable for 2x2 tables (Turner, Ly, Gruenwald, "Generic
  E-variables for exact sequential k-sample tests that allow for optional stopping", Journal of
  Statistical Planning and Inference 230, 2024). It is a likelihood ratio. The numerator has canary
  at theta1 and control at theta0. The denominator has both at the mean (n1 theta1 + n0 theta0) /
  (n1 + n0). Its expectation is at most 1 when p1 = p0, by the inequality of means. The same holds
  when p1 < p0, because each canary failure raises the e-value and each control failure lowers it.
- Margin: each good control request counts as a failure with weight `margin`. Control then fails at
  p0 + margin * (1 - p0), which gives the null hypothesis above. The weight replaces a random draw
  by its expectation, which is valid because an average of e-values is an e-value.
- theta0 is estimated from earlier windows only. theta1 follows from theta0 and one of
  `_ODDS_RATIOS`. If theta0 is wrong (because the base rate moved), the test loses power and stays
  valid.
- The stake is a mixture over alternatives and over the window in which the release turns bad. A
  part of the stake is reserved, and some of this reserve is bet in each window (a prior over change
  points). So a long good period does not hide a bad end.
- Products and mixtures of such e-values are non-negative supermartingales with mean 1 at most. So
  by Ville's inequality (1939) P(e >= 1 / alpha at any time) <= alpha. The bound does not depend on
  the number of inspections or on the split of traffic. The split may depend on earlier
  observations.
- Windows may be pooled before a bet, if the end of the pooling does not depend on the number of bad
  requests. Here the end depends on the number of control requests and on time.

Assumption: given the window and the release, requests fail independently of each other. Requests of
one session are similar, so docs/rollouts.md describes a remedy and its cost.
"""

from dataclasses import dataclass, replace
from math import exp, log, log1p, sqrt

# Odds of a canary failure relative to control's, one per alternative. For a control rate of 1 % the
# canary rates are 1.5, 2.5, 5, 11 and 29 %. For 10 % the canary rates are 14, 22, 36, 57 and 82 %.
_ODDS_RATIOS = (1.5, 2.5, 5.0, 12.0, 40.0)
# Half of the stake is bet in the first window. In each later window t, the share 1 / (t + 64) of
# the remaining stake is bet. So half of the remaining stake is bet in 64 windows, and some stake
# always remains.
_FIRST_BET = 0.5
_PATIENCE_WINDOWS = 64
# theta0 is control's rate in about its last 2,000 requests. A rate of 1 % is then estimated to
# within a quarter of its value, and the estimate follows changes over the day. Below 50 requests,
# nothing is bet.
_MEMORY_REQUESTS_MAX = 2_000
_MEMORY_REQUESTS_MIN = 50
_WAITING_WINDOWS_MAX = 30  # largest number of pooled windows (5 minutes of windows of 10 s)
_ONE_SIDED_95 = 1.645  # 95 % quantile of the normal distribution, in standard deviations
_LOG_NOTHING = -1e9  # Logarithm of an empty stake. It is finite, because JSON has no infinity.


@dataclass(frozen=True, slots=True)
class Count:
    """The number of an arm's requests (`total`), and of those that failed a criterion (`bad`)."""

    bad: int
    total: int

    def __post_init__(self) -> None:
        assert 0 <= self.bad <= self.total, (self.bad, self.total)

    def __add__(self, other: "Count") -> "Count":
        return Count(self.bad + other.bad, self.total + other.total)

    @property
    def ratio(self) -> float:
        """Share of the bad requests, which is 0 without requests."""
        return self.bad / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """The state of a sequential test after some windows, which has constant size.

    Attributes:
        margin: Tolerated difference of the rates, from 0 to below 1, as the module defines it.
        reference_min: Number of control requests up to which windows are pooled. Zero means no
            pooling.
        bets: Number of windows with a bet, in which both arms had requests and control's rate was
            estimated.
        log_kept: Natural logarithm of the part of the stake that is not bet yet.
        log_bet: Natural logarithm of each alternative's stake, in the order of the alternatives.
        memory_bad: Bad control requests in memory, where older requests weigh less.
        memory_total: All control requests in memory.
        canary: Canary's counts in the windows with a bet, on which the e-value is based.
        control: Control's counts in the windows with a bet.
        waiting_windows: Number of pooled windows without a bet so far.
        waiting_canary: Canary's counts in the pooled windows.
        waiting_control: Control's counts in the pooled windows.
    """

    margin: float
    reference_min: int = 0
    bets: int = 0
    log_kept: float = 0.0
    log_bet: tuple[float, ...] = (_LOG_NOTHING,) * len(_ODDS_RATIOS)
    memory_bad: float = 0.0
    memory_total: float = 0.0
    canary: Count = Count(0, 0)
    control: Count = Count(0, 0)
    waiting_windows: int = 0
    waiting_canary: Count = Count(0, 0)
    waiting_control: Count = Count(0, 0)

    def __post_init__(self) -> None:
        assert 0 <= self.margin < 1, self.margin

    @property
    def log_e(self) -> float:
        """Natural logarithm of the e-value, the evidence that canary is worse."""
        return _log_sum((self.log_kept, *self.log_bet))

    def is_worse(self, alpha: float) -> bool:
        """Return whether canary is worse. The false-alarm rate over all time is at most `alpha`."""
        return self.log_e >= -log(alpha)


def observe(test: SequentialTest, canary: Count, control: Count) -> SequentialTest:
    """Return the test after one more window.

    A window in which one arm has no requests is no evidence, but control's requests are remembered.
    """
    windows = test.waiting_windows + 1
    canary, control = test.waiting_canary + canary, test.waiting_control + control
    if control.total >= test.reference_min or windows >= _WAITING_WINDOWS_MAX:
        return _bet(test, canary, control)
    return replace(test, waiting_windows=windows, waiting_canary=canary, waiting_control=control)


def _bet(test: SequentialTest, canary: Count, control: Count) -> SequentialTest:
    """Return the test after a bet on the given counts. Its pool of windows is empty."""
    nothing = Count(0, 0)
    memory_bad, memory_total = _remembered(test.memory_bad, test.memory_total, control)
    if not (canary.total and control.total and test.memory_total >= _MEMORY_REQUESTS_MIN):
        return replace(
            test,
            memory_bad=memory_bad,
            memory_total=memory_total,
            waiting_windows=0,
            waiting_canary=nothing,
            waiting_control=nothing,
        )
    log_kept, log_bet = _stakes(test, canary, control)
    return SequentialTest(
        margin=test.margin,
        reference_min=test.reference_min,
        bets=test.bets + 1,
        log_kept=log_kept,
        log_bet=log_bet,
        memory_bad=memory_bad,
        memory_total=memory_total,
        canary=test.canary + canary,
        control=test.control + control,
    )


def rescaled(test: SequentialTest, past: Count) -> SequentialTest:
    """Return the test after a change of the thresholds that decide which requests are bad.

    Args:
        test: Test. Its stake and its counts do not change.
        past: Control's past counts under the new thresholds.
    """
    test = _bet(test, test.waiting_canary, test.waiting_control)
    memory_bad, memory_total = _remembered(0.0, 0.0, past)
    return replace(test, memory_bad=memory_bad, memory_total=memory_total)


def detectable_rate(test: SequentialTest, alpha: float) -> float | None:
    """Return the lowest rate of canary that this many requests reveal in 19 of 20 cases.

    This is an estimate for display. It treats all windows as one window with the whole first bet.

    Args:
        test: Test with the counts so far. Control's rate is estimated from its memory.
        alpha: False-alarm rate of the test.

    Returns:
        A share in steps of 0.5 %, or None if there are too few requests for any rate.
    """
    canary, control = test.canary.total, test.control.total
    if not canary or not control:
        return None
    known = (test.memory_bad + 0.5) / (test.memory_total + 1)
    theta0 = known + test.margin * (1 - known)
    reference = Count(min(control, round(known * control)), control)
    log_stake = log(_FIRST_BET / len(_ODDS_RATIOS))
    for step in range(1, 201):
        rate = step / 200
        bad = int(rate * canary - _ONE_SIDED_95 * sqrt(rate * (1 - rate) * canary))
        if rate <= theta0 or bad <= 0:
            continue
        logs = tuple(
            log_stake + _log_factor(ratio, theta0, test.margin, Count(bad, canary), reference)
            for ratio in _ODDS_RATIOS
        )
        if _log_sum(logs) >= -log(alpha):
            return rate
    return None


def _stakes(test: SequentialTest, canary: Count, control: Count) -> tuple[float, tuple[float, ...]]:
    """Return two logarithms: of the stake that is not bet, and of the stake on each alternative."""
    part = _FIRST_BET if not test.bets else 1 / (test.bets + _PATIENCE_WINDOWS)
    log_new = test.log_kept + log(part / len(_ODDS_RATIOS))
    known = (test.memory_bad + 0.5) / (test.memory_total + 1)
    theta0 = known + test.margin * (1 - known)
    log_bet = tuple(
        _log_sum((log_old, log_new)) + _log_factor(ratio, theta0, test.margin, canary, control)
        for log_old, ratio in zip(test.log_bet, _ODDS_RATIOS, strict=True)
    )
    return test.log_kept + log1p(-part), log_bet


def _log_factor(
    odds_ratio: float, theta0: float, margin: float, canary: Count, control: Count
) -> float:
    """Return the logarithm of a window's e-value for one alternative."""
    odds = odds_ratio * theta0 / (1 - theta0)
    theta1 = odds / (1 + odds)
    mean = (canary.total * theta1 + control.total * theta0) / (canary.total + control.total)
    bad, good = theta0 / mean, (1 - theta0) / (1 - mean)
    return (
        canary.bad * log(theta1 / mean)
        + (canary.total - canary.bad) * log((1 - theta1) / (1 - mean))
        + control.bad * log(bad)
        + (control.total - control.bad) * log(margin * bad + (1 - margin) * good)
    )


def _remembered(bad: float, total: float, control: Count) -> tuple[float, float]:
    """Return control's bad and total requests in memory, after one more window."""
    bad, total = bad + control.bad, total + control.total
    kept = min(1.0, _MEMORY_REQUESTS_MAX / total) if total else 1.0
    return bad * kept, total * kept


def _log_sum(logs: tuple[float, ...]) -> float:
    largest = max(logs)
    return largest + log(sum(exp(value - largest) for value in logs))
