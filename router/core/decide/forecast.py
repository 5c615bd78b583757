"""Predicts the TTFT of a request that came now, for admission, and learns from the real one.

Every input is a plain number. A prediction decides whether a request is refused at once. Its
unknown part is left to a correction factor, which follows the real times within bounds.
"""

from dataclasses import dataclass
from math import exp

from router.core.types.request import Request

CORRECTION_MIN = 0.5
CORRECTION_MAX = 8.0
RETRY_AFTER_MIN_S = 0.1
RETRY_AFTER_MAX_S = 30.0
RETRY_AFTER_UNKNOWN_S = 2.0  # nothing is attached: about the time a replica takes to come back
_SMOOTHING = 0.05  # weight of a new error
_PRIOR_S = 1.0  # waits that the first errors are weighed against
_SHARE_MIN = 0.02  # of what higher tiers leave
_ARRIVALS_S = 5.0  # horizon of what is known of arrivals
HIGHER_TIERS_MAX_S = _ARRIVALS_S  # recent arrivals add no more to a wait; see `beside_s`
_ARRIVALS_KNOWN_S = 2.0  # less is no rate but a burst
_SIZES = (1.0, 4.0)  # of prompts, in means: short, long, very long
_TOP_KEPT_S = 60.0  # the highest tier is the highest one seen in this time


@dataclass(frozen=True, slots=True)
class Supply:
    """The capacity of a cell's replicas.

    Attributes:
        replicas: Replicas that are attached and not draining.
        tokens_s: Prompt tokens per second that the replicas can compute beside their present
            decoding.
        backlog_s: Seconds of prefill owed by the replica with the least.
        sequences_free: Free places for sequences, with KV blocks.
        ends_s: Sequences that end per second.
    """

    replicas: int
    tokens_s: float
    backlog_s: float
    sequences_free: int
    ends_s: float


@dataclass(frozen=True, slots=True)
class WorkAhead:
    """A request, and the work served before it.

    Attributes:
        requests_ahead: Waiting requests that are served before it.
        tokens_ahead: Prompt tokens that have to be computed for them.
        prefill_s: Seconds of the request's own prefill, on an idle replica.
        adapter_s: Seconds until its adapter is loaded.
    """

    requests_ahead: int
    tokens_ahead: float
    prefill_s: float
    adapter_s: float = 0.0


NO_SUPPLY = Supply(0, 0.0, 0.0, 0, 0.0)


def queue_wait_s(supply: Supply, requests_ahead: int, tokens_ahead: float) -> float:
    """Return the time until a request with so much work ahead starts; inf: no replica serves.

    Prefill and places are used at the same time, so the scarcer of the two decides.
    """
    if not supply.replicas or supply.tokens_s <= 0.0:
        return float("inf")
    prefill_s = supply.backlog_s + tokens_ahead / supply.tokens_s
    lacking = requests_ahead + 1 - supply.sequences_free
    if lacking <= 0 or supply.ends_s <= 0.0:
        return prefill_s
    return max(prefill_s, lacking / supply.ends_s)


def share_left(supply: Supply, requests_s: float, tokens_s: float, reserved: float) -> float:
    """Return the share of a supply that higher tiers leave.

    Args:
        supply: Capacity for all tiers.
        requests_s: Requests per second of the higher tiers.
        tokens_s: Prompt tokens per second of the higher tiers.
        reserved: Least share of the tier.
    """
    taken = tokens_s / supply.tokens_s if supply.tokens_s > 0.0 else 0.0
    if supply.sequences_free <= 0 and supply.ends_s > 0.0:
        taken = max(taken, requests_s / supply.ends_s)
    return min(1.0, max(1.0 - taken, reserved, _SHARE_MIN))


def beside_s(wait_s: float, share: float, for_s: float) -> float:
    """Return a wait with only a share of the supply, for `for_s` at most.

    A present load is assumed to last as long as it has lasted, and not for ever.
    """
    return min(wait_s / share, wait_s + (1.0 - share) * for_s)


