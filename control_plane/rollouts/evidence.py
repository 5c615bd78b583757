"""Turns the raw counts of a window into proportions of bad requests for the tests. Pure.

Every metric becomes a share of bad requests, because shares can be tested without assumptions on
distributions. Examples of bad requests are a latency above control's 95 % quantile, and an answer
that is longer than 95 % of control's answers. The quantiles for a window are computed from earlier
windows of control only, so that the tested data do not influence their own thresholds. Each window
is tested with its own thresholds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, takewhile

from control_plane.rollouts.sequential import Count
from sluice.buckets import BUCKETS
from sluice.errors import ErrorCode, ErrorEvidence

_TAIL = 0.05  # largest share of control's values beyond a threshold
# With fewer control requests than the minimum, a quantile is too rough. Above the maximum, all
# counts are halved. So an unusual period of control, for example while engines load weights, soon
# loses its weight.
_BASELINE_MIN = 200
_BASELINE_MAX = 1_000


class Metric(StrEnum):
    """The property of requests that a gate compares between canary and control."""

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


# Number of control's answers up to which consecutive windows are pooled, for properties of answers.
# A window with one answer of canary and two of control has hardly any evidence. Pooling is safe for
# these properties, because incidents do not make answers longer or empty.
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
    """Return the number of control's observations up to which windows are pooled.

    Zero means that windows are not pooled. Windows of golden prompts are always pooled. Replicas
    answer golden prompts one after the other, so a short window may contain only answers of canary.
    """
    if metric is Metric.GOLDEN:
        return 1
    return CONTENT_REFERENCE_MIN if metric in CONTENT else 0


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of values by bucket. The buckets are defined by `sluice.buckets.bucket_of`."""

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
        """Return the count of values above a bucket, with the total of the histogram."""
        return Count(sum(self.counts[bucket + 1 :]), self.total)

    def below(self, bucket: int) -> Count:
        """Return the count of values below a bucket, with the total of the histogram."""
        return Count(sum(self.counts[:bucket]), self.total)


@dataclass(frozen=True, slots=True)
class ScoreEvidence:
    """Likelihoods of one release's answers, from the scores that engines computed in a window.

    Engines score answers only when they have spare time, so some answers are never scored. Only one
    answer per session counts, as for all properties of answers.

    Attributes:
        answers: Number of scored answers.
        base_like: Number of answers to which the base gives the same likelihood as the adapter that
            generated them.
        surprisal_mnats: Histogram of the negative mean log probability of an answer under the base,
            in thousandths of a nat.
        entropy_mnats: Histogram of an answer's mean entropy over the distributions of its tokens,
            in thousandths of a nat.
    """

    answers: int = 0
    base_like: int = 0
    surprisal_mnats: Histogram = Histogram()
    entropy_mnats: Histogram = Histogram()

    @property
    def base_likes(self) -> Count:
        """The count of base-like answers, with the number of scored answers as its total."""
        return Count(self.base_like, self.answers)


@dataclass(frozen=True, slots=True)
class Arm:
    """Outcomes of one release's requests that arrived in a window.

    The count is made when all requests have ended or timed out, since at the window's end only fast
    requests have ended. Requests of pinned tenants are left out, since their release was not chosen
    at random. Only the first request of a session in the window counts. Properties of answers count
    once per session, because the turns of a session are similar and must not be treated as
    independent.

    Attributes:
        requests: Number of requests.
        errors: Requests that ended with an error, by code.
        first_answers: Number of answers that are the first of their session or have no session.
            Refusals, flaws and lengths are counted only on these answers. None means that an older
            telemetry service counted them on all answers.
        refusals: Number of answers in which the model declined the request.
        empty_answers: Number of answers without content.
        repetitive_answers: Number of answers that repeat themselves.
        cut_answers: Number of answers that were truncated at their length limit.
        ttft_ms: TTFT in milliseconds, of the requests with a first token.
        tpot_us: Mean time between the tokens of an answer, one value per answer, because the single
            gaps (ITL) of an answer are not independent observations.
        output_tokens: Output tokens of complete first answers.
        scores: Likelihoods of scored answers.
        golden_runs: Number of golden prompts that were run, not included in `requests`.
        golden_mismatches: Number of golden prompts whose answer differed from the expected answer.
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
        """Number of requests that ended without an error."""
        return self.requests - sum(self.errors.values())

    @property
    def judged(self) -> int:
        """Number of answers whose contents are evaluated."""
        return self.answers if self.first_answers is None else self.first_answers

    @property
    def faults(self) -> Count:
        """The count of failures that the release may have caused, with its requests as the total.

        Client errors (4xx, disconnects) and rejections by policy (429, 503 for limits, overload,
        drain) are left out. They depend on callers and capacity, and not on the release. Client
        errors arrive in bursts, so a single misbehaving client could otherwise cause a rollback.
        """
        bad = sum(
            count for code, count in self.errors.items() if _is_evidence(code, ErrorEvidence.FAULT)
        )
        return Count(bad, self.answers + bad)

    def slow_first_tokens(self, bucket: int) -> Count:
        """Return the first tokens above a bucket, plus the requests that missed the deadline."""
        late = sum(
            count for code, count in self.errors.items() if _is_evidence(code, ErrorEvidence.LATE)
        )
        return self.ttft_ms.above(bucket) + Count(late, late)


@dataclass(frozen=True, slots=True)
class Window:
    """Both arms in one time range. Arms are compared only within the same window.

    Attributes:
        start_ms: Start of the range of arrival times, inclusive, in Unix milliseconds.
        end_ms: End of the range, exclusive, in Unix milliseconds.
        canary: Outcomes of the new release. In a shadow stage, canary answers copies of requests,
            and clients never receive these answers.
        control: Outcomes of the old release.
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
    """Control's recent past, the source of thresholds and of first estimates of control's rates."""

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
    """Buckets beyond which at most 5 % of control's values lie.

    A threshold without enough data is None.
    """

    ttft_ms_high: int | None = None
    tpot_us_high: int | None = None
    output_tokens_high: int | None = None
    output_tokens_low: int | None = None
    surprisal_mnats_high: int | None = None
    entropy_mnats_high: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The counts of two arms in a window. The test decides whether `suspect` has the higher rate.

    For most metrics `suspect` is canary. For `FEWER_REFUSALS` it is control, because there a higher
    refusal rate of control counts against canary.
    """

    suspect: Count
    reference: Count


def remember(baseline: Baseline, control: Arm) -> Baseline:
    """Return the baseline extended by one more window of control."""
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
    """Return the thresholds for the next window.

    A threshold is None if control has too little data.
    """

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
    """Return the past counts of control by metric, without metrics that have no threshold."""
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
    """Return the comparisons in a window by metric, without metrics whose threshold is unknown."""
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
    """Return the lowest bucket above which at most `_TAIL` of the values lie."""
    return BUCKETS - 1 - _tail_buckets(reversed(histogram.counts), histogram.total)


def _low(histogram: Histogram) -> int:
    """Return the highest bucket below which at most `_TAIL` of the values lie."""
    return _tail_buckets(histogram.counts, histogram.total)


def _tail_buckets(counts: Iterable[int], total: int) -> int:
    """Return how many leading buckets together have at most `_TAIL` of the values, never all."""
    within = takewhile(lambda below: below <= _TAIL * total, accumulate(counts))
    return min(sum(1 for _ in within), BUCKETS - 1)


def _is_evidence(code: ErrorCode, evidence: ErrorEvidence) -> bool:
    return code.policy.release is evidence
