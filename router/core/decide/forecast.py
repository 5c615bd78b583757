"""When a request that came now would have its first token: predicted, and corrected by experience.

Plain numbers in, plain numbers out; `supply_of` and `demand_of` read them off a cell. A prediction
decides whether a request is refused at once, so what it does not know it leaves to the correction,
which follows what really happened and stays within bounds.
"""

from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING

from router.core.fleet.health import HealthState
from router.core.types.model import Role

if TYPE_CHECKING:
    from router.core.cell import CellBook
    from router.core.types.model import Request

CORRECTION_MIN = 0.5
CORRECTION_MAX = 8.0
RETRY_AFTER_MIN_S = 0.1
RETRY_AFTER_MAX_S = 30.0
RETRY_AFTER_UNKNOWN_S = 2.0  # nothing is attached: about the time a replica takes to come back
_SMOOTHING = 0.05  # weight of a new error
_PRIOR_S = 1.0  # waits that the first errors are weighed against
# A walk over all replicas takes microseconds for each of them. The more there are, the less one
# dispatch changes of what all can do.
_SUPPLY_KEPT_S = 0.01
_SUPPLY_KEPT_PER_REPLICA_S = 0.0005
_RUNS_KEPT_S = 0.05
_SHARE_MIN = 0.02  # of what higher tiers leave
_ARRIVALS_S = 5.0  # horizon of what is known of arrivals
HIGHER_TIERS_MAX_S = _ARRIVALS_S  # what has come of late adds no more to a wait; see `beside_s`
_ARRIVALS_KNOWN_S = 2.0  # less is no rate but a burst
_SIZES = (1.0, 4.0)  # of prompts, in means: short, long, very long
_TOP_KEPT_S = 60.0  # the highest tier is the highest one seen in this time


@dataclass(frozen=True, slots=True)
class Supply:
    """What the replicas of a cell can do.

    Attributes:
        replicas: Attached and not draining.
        tokens_s: Prompt tokens that they compute per second, decoding what they decode now.
        backlog_s: Prefill that is owed where least is owed.
        sequences_free: Further sequences for which there are places and KV blocks.
        ends_s: Sequences that end per second.
    """

    replicas: int
    tokens_s: float
    backlog_s: float
    sequences_free: int
    ends_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """A request and what is served before it.

    Attributes:
        requests_ahead: Waiting requests that are served before it.
        tokens_ahead: Prompt tokens that have to be computed for them.
        prefill_s: Its own prefill, on a replica that does nothing else.
        adapter_s: Until its adapter is in a slot.
    """

    requests_ahead: int
    tokens_ahead: float
    prefill_s: float
    adapter_s: float = 0.0


NO_SUPPLY = Supply(0, 0.0, 0.0, 0, 0.0)


def queue_s(supply: Supply, requests_ahead: int, tokens_ahead: float) -> float:
    """Return the time until a request with so much before it is started; inf: nobody serves.

    Prefill and places are used up at the same time, so the scarcer of the two decides.
    """
    if not supply.replicas or supply.tokens_s <= 0.0:
        return float("inf")
    prefill_s = supply.backlog_s + tokens_ahead / supply.tokens_s
    lacking = requests_ahead + 1 - supply.sequences_free
    if lacking <= 0 or supply.ends_s <= 0.0:
        return prefill_s
    return max(prefill_s, lacking / supply.ends_s)


def share_left(supply: Supply, requests_s: float, tokens_s: float, reserved: float) -> float:
    """Return the share of a supply that is left beside higher tiers.

    Args:
        supply: Of all tiers.
        requests_s: Requests per second that go first whenever they come.
        tokens_s: Prompt tokens per second of these.
        reserved: What the tier gets at least.
    """
    taken = tokens_s / supply.tokens_s if supply.tokens_s > 0.0 else 0.0
    if supply.sequences_free <= 0 and supply.ends_s > 0.0:
        taken = max(taken, requests_s / supply.ends_s)
    return min(1.0, max(1.0 - taken, reserved, _SHARE_MIN))


def beside_s(wait_s: float, share: float, for_s: float) -> float:
    """Return a wait during which only a share of the supply is to be had, for so long at most.

    What has come for some seconds is taken to go on for as long, and not for ever.
    """
    return min(wait_s / share, wait_s + (1.0 - share) * for_s)


def service_s(supply: Supply, tokens: float) -> float:
    """Return by how much a request makes the wait of those behind it longer."""
    if not supply.replicas or supply.tokens_s <= 0.0:
        return 0.0
    prefill = tokens / supply.tokens_s
    if supply.sequences_free > 0 or supply.ends_s <= 0.0:
        return prefill
    return max(prefill, 1 / supply.ends_s)