def service_s(supply: Supply, tokens: float) -> float:
    """Return by how much a request lengthens the wait of those behind it."""
    if not supply.replicas or supply.tokens_s <= 0.0:
        return 0.0
    prefill = tokens / supply.tokens_s
    if supply.sequences_free > 0 or supply.ends_s <= 0.0:
        return prefill
    return max(prefill, 1 / supply.ends_s)


def bounded_retry_s(wait_s: float) -> float:
    """Return a wait as a Retry-After; one of inf is not known."""
    if wait_s == float("inf"):
        return RETRY_AFTER_UNKNOWN_S
    return min(max(wait_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)


class Accuracy:
    """The error of predictions as a ratio of means, so that long waits count for more."""

    __slots__ = ("_actual_s", "_predicted_s")

    def __init__(self) -> None:
        self._actual_s = self._predicted_s = _PRIOR_S

    def aside(self) -> "Accuracy":
        """Return a copy that learns for itself."""
        aside = Accuracy()
        aside._predicted_s, aside._actual_s = self._predicted_s, self._actual_s
        return aside

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Learn from one request; `predicted_s` as it was before the correction."""
        self._predicted_s += _SMOOTHING * (predicted_s - self._predicted_s)
        self._actual_s += _SMOOTHING * (actual_s - self._actual_s)

    def correction(self) -> float:
        """Return the factor on predictions, between `CORRECTION_MIN` and `CORRECTION_MAX`."""
        if self._predicted_s <= 0.0:
            return CORRECTION_MAX if self._actual_s > 0.0 else 1.0
        ratio = self._actual_s / self._predicted_s
        return min(max(ratio, CORRECTION_MIN), CORRECTION_MAX)


class Arrivals:
    """The recent arrivals, by tier."""

    __slots__ = ("_since", "_tiers")

    def __init__(self) -> None:
        self._since: float | None = None  # when the first one came
        self._tiers: dict[int, tuple[float, float, float]] = {}  # requests, tokens, when

    def aside(self) -> "Arrivals":
        """Return a copy that counts for itself."""
        aside = Arrivals()
        aside._since, aside._tiers = self._since, dict(self._tiers)
        return aside

    def add(self, priority: int, tokens: int, now: float) -> None:
        """Note an admitted request."""
        if self._since is None:
            self._since = now
        requests, before, at = self._tiers.get(priority, (0.0, 0.0, now))
        kept = exp((at - now) / _ARRIVALS_S)
        self._tiers[priority] = kept * requests + 1.0, kept * before + tokens, now

    def known_s(self, now: float) -> float:
        """Return for how long arrivals are known, up to the horizon."""
        if self._since is None:
            return 0.0
        return _ARRIVALS_S * (1.0 - exp((self._since - now) / _ARRIVALS_S))

    def above(self, priority: int, now: float) -> tuple[float, float]:
        """Return requests and tokens per second of the tiers above one."""
        requests = tokens = 0.0
        for tier, (count, size, at) in self._tiers.items():
            if tier > priority:
                kept = exp((at - now) / _ARRIVALS_S)
                requests += kept * count
                tokens += kept * size
        known_s = max(self.known_s(now), _ARRIVALS_KNOWN_S)
        return requests / known_s, tokens / known_s


class Promises:
    """Retry times given to refused requests, spread so that they do not all return at once."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # by tier: promised requests are served until then

    def aside(self) -> "Promises":
        """Return a copy that promises for itself."""
        aside = Promises()
        aside._until = dict(self._until)
        return aside

    def retry_after_s(self, priority: int, wait_s: float, service_s: float, now: float) -> float:
        """Return the time after which one more request fits, behind those refused before.

        Args:
            priority: Tier of the request.
            wait_s: Seconds until it would fit, without other refused clients.
            service_s: Seconds by which its own service delays others.
            now: Time.
        """
        at = max(now + wait_s, self._until.get(priority, 0.0))
        self._until[priority] = min(at + service_s, now + RETRY_AFTER_MAX_S)
        return bounded_retry_s(at - now)


class TimedPrediction:
    """The predicted TTFT of one request; learns once from the real one.

    Attributes:
        uncorrected_s: Seconds until the request is started, before the correction.
        served_s: Seconds from then on to the first token.
    """

    __slots__ = ("_accuracy", "_wait_s", "served_s", "uncorrected_s")

    def __init__(
        self,
        accuracy: Accuracy,
        uncorrected_s: float,
        served_s: float,
        overdue_s: float = float("inf"),
    ) -> None:
        """Predict; after `overdue_s` no request overtakes this one."""
        self._accuracy = accuracy
        self.uncorrected_s = uncorrected_s
        self.served_s = served_s
        # The work ahead now is served in any case; work that overtakes it does so for a time only.
        self._wait_s = min(uncorrected_s * accuracy.correction(), max(uncorrected_s, overdue_s))

    def wait_s(self) -> float:
        """Return the corrected time until it is started; inf: no replica serves."""
        return self._wait_s

    def ttft_s(self) -> float:
        """Return the time until the first token; inf: no replica serves."""
        return self.wait_s() + self.served_s

    def first_token(self, waited_s: float) -> None:
        """Learn from the first token."""
        self._accuracy.observe(self.uncorrected_s, max(0.0, waited_s - self.served_s))

    def expired(self, waited_s: float) -> None:
        """Learn from a request that had none by now: it took longer than this."""
        if waited_s > self.uncorrected_s + self.served_s:
            self.first_token(waited_s)


class FirstTokenForecast:
    """One cell's predictions, their accuracy, and the promised retry times."""

    __slots__ = ("_accuracies", "_top", "_top_until", "arrivals", "promises")

    def __init__(self) -> None:
        self._accuracies = tuple(Accuracy() for _ in range(len(_SIZES) + 1))
        self.arrivals = Arrivals()
        self.promises = Promises()
        self._top = 0
        self._top_until = float("-inf")

    def aside(self) -> "FirstTokenForecast":
        """Return a copy that learns and promises for itself."""
        aside = FirstTokenForecast()
        aside._accuracies = tuple(it.aside() for it in self._accuracies)
        aside.arrivals = self.arrivals.aside()
        aside.promises = self.promises.aside()
        aside._top, aside._top_until = self._top, self._top_until
        return aside

    def accuracy(self, uncached_tokens: int, mean: float) -> Accuracy:
        """Return the accuracy of predictions for prompts of a size.

        With shortest first, later requests overtake only long ones, so each size has its own.
        """
        size = sum(uncached_tokens > factor * mean for factor in _SIZES)
        return self._accuracies[size]

    def wait_s(
        self,
        supply: Supply,
        ahead: tuple[int, float],
        *,
        priority: int,
        reserved_permille: int,
        now: float,
    ) -> float:
        """Return the uncorrected seconds until a request is started, beside higher tiers.

        Args:
            supply: Capacity of the cell.
            ahead: Requests and prompt tokens that are served before the request.
            priority: Priority of the request's tier.
            reserved_permille: Share that its tier gets at least.
            now: Time, in seconds.
        """
        wait_s = queue_wait_s(supply, *ahead)
        above = self.arrivals.above(priority, now)
        share = share_left(supply, *above, reserved_permille / 1000)
        return beside_s(wait_s, share, self.arrivals.known_s(now))

    def predict(
        self,
        request: Request,
        supply: Supply,
        demand: WorkAhead,
        uncached_mean: float,
        now: float,
    ) -> TimedPrediction:
        """Return the predicted first token of a request; `uncached_mean` is that of its cell."""
        wait_s = self.wait_s(
            supply,
            (demand.requests_ahead, demand.tokens_ahead),
            priority=request.priority,
            reserved_permille=request.reserved_permille,
            now=now,
        )
        accuracy = self.accuracy(request.uncached_tokens, uncached_mean)
        overdue_s = request.overdue_at - request.arrived_at
        return TimedPrediction(accuracy, wait_s, demand.prefill_s + demand.adapter_s, overdue_s)

    def seen(self, priority: int, now: float) -> None:
        """Note that a tier has work."""
        if priority >= self._top or now >= self._top_until:
            self._top = priority
            self._top_until = now + _TOP_KEPT_S

    def is_top(self, priority: int) -> bool:
        """Return whether no higher tier had any work recently."""
        return priority >= self._top
