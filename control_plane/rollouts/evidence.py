"""Turns raw counts of a window into the proportions that are tested; pure.

Every metric becomes a share of bad requests, because shares can be tested without assumptions on
distributions: a latency "above control's 95 % quantile", an answer "longer than control's". The
quantiles of a window come from earlier windows of control alone, so that the tested data do not
choose their own scale. Each window is a test of its own, whatever its scale.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, takewhile

from control_plane.rollouts.sequential import Count
from sluice.buckets import BUCKETS
from sluice.errors import ErrorCode, ErrorEvidence

_TAIL = 0.05  # share of control beyond a threshold, at most
# A quantile of fewer control requests than this is too rough; more than the second number are
# halved: a bad moment of control, as when engines load their weights beside it, is forgotten soon.
_BASELINE_MIN = 200
_BASELINE_MAX = 1_000


class Metric(StrEnum):
    """The property of requests that a gate compares."""

    ERRORS = "errors"
    SLOW_FIRST_TOKEN = "slow_first_token"  # noqa: S105 - no secret
    SLOW_TOKENS = "slow_tokens"
    LONG_ANSWERS = "long_answers"
    SHORT_ANSWERS = "short_answers"
    REFUSALS = "refusals"
    FEWER_REFUSALS = "fewer_refusals"
    EMPTY_ANSWERS = "empty_answers"
    REPETITIVE_ANSWERS = "repetitive_answers"
    CUT_ANSWERS = "cut_answers"
    BASE_LIKE_ANSWERS = "base_like_answers"
    UNLIKELY_ANSWERS = "unlikely_answers"
    UNSURE_ANSWERS = "unsure_answers"
    GOLDEN = "golden"


# For properties of answers: no incident makes answers longer or empty, so windows are compared
# together until control has so many. With one of canary beside two of control a window says little.
CONTENT_REFERENCE_MIN = 32
CONTENT = frozenset(
    {
        Metric.LONG_ANSWERS,
        Metric.SHORT_ANSWERS,
        Metric.REFUSALS,
        Metric.FEWER_REFUSALS,
        Metric.EMPTY_ANSWERS,
        Metric.REPETITIVE_ANSWERS,
        Metric.CUT_ANSWERS,
        Metric.BASE_LIKE_ANSWERS,
        Metric.UNLIKELY_ANSWERS,
        Metric.UNSURE_ANSWERS,
    }
)


def reference_min(metric: Metric) -> int:
    """Return the number of control's observations until which windows are put together; 0: none.

    Replicas answer golden prompts one after the other: a short window may have canary's alone.
    """
    if metric is Metric.GOLDEN:
        return 1
    return CONTENT_REFERENCE_MIN if metric in CONTENT else 0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values by bucket, see `sluice.buckets.bucket_of`."""

    counts: tuple[int, ...] = (0,) * BUCKETS

    def __post_init__(self) -> None:
        assert len(self.counts) == BUCKETS, len(self.counts)

    def __add__(self, other: "Histogram") -> "Histogram":
        return Histogram(tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    @property
    def total(self) -> int:
        """Number of values."""
        return sum(self.counts)

    def above(self, bucket: int) -> Count:
        """Return the number of values in higher buckets."""
        return Count(sum(self.counts[bucket + 1 :]), self.total)

    def below(self, bucket: int) -> Count:
        """Return the number of values in lower buckets."""
        return Count(sum(self.counts[:bucket]), self.total)


@dataclass(frozen=True, slots=True)
class ScoreEvidence:
    """Likelihoods of one release's answers, by scores that were *made* in a window.

    Engines score answers when they have time, and some never do. Only one answer per session
    counts, as for all properties of answers.

    Attributes:
        answers: Answers that were scored.
        base_like: Answers that the base finds as likely as the adapter that made them.
        surprisal_mnats: Minus the mean log probability of answers for the base, in thousandths of a
            nat.
        entropy_mnats: Mean entropy of the distributions that their tokens were drawn from, in
            thousandths of a nat.
    """

    answers: int = 0
    base_like: int = 0
    surprisal_mnats: Histogram = Histogram()
    entropy_mnats: Histogram = Histogram()

    @property
    def base_likes(self) -> Count:
        """Scored answers that are as likely under the base as under the adapter, of all."""
        return Count(self.base_like, self.answers)


@dataclass(frozen=True, slots=True)
class Arm:
    """Outcomes of one release's requests that were *received* in a window.

    Counted when all of them have ended or timed out: by the end of the window only the quick ones
    have. Requests of pinned tenants are left out, since they were not assigned at random. Of each
    session only the first request in the window counts. Properties of answers count once per
    session: its turns are alike, and counting them as independent ones would be wrong.

    Attributes:
        requests: All requests.
        errors: Requests that ended with an error, by code.
        first_answers: Answers that are the first of their session, and those without a session:
            refusals, flaws and lengths are of these. None: of all answers, as an older telemetry
            service counts them.
        refusals: Answers in which the model declined.
        empty_answers: Answers without content.
        repetitive_answers: Answers that repeat themselves.
        cut_answers: Answers that were cut at the limit of their length.
        ttft_ms: TTFT in milliseconds, of requests that got a first token.
        tpot_us: Mean time between tokens of an answer, one value each: the single gaps (ITL) of an
            answer are no independent observations.
        output_tokens: Output tokens of complete first answers.
        scores: Likelihoods of scored answers.
        golden_runs: Runs of golden prompts; they are not among `requests`.
        golden_mismatches: Golden runs with another answer than the expected one.
    """

    requests: int = 0
    errors: Mapping[ErrorCode, int] = field(default_factory=dict[ErrorCode, int])
    first_answers: int | None = None
    refusals: int = 0
    empty_answers: int = 0
    repetitive_answers: int = 0
    cut_answers: int = 0
    ttft_ms: Histogram = Histogram()
    tpot_us: Histogram = Histogram()
    output_tokens: Histogram = Histogram()
    scores: ScoreEvidence = ScoreEvidence()
    golden_runs: int = 0
    golden_mismatches: int = 0

    def __post_init__(self) -> None:
        flaws = (self.refusals, self.empty_answers, self.repetitive_answers, self.cut_answers)
        assert min(flaws) >= 0, flaws
        assert max(flaws) <= self.judged <= self.answers, (flaws, self.judged, self.answers)

    @property
    def answers(self) -> int:
        """Requests that ended without an error."""
        return self.requests - sum(self.errors.values())

    @property
    def judged(self) -> int:
        """Answers whose contents are evaluated."""
        return self.answers if self.first_answers is None else self.first_answers

    @property
    def faults(self) -> Count:
        """Failures that the release may have caused, of the requests that it had to answer.

        Errors of clients (4xx, hang-ups) and refusals by policy (429, 503: limits, overload, drain)
        are neither good nor bad and left out. They depend on callers and capacity, come in bursts,
        and would let one misbehaving client roll a release back.
        """
        bad = sum(
            count for code, count in self.errors.items() if _is_evidence(code, ErrorEvidence.FAULT)
        )
        return Count(bad, self.answers + bad)

    def slow_first_tokens(self, bucket: int) -> Count:
        """Return the first tokens in higher buckets, with requests that missed the deadline."""
        late = sum(
            count for code, count in self.errors.items() if _is_evidence(code, ErrorEvidence.LATE)
        )
        return self.ttft_ms.above(bucket) + Count(late, late)


@dataclass(frozen=True, slots=True)
class Window:
    """Both arms in one stretch of time; they are compared only within it.

    Attributes:
        start_ms: Unix time in milliseconds, inclusive, of the requests' arrivals.
        end_ms: Unix time in milliseconds, exclusive.
        canary: New release. In a shadow stage: copies, whose answers no client gets.
        control: Old release.
    """

    start_ms: int
    end_ms: int
    canary: Arm
    control: Arm

    def __post_init__(self) -> None:
        assert self.start_ms < self.end_ms, (self.start_ms, self.end_ms)


def _no_count() -> Count:
    return Count(0, 0)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Control's recent past: the source of thresholds, and of the first estimate of its rates."""

    ttft_ms: Histogram = Histogram()
    tpot_us: Histogram = Histogram()
    output_tokens: Histogram = Histogram()
    surprisal_mnats: Histogram = Histogram()
    entropy_mnats: Histogram = Histogram()
    faults: Count = field(default_factory=_no_count)
    refusals: Count = field(default_factory=_no_count)
    empty_answers: Count = field(default_factory=_no_count)
    repetitive_answers: Count = field(default_factory=_no_count)
    cut_answers: Count = field(default_factory=_no_count)
    base_like_answers: Count = field(default_factory=_no_count)
    golden: Count = field(default_factory=_no_count)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Buckets with at most 5 % of control's values beyond them; None: unknown."""

    ttft_ms_high: int | None = None
    tpot_us_high: int | None = None
    output_tokens_high: int | None = None
    output_tokens_low: int | None = None
    surprisal_mnats_high: int | None = None
    entropy_mnats_high: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two counts of a window; the test asks whether `suspect` has the higher rate.

    For most metrics `suspect` is canary; for `FEWER_REFUSALS` it is control, which then refuses
    more.
    """

    suspect: Count
    reference: Count


def remember(baseline: Baseline, control: Arm) -> Baseline:
    """Return the baseline with one more window of control."""
    return Baseline(
        _recent(baseline.ttft_ms + control.ttft_ms),
        _recent(baseline.tpot_us + control.tpot_us),
        _recent(baseline.output_tokens + control.output_tokens),
        _recent(baseline.surprisal_mnats + control.scores.surprisal_mnats),
        _recent(baseline.entropy_mnats + control.scores.entropy_mnats),
        _recent_count(baseline.faults + control.faults),
        _recent_count(baseline.refusals + _refusals(control)),
        _recent_count(baseline.empty_answers + _empty(control)),
        _recent_count(baseline.repetitive_answers + _repetitive(control)),
        _recent_count(baseline.cut_answers + _cut(control)),
        _recent_count(baseline.base_like_answers + control.scores.base_likes),
        _recent_count(baseline.golden + _golden(control)),
    )


def scale(baseline: Baseline) -> Thresholds:
    """Return the thresholds for the next window, where control has enough data."""

    def chosen(histogram: Histogram, *, is_low: bool = False) -> int | None:
        if histogram.total < _BASELINE_MIN:
            return None
        return _low(histogram) if is_low else _high(histogram)

    lengths = baseline.output_tokens
    return Thresholds(
        chosen(baseline.ttft_ms),
        chosen(baseline.tpot_us),
        chosen(lengths),
        chosen(lengths, is_low=True),
        chosen(baseline.surprisal_mnats),
        chosen(baseline.entropy_mnats),
    )


def known(baseline: Baseline, thresholds: Thresholds) -> dict[Metric, Count]:
    """Return the past counts of control; thresholds for canary are not among them."""
    ttft, tpot = thresholds.ttft_ms_high, thresholds.tpot_us_high
    high, low = thresholds.output_tokens_high, thresholds.output_tokens_low
    unlikely, unsure = thresholds.surprisal_mnats_high, thresholds.entropy_mnats_high
    counts = {
        Metric.ERRORS: baseline.faults,
        Metric.REFUSALS: baseline.refusals,
        Metric.EMPTY_ANSWERS: baseline.empty_answers,
        Metric.REPETITIVE_ANSWERS: baseline.repetitive_answers,
        Metric.CUT_ANSWERS: baseline.cut_answers,
        Metric.BASE_LIKE_ANSWERS: baseline.base_like_answers,
        Metric.GOLDEN: baseline.golden,
        Metric.SLOW_FIRST_TOKEN: _above(baseline.ttft_ms, ttft),
        Metric.SLOW_TOKENS: _above(baseline.tpot_us, tpot),
        Metric.LONG_ANSWERS: _above(baseline.output_tokens, high),
        Metric.SHORT_ANSWERS: None if low is None else baseline.output_tokens.below(low),
        Metric.UNLIKELY_ANSWERS: _above(baseline.surprisal_mnats, unlikely),
        Metric.UNSURE_ANSWERS: _above(baseline.entropy_mnats, unsure),
    }
    return {metric: count for metric, count in counts.items() if count is not None}


def comparisons(window: Window, thresholds: Thresholds) -> dict[Metric, Comparison]:
    """Return the comparisons in a window by metric, without those whose threshold is unknown."""
    canary, control = window.canary, window.control
    found = {
        Metric.ERRORS: Comparison(canary.faults, control.faults),
        Metric.REFUSALS: Comparison(_refusals(canary), _refusals(control)),
        Metric.FEWER_REFUSALS: Comparison(_refusals(control), _refusals(canary)),
        Metric.EMPTY_ANSWERS: Comparison(_empty(canary), _empty(control)),
        Metric.REPETITIVE_ANSWERS: Comparison(_repetitive(canary), _repetitive(control)),
        Metric.CUT_ANSWERS: Comparison(_cut(canary), _cut(control)),
        Metric.BASE_LIKE_ANSWERS: Comparison(canary.scores.base_likes, control.scores.base_likes),
        Metric.GOLDEN: Comparison(_golden(canary), _golden(control)),
    }
    if (bucket := thresholds.ttft_ms_high) is not None:
        found[Metric.SLOW_FIRST_TOKEN] = Comparison(
            canary.slow_first_tokens(bucket), control.slow_first_tokens(bucket)
        )
    if (bucket := thresholds.tpot_us_high) is not None:
        found[Metric.SLOW_TOKENS] = Comparison(
            canary.tpot_us.above(bucket), control.tpot_us.above(bucket)
        )
    if (bucket := thresholds.output_tokens_high) is not None:
        found[Metric.LONG_ANSWERS] = Comparison(
            canary.output_tokens.above(bucket), control.output_tokens.above(bucket)
        )
    if (bucket := thresholds.output_tokens_low) is not None:
        found[Metric.SHORT_ANSWERS] = Comparison(
            canary.output_tokens.below(bucket), control.output_tokens.below(bucket)
        )
    if (bucket := thresholds.surprisal_mnats_high) is not None:
        found[Metric.UNLIKELY_ANSWERS] = Comparison(
            canary.scores.surprisal_mnats.above(bucket),
            control.scores.surprisal_mnats.above(bucket),
        )
    if (bucket := thresholds.entropy_mnats_high) is not None:
        found[Metric.UNSURE_ANSWERS] = Comparison(
            canary.scores.entropy_mnats.above(bucket), control.scores.entropy_mnats.above(bucket)
        )
    return found


def _above(histogram: Histogram, bucket: int | None) -> Count | None:
    return None if bucket is None else histogram.above(bucket)


def _refusals(arm: Arm) -> Count:
    return Count(arm.refusals, arm.judged)


def _empty(arm: Arm) -> Count:
    return Count(arm.empty_answers, arm.judged)


def _repetitive(arm: Arm) -> Count:
    return Count(arm.repetitive_answers, arm.judged)


def _cut(arm: Arm) -> Count:
    return Count(arm.cut_answers, arm.judged)


def _golden(arm: Arm) -> Count:
    return Count(arm.golden_mismatches, arm.golden_runs)


def _recent(histogram: Histogram) -> Histogram:
    if histogram.total <= _BASELINE_MAX:
        return histogram
    return Histogram(tuple(count // 2 for count in histogram.counts))


def _recent_count(count: Count) -> Count:
    return count if count.total <= _BASELINE_MAX else Count(count.bad // 2, count.total // 2)


def _high(histogram: Histogram) -> int:
    """Return the lowest bucket with at most `_TAIL` of the values above it."""
    return BUCKETS - 1 - _tail_buckets(reversed(histogram.counts), histogram.total)


def _low(histogram: Histogram) -> int:
    """Return the highest bucket with at most `_TAIL` of the values below it."""
    return _tail_buckets(histogram.counts, histogram.total)


def _tail_buckets(counts: Iterable[int], total: int) -> int:
    """Return how many of the first buckets hold at most `_TAIL` of the values; one is left out."""
    within = takewhile(lambda below: below <= _TAIL * total, accumulate(counts))
    return min(sum(1 for _ in within), BUCKETS - 1)


def _is_evidence(code: ErrorCode, evidence: ErrorEvidence) -> bool:
    return code.policy.release is evidence