def bounded_retry_s(wait_s: float) -> float:
    """Return a wait as it may be told in a Retry-After; one of inf is not known."""
    if wait_s == float("inf"):
        return RETRY_AFTER_UNKNOWN_S
    return min(max(wait_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)


class Accuracy:
    """How far predictions were off; ratio of means, so that long waits count for more."""

    __slots__ = ("_actual_s", "_predicted_s")

    def __init__(self) -> None:
        self._actual_s = self._predicted_s = _PRIOR_S

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
    """How much has come of late, by tier."""

    __slots__ = ("_since", "_tiers")

    def __init__(self) -> None:
        self._since: float | None = None  # when the first one came
        self._tiers: dict[int, tuple[float, float, float]] = {}  # requests, tokens, when

    def add(self, priority: int, tokens: int, now: float) -> None:
        """Note a request that was let in."""
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
    """Times that refused requests were told, so that they do not all come back at the same one."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # by tier: what was promised is served until then

    def retry_after_s(self, priority: int, wait_s: float, service_s: float, now: float) -> float:
        """Return the time after which one more request fits, behind those that were refused before.

        Args:
            priority: Tier of the request.
            wait_s: Until it would fit if nobody else were waiting outside.
            service_s: Time that its own service takes from the others.
            now: Time.
        """
        at = max(now + wait_s, self._until.get(priority, 0.0))
        self._until[priority] = min(at + service_s, now + RETRY_AFTER_MAX_S)
        return bounded_retry_s(at - now)


class Prediction:
    """What was predicted for one request; told what became of it, once.

    Attributes:
        queue_s: Until it is started, before the correction.
        own_s: From then on.
    """

    __slots__ = ("_accuracy", "_wait_s", "own_s", "queue_s")

    def __init__(
        self, accuracy: Accuracy, queue_s: float, own_s: float, overdue_s: float = float("inf")
    ) -> None:
        """Predict with what is known now; after `overdue_s` nobody overtakes the request."""
        self._accuracy = accuracy
        self.queue_s = queue_s
        self.own_s = own_s
        # What is before it now is served whatever comes; what overtakes it does so for a time.
        self._wait_s = min(queue_s * accuracy.correction(), max(queue_s, overdue_s))

    def wait_s(self) -> float:
        """Return the time until it is started, corrected by what was known; inf: nobody serves."""
        return self._wait_s

    def ttft_s(self) -> float:
        """Return the time until the first token; inf: nobody serves."""
        return self.wait_s() + self.own_s

    def first_token(self, waited_s: float) -> None:
        """Learn from the first token."""
        self._accuracy.observe(self.queue_s, max(0.0, waited_s - self.own_s))

    def expired(self, waited_s: float) -> None:
        """Learn from a request that had none by now: it took longer than this."""
        if waited_s > self.queue_s + self.own_s:
            self.first_token(waited_s)


class Forecast:
    """One cell's predictions, what they turned out to be worth, and what was promised by them."""

    __slots__ = (
        *("_below", "_below_of", "_below_until", "_supply", "_supply_until", "_top", "_top_until"),
        *("_accuracies", "arrivals", "promises"),
    )

    def __init__(self) -> None:
        self._accuracies = tuple(Accuracy() for _ in range(len(_SIZES) + 1))
        self.arrivals = Arrivals()
        self.promises = Promises()
        self._supply = NO_SUPPLY
        self._supply_until = float("-inf")
        self._top = 0
        self._top_until = float("-inf")
        self._below = False
        self._below_of = 0
        self._below_until = float("-inf")

    def accuracy(self, uncached_tokens: int, mean: float) -> Accuracy:
        """Return what is known about predictions for prompts of a size.

        Shortest first lets what comes later overtake the long ones, and only them.
        """
        size = sum(uncached_tokens > factor * mean for factor in _SIZES)
        return self._accuracies[size]

    def supply(self, cell: "CellBook", now: float) -> Supply:
        """Return what the cell can do, as of a moment ago: walking over it takes its time."""
        if now >= self._supply_until:
            self._supply = supply_of(cell, now)
            self._supply_until = now + max(
                _SUPPLY_KEPT_S, self._supply.replicas * _SUPPLY_KEPT_PER_REPLICA_S
            )
        return self._supply

    def queue_s(
        self, cell: "CellBook", request: "Request", ahead: tuple[int, float], now: float
    ) -> float:
        """Return the time until a request with so much before it is started, as yet uncorrected.

        Args:
            cell: Whose forecast this is.
            request: Not yet waiting.
            ahead: Requests and prompt tokens that are served before it.
            now: Time.
        """
        supply = self.supply(cell, now)
        wait_s = queue_s(supply, *ahead)
        above = self.arrivals.above(request.priority, now)
        share = share_left(supply, *above, request.reserved_permille / 1000)
        return beside_s(wait_s, share, self.arrivals.known_s(now))

    def seen(self, priority: int, now: float) -> None:
        """Note that a tier has work."""
        if priority >= self._top or now >= self._top_until:
            self._top = priority
            self._top_until = now + _TOP_KEPT_S

    def is_top(self, priority: int) -> bool:
        """Return whether no higher tier had any work of late."""
        return priority >= self._top

    def runs_below(self, cell: "CellBook", priority: int, now: float) -> bool:
        """Return whether lower tiers run on more than what is reserved for them; a moment old."""
        if now >= self._below_until or priority != self._below_of:
            self._below = any(
                slot.is_open
                and slot.request.priority < priority
                and not slot.request.reserved_permille
                for book in cell.replicas.values()
                for slot in book.slots.values()
            )
            self._below_of = priority
            self._below_until = now + _RUNS_KEPT_S
        return self._below


def supply_of(cell: "CellBook", now: float) -> Supply:
    """Return what the replicas of a cell can do now."""
    queue = cell.queue
    prompt = queue.tokens / queue.requests if queue.requests else cell.uncached_mean
    sequence_tokens = max(1.0, prompt + cell.output_mean)  # that a further sequence would hold
    tokens_s = ends_s = 0.0
    backlog_s = float("inf")
    free = replicas = 0
    for book in cell.replicas_ready():
        limits = book.limits
        assert limits is not None, "ready means attached"
        if cell.health.state(book.replica_id) is HealthState.EJECTED:
            continue
        replicas += 1
        tokens_s += book.tokens_s
        backlog_s = min(backlog_s, book.backlog_s(now))
        if book.role is Role.PREFILL:
            continue  # answers have their places elsewhere
        running = len(book.slots)
        room = int(book.kv_free_blocks() * limits.block_tokens / sequence_tokens)
        if not running:
            room = max(room, 1)  # one sequence alone always goes
        free += max(0, min(limits.sequences_max - running, room))
        speed, shadow = book.speed, book.shadow
        is_prefilling = shadow.tokens > 0.0 or not shadow.pauses  # in this step or the next
        step_s = speed.full_step_s() if is_prefilling else speed.decode_step_s
        ends_s += running / (max(1.0, cell.output_mean) * step_s)
    return Supply(replicas, tokens_s, backlog_s, free, ends_s) if replicas else NO_SUPPLY


def demand_of(cell: "CellBook", request: "Request", now: float) -> Demand:
    """Return what a request would wait for if it came now."""
    uncached = request.uncached_tokens
    requests, tokens = cell.queue.ahead(
        request.priority, request.tenant_id, request.weight, uncached, now
    )
    return Demand(requests, tokens, alone_s(cell, request), adapter_s(cell, request))


def adapter_s(cell: "CellBook", request: "Request") -> float:
    """Return the time until a request's adapter could be in a slot somewhere."""
    if not request.adapter or not cell.residency.is_cold(request.adapter):
        return 0.0
    anywhere = next(iter(cell.replicas), "")
    return cell.residency.load_s(anywhere, request.adapter)


def predict(cell: "CellBook", request: "Request", now: float) -> Prediction:
    """Return when a request would have its first token if it came now."""
    forecast = cell.forecast
    demand = demand_of(cell, request, now)
    ahead = demand.requests_ahead, demand.tokens_ahead
    wait_s = forecast.queue_s(cell, request, ahead, now)
    accuracy = forecast.accuracy(request.uncached_tokens, cell.uncached_mean)
    overdue_s = request.overdue_at - request.arrived_at
    return Prediction(accuracy, wait_s, demand.prefill_s + demand.adapter_s, overdue_s)


def predict_ttft_s(cell: "CellBook", request: "Request", now: float) -> float:
    """Return when a request would have its first token if it came now; inf: nobody serves."""
    return predict(cell, request, now).ttft_s()


def alone_s(cell: "CellBook", request: "Request") -> float:
    """Return the time of a request's own prefill, on a replica that does nothing else."""
    uncached = request.uncached_tokens
    book = next(iter(cell.takers.values()), None) or next(iter(cell.replicas_ready()), None)
    return 0.0 if book is None else book.prefill_s(uncached, request.prompt_tokens - uncached)
