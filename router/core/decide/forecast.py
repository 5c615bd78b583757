"""Predicts the TTFT of an arriving request for admission, and corrects itself by measured TTFTs.

All inputs are plain numbers. Admission refuses requests whose predicted TTFT exceeds their
deadline. A correction factor covers effects that the model omits. The factor follows the ratio of
measured to predicted waits within bounds.
"""

from dataclasses import dataclass
from math import exp

from router.core.types.request import Request

CORRECTION_MIN = 0.5
CORRECTION_MAX = 8.0
RETRY_AFTER_MIN_S = 0.1
RETRY_AFTER_MAX_S = 30.0
RETRY_AFTER_UNKNOWN_S = 2.0  # retry time without a replica, about the seconds to attach one again
_SMOOTHING = 0.05  # weight of a new observation in the running means
_PRIOR_S = 1.0  # initial mean of predicted and of measured waits, in seconds
_SHARE_MIN = 0.02  # least share of the supply that a prediction assumes for any tier
_ARRIVALS_S = 5.0  # time constant of the arrival rates, in seconds
_HIGHER_TIERS_MAX_S = _ARRIVALS_S  # most seconds that higher tiers add to a wait, see `beside_s`
_ARRIVALS_KNOWN_S = 2.0  # least seconds of observation in a rate, because a burst may fill less
_SIZES = (1.0, 4.0)  # bounds of short, long and very long prompts, as multiples of the mean
_TOP_KEPT_S = 60.0  # seconds for which the highest tier with a request is remembered


@dataclass(frozen=True, slots=True)
class Supply:
    """The capacity of a cell's replicas.

    Attributes:
        replicas: Replicas that are attached and not draining.
        tokens_s: Prompt tokens per second that the replicas can compute beside their present
            decoding.
        backlog_s: Seconds of queued prefill work on the least loaded replica.
        sequences_free: Number of further sequences for which batch slots and KV blocks are free.
        ends_s: Sequences that end per second.
    """

    replicas: int
    tokens_s: float
    backlog_s: float
    sequences_free: int
    ends_s: float


@dataclass(frozen=True, slots=True)
class WorkAhead:
    """The work of a request, and the queued work that is served before the request.

    Attributes:
        requests_ahead: Waiting requests that are served before the request.
        tokens_ahead: Uncached prompt tokens of the requests ahead.
        idle_prefill_s: Seconds of the request's own prefill on an idle replica.
        adapter_s: Seconds until the request's adapter is loaded.
    """

    requests_ahead: int
    tokens_ahead: float
    idle_prefill_s: float
    adapter_s: float = 0.0


NO_SUPPLY = Supply(0, 0.0, 0.0, 0, 0.0)


def queue_wait_s(supply: Supply, requests_ahead: int, tokens_ahead: float) -> float:
    """Return the seconds until a request starts behind the work ahead, or inf without a replica.

    The prefill work ahead must be computed, and enough sequences must end to free batch slots and
    KV blocks. The wait ends when both have happened.
    """
    if not supply.replicas or supply.tokens_s <= 0.0:
        return float("inf")
    prefill_s = supply.backlog_s + tokens_ahead / supply.tokens_s
    lacking = requests_ahead + 1 - supply.sequences_free
    if lacking <= 0 or supply.ends_s <= 0.0:
        return prefill_s
    return max(prefill_s, lacking / supply.ends_s)


def share_left(supply: Supply, requests_s: float, tokens_s: float, reserved: float) -> float:
    """Return the share of the cell's capacity that the higher tiers leave to a tier.

    Args:
        supply: Capacity for all tiers.
        requests_s: Requests per second of the higher tiers.
        tokens_s: Prompt tokens per second of the higher tiers.
        reserved: Share that is reserved for the tier.
    """
    taken = tokens_s / supply.tokens_s if supply.tokens_s > 0.0 else 0.0
    if supply.sequences_free <= 0 and supply.ends_s > 0.0:
        taken = max(taken, requests_s / supply.ends_s)
    return min(1.0, max(1.0 - taken, reserved, _SHARE_MIN))


def beside_s(wait_s: float, share: float, for_s: float) -> float:
    """Return a wait that is prolonged because only `share` of the supply is available.

    The load of the higher tiers is assumed to last for another `for_s` seconds, about as long as
    that load has been observed.
    """
    return min(wait_s / share, wait_s + (1.0 - share) * for_s)


def service_s(supply: Supply, tokens: float) -> float:
    """Return the seconds by which one request lengthens the wait of the requests behind it."""
    if not supply.replicas or supply.tokens_s <= 0.0:
        return 0.0
    prefill = tokens / supply.tokens_s
    if supply.sequences_free > 0 or supply.ends_s <= 0.0:
        return prefill
    return max(prefill, 1 / supply.ends_s)


def bounded_retry_s(wait_s: float) -> float:
    """Return a wait as a Retry-After within bounds, or a default if the wait is infinite."""
    if wait_s == float("inf"):
        return RETRY_AFTER_UNKNOWN_S
    return min(max(wait_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)


class Accuracy:
    """The ratio of the mean measured wait to the mean predicted wait.

    Long waits have more weight in a ratio of means than in a mean of ratios.
    """

    __slots__ = ("_actual_s", "_predicted_s")

    def __init__(self) -> None:
        self._actual_s = self._predicted_s = _PRIOR_S

    def aside(self) -> "Accuracy":
        """Return an independent copy."""
        aside = Accuracy()
        aside._predicted_s, aside._actual_s = self._predicted_s, self._actual_s
        return aside

    def observe(self, predicted_s: float, actual_s: float) -> None:
        """Update the means with one request's uncorrected prediction and measured wait."""
        self._predicted_s += _SMOOTHING * (predicted_s - self._predicted_s)
        self._actual_s += _SMOOTHING * (actual_s - self._actual_s)

    def correction(self) -> float:
        """Return the factor on predictions, between `CORRECTION_MIN` and `CORRECTION_MAX`."""
        if self._predicted_s <= 0.0:
            return CORRECTION_MAX if self._actual_s > 0.0 else 1.0
        ratio = self._actual_s / self._predicted_s
        return min(max(ratio, CORRECTION_MIN), CORRECTION_MAX)


class Arrivals:
    """The recent arrival rates of requests and prompt tokens, by tier."""

    __slots__ = ("_since", "_tiers")

    def __init__(self) -> None:
        self._since: float | None = None  # time of the first arrival
        # Decaying counts of requests and tokens, and the time of the last update, by priority.
        self._tiers: dict[int, tuple[float, float, float]] = {}

    def aside(self) -> "Arrivals":
        """Return an independent copy."""
        aside = Arrivals()
        aside._since, aside._tiers = self._since, dict(self._tiers)
        return aside

    def add(self, priority: int, tokens: int, now: float) -> None:
        """Record an admitted request."""
        if self._since is None:
            self._since = now
        requests, before, at = self._tiers.get(priority, (0.0, 0.0, now))
        kept = exp((at - now) / _ARRIVALS_S)
        self._tiers[priority] = kept * requests + 1.0, kept * before + tokens, now

    def known_s(self, now: float) -> float:
        """Return the seconds of arrivals that the decaying counts represent, below 5 seconds."""
        if self._since is None:
            return 0.0
        return _ARRIVALS_S * (1.0 - exp((self._since - now) / _ARRIVALS_S))

    def above(self, priority: int, now: float) -> tuple[float, float]:
        """Return the requests and tokens per second of all tiers above `priority`."""
        requests = tokens = 0.0
        for tier, (count, size, at) in self._tiers.items():
            if tier > priority:
                kept = exp((at - now) / _ARRIVALS_S)
                requests += kept * count
                tokens += kept * size
        known_s = max(self.known_s(now), _ARRIVALS_KNOWN_S)
        return requests / known_s, tokens / known_s


class Promises:
    """The retry times sent with refusals, spread so that the requests do not all return at once."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        # Time at which all retries promised so far will have been served, by priority.
        self._until: dict[int, float] = {}

    def aside(self) -> "Promises":
        """Return an independent copy."""
        aside = Promises()
        aside._until = dict(self._until)
        return aside

    def retry_after_s(self, priority: int, wait_s: float, service_s: float, now: float) -> float:
        """Return the seconds until a refused request would fit, behind earlier refused requests.

        Args:
            priority: Priority of the request's tier.
            wait_s: Seconds until the request would fit if no other refused request returned.
            service_s: Seconds by which serving the request delays later requests.
            now: Time, in seconds.
        """
        at = max(now + wait_s, self._until.get(priority, 0.0))
        self._until[priority] = min(at + service_s, now + RETRY_AFTER_MAX_S)
        return bounded_retry_s(at - now)


class TimedPrediction:
    """The predicted TTFT of one request, later compared with the measured TTFT.

    Attributes:
        uncorrected_s: Predicted seconds until the request starts, before the correction.
        served_s: Predicted seconds from the start to the first token.
    """

    __slots__ = ("_accuracy", "_wait_s", "served_s", "uncorrected_s")

    def __init__(
        self,
        accuracy: Accuracy,
        uncorrected_s: float,
        served_s: float,
        overdue_s: float = float("inf"),
    ) -> None:
        """Compute the corrected wait.

        After `overdue_s` seconds of waiting, no later request is served before this request.
        """
        self._accuracy = accuracy
        self.uncorrected_s = uncorrected_s
        self.served_s = served_s
        # Later requests may be served before this request, but only until `overdue_s`. The
        # correction factor stands for such requests. So the corrected wait is at most the later of
        # `overdue_s` and the uncorrected wait.
        self._wait_s = min(uncorrected_s * accuracy.correction(), max(uncorrected_s, overdue_s))

    def wait_s(self) -> float:
        """Return the corrected seconds until the request starts, or inf without a replica."""
        return self._wait_s

    def ttft_s(self) -> float:
        """Return the predicted seconds until the first token, or inf without a replica."""
        return self.wait_s() + self.served_s

    def first_token(self, waited_s: float) -> None:
        """Record that the first token arrived after `waited_s` seconds."""
        self._accuracy.observe(self.uncorrected_s, max(0.0, waited_s - self.served_s))

    def expired(self, waited_s: float) -> None:
        """Record a wait without a first token, if the wait already exceeds the prediction."""
        if waited_s > self.uncorrected_s + self.served_s:
            self.first_token(waited_s)


class FirstTokenForecast:
    """The TTFT predictions of one cell, their accuracy, and the promised retry times."""

    __slots__ = ("_accuracies", "_top", "_top_until", "arrivals", "promises")

    def __init__(self) -> None:
        self._accuracies = tuple(Accuracy() for _ in range(len(_SIZES) + 1))
        self.arrivals = Arrivals()
        self.promises = Promises()
        self._top = 0
        self._top_until = float("-inf")

    def aside(self) -> "FirstTokenForecast":
        """Return an independent copy, for hypothetical predictions."""
        aside = FirstTokenForecast()
        aside._accuracies = tuple(it.aside() for it in self._accuracies)
        aside.arrivals = self.arrivals.aside()
        aside.promises = self.promises.aside()
        aside._top, aside._top_until = self._top, self._top_until
        return aside

    def accuracy(self, uncached_tokens: int, mean: float) -> Accuracy:
        """Return the accuracy of predictions for prompts of about this size.

        Each class of sizes has its own accuracy, because the queue serves the shortest prompt
        first, so that later requests overtake mainly long prompts.
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
        """Return the uncorrected seconds until a request starts, given the higher tiers' load.

        Args:
            supply: Capacity of the cell.
            ahead: Requests and prompt tokens that are served before the request.
            priority: Priority of the request's tier.
            reserved_permille: Share that is reserved for the request's tier.
            now: Time, in seconds.
        """
        wait_s = queue_wait_s(supply, *ahead)
        above = self.arrivals.above(priority, now)
        share = share_left(supply, *above, reserved_permille / 1000)
        return beside_s(wait_s, share, self.arrivals.known_s(now))

    def is_surely_in_time(
        self,
        request: Request,
        supply: Supply,
        queued: tuple[int, float],
        idle_prefill_s: float,
        limit_s: float,
        *,
        uncached_mean: float,
        now: float,
    ) -> bool:
        """Return whether a request's TTFT is below a limit even behind the whole queue.

        This bound is cheap to compute, and makes most exact predictions unnecessary.

        Args:
            request: The request.
            supply: Capacity of the cell.
            queued: Waiting requests and their prompt tokens.
            idle_prefill_s: Seconds of the request's own prefill on an idle replica.
            limit_s: Limit of the TTFT in seconds.
            uncached_mean: The cell's mean of uncached prompt tokens.
            now: Time, in seconds.
        """
        correction = self.accuracy(request.uncached_tokens, uncached_mean).correction()
        longest_s = queue_wait_s(supply, *queued) + _HIGHER_TIERS_MAX_S
        if longest_s * correction + idle_prefill_s <= limit_s:
            return True
        longest_s = self.wait_s(
            supply,
            queued,
            priority=request.priority,
            reserved_permille=request.reserved_permille,
            now=now,
        )
        return longest_s * correction + idle_prefill_s <= limit_s

    def predict(
        self,
        request: Request,
        supply: Supply,
        demand: WorkAhead,
        uncached_mean: float,
        now: float,
    ) -> TimedPrediction:
        """Return a request's TTFT prediction, given the cell's mean of uncached prompt tokens."""
        wait_s = self.wait_s(
            supply,
            (demand.requests_ahead, demand.tokens_ahead),
            priority=request.priority,
            reserved_permille=request.reserved_permille,
            now=now,
        )
        accuracy = self.accuracy(request.uncached_tokens, uncached_mean)
        overdue_s = request.overdue_at - request.arrived_at
        return TimedPrediction(
            accuracy, wait_s, demand.idle_prefill_s + demand.adapter_s, overdue_s
        )

    def seen(self, priority: int, now: float) -> None:
        """Record an arrival, which may raise the highest active tier."""
        if priority >= self._top or now >= self._top_until:
            self._top = priority
            self._top_until = now + _TOP_KEPT_S

    def is_top(self, priority: int) -> bool:
        """Return whether no request of a higher tier arrived recently."""
        return priority >= self._top
