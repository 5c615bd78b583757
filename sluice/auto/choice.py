"""Chooses the model for a turn by the least expected cost on the present fleet. Pure.

    cost = price of the tokens
         + price of a second * (wait for the first step + prefill of what is not cached + decode)
         + price of a miss * (1 - quality)

The prefix of a conversation is cached by the model that answered last. Another model would have to
compute that prefix again, which is part of the other model's expected cost. So the model of a
conversation changes only if the change saves more than the prefill.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from sluice.auto.features import PromptFeatures
from sluice.auto.quality import QualityTable
from sluice.errors import BadRequestError, ErrorCode, PlatformError, RejectedError

# Waiting requests per ready replica above which a pool is regarded as saturated.
SATURATED_QUEUE = 10
# Least gain for which a conversation changes its model, as a share of the current model's cost.
# Waits are predictions, so with a smaller margin conversations would alternate between models of
# almost equal cost.
SWITCH_MARGIN = 0.2
# Assumed output tokens, if neither the caller nor earlier answers suggest a number.
_OUTPUT_TOKENS = 256.0
# Assumed error factor of estimated prompt sizes, used only for context limits.
_CONTEXT_SLACK = 1.15
_MILLION = 1e6


class AutoReason(StrEnum):
    """The reason of a choice."""

    CHEAPEST = "cheapest"  # the model has the least expected cost
    KEPT = "kept"  # the model of the conversation, because a change would not save enough
    SWITCHED = "switched"  # the conversation changes its model, which saves enough
    SATURATED = "saturated"  # the pool of a cheaper model is saturated
    BELOW_FLOOR = "below_floor"  # no model reaches the quality floor, so the best is chosen
    EXPLORED = "explored"  # the model was drawn at random, to collect judgements about it
    PINNED = "pinned"  # the policy pins this model
    ONLY = "only"  # no other model could answer
    STAND_IN = "stand_in"  # the chosen model refused, and this model answers instead


class AutoCandidate(NamedTuple):
    """A model that may answer, with prices per million tokens in the policy's currency.

    Attributes:
        name: Public name of the model.
        release: Release that the name resolves to.
        prompt_price: Price of prompt tokens.
        cached_price: Price of cached prompt tokens.
        output_price: Price of output tokens.
        context_tokens_max: Most tokens of prompt and output together, or 0 if unknown.
    """

    name: str
    release: str = ""
    prompt_price: float = 0.0
    cached_price: float = 0.0
    output_price: float = 0.0
    context_tokens_max: int = 0


class PoolOutlook(NamedTuple):
    """The state of a model's pool, from the gateway's data.

    Attributes:
        is_served: Whether a replica accepts requests.
        replicas: Number of replicas that accept requests.
        queued: Number of waiting requests.
        wait_s: Predicted seconds until a new request starts.
        prompt_token_s: Seconds of prefill per uncached prompt token.
        output_token_s: Seconds of decode per token.
    """

    is_served: bool = False
    replicas: int = 0
    queued: int = 0
    wait_s: float = 0.0
    prompt_token_s: float = 0.0
    output_token_s: float = 0.0

    @property
    def is_saturated(self) -> bool:
        """Whether the queue is so long that another model should answer."""
        return self.queued > SATURATED_QUEUE * max(1, self.replicas)


@dataclass(frozen=True, slots=True)
class AutoRules:
    """A tenant's preferences for the choice, in the currency of its prices.

    Attributes:
        price_max: Highest expected price of a turn's tokens, or 0 without a ceiling.
        quality_min: Least expected quality of an answer, 0 to 1, where 0 is no floor.
        second_price: Price of a second of waiting.
        miss_price: Price of a bad answer.
        explored_share: Share of new conversations whose model is drawn at random, 0 to 1.
        queue_priority_min: Least priority of tiers whose requests wait for a saturated pool.
            Requests of lower tiers use another model.
        pin: Model that answers all requests, or empty to choose.
    """

    price_max: float = 0.0
    quality_min: float = 0.0
    second_price: float = 0.0
    miss_price: float = 0.0
    explored_share: float = 0.01
    queue_priority_min: int = 0
    pin: str = ""


@dataclass(frozen=True, slots=True)
class AutoTurn:
    """A turn of a conversation.

    Attributes:
        features: Features of the whole conversation.
        output_tokens: Mean output tokens of similar answers, or 0 if unknown.
        current: Model that answered last, or empty if there is none or its cache has expired.
        cached: Cached prompt tokens, by model.
        draw: Random number of the turn, at least 0 and below 1.
    """

    features: PromptFeatures
    output_tokens: float = 0.0
    current: str = ""
    cached: Mapping[str, int] = field(default_factory=dict[str, int])
    draw: float = 1.0

    @property
    def answer_tokens(self) -> float:
        """Expected output tokens of the answer."""
        expected, most = self.output_tokens or _OUTPUT_TOKENS, self.features.output_tokens_max
        return min(expected, most) if most else expected


class AutoOption(NamedTuple):
    """A model that could answer a turn, with the expected cost.

    Attributes:
        price: Price of the tokens.
        seconds: Predicted seconds until the last token.
        running: Cost of tokens and time, without the cost of a bad answer.
        quality: Probability that the answer is good.
        cost: Total expected cost.
        propensity: Probability with which the model was chosen.
        is_eligible: Whether the model could be chosen. A quality below the floor or a saturated
            pool excludes the model.
    """

    name: str
    release: str
    price: float
    seconds: float
    running: float
    quality: float
    cost: float
    propensity: float = 0.0
    is_eligible: bool = True


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """The model that answers a turn.

    Attributes:
        reason: Reason of the choice.
        cluster: Cluster of the conversation.
        chosen: Option of the chosen model.
        alternatives: Options of the other models, cheapest first.
    """

    reason: AutoReason
    cluster: int
    chosen: AutoOption
    alternatives: Sequence[AutoOption]

    @property
    def model(self) -> str:
        """Public name of the model."""
        return self.chosen.name


def choose(
    candidates: Sequence[AutoCandidate],
    turn: AutoTurn,
    table: QualityTable,
    pools: Mapping[str, PoolOutlook],
    rules: AutoRules,
) -> AutoChoice:
    """Return the model that answers a turn.

    Args:
        candidates: Models that the caller may use.
        turn: The turn.
        table: Qualities of the models.
        pools: State of the pools by model. A model without an entry is not served.
        rules: Rules of the tenant.

    Raises:
        PlatformError: No model can answer. The status is 400 if the request is the cause, or 503 if
            the fleet is the cause.
    """
    fitting = _fitting(candidates, turn)
    cluster = turn.features.cluster
    options = [
        _option(it, turn, table.quality(cluster, it.name, it.release), pools, rules)
        for it in fitting
    ]
    options = _under_ceiling(options, rules)
    served = [it for it in options if pools.get(it.name, _DOWN).is_served]
    if not served:
        names = ", ".join(it.name for it in options)
        text = f"No model that 'auto' may choose is served now ({names}). Try again later."
        raise RejectedError(ErrorCode.NO_CAPACITY, text, retry_after_s=_RETRY_S)
    served.sort(key=_by_cost)
    if rules.pin:
        pinned = next((it for it in served if it.name == rules.pin), None)
        if pinned is not None:
            return _chosen(pinned, served, AutoReason.PINNED, cluster)
    eligible, why = _eligible(served, turn, pools, rules)
    return _decide(served, eligible, why, cluster, turn, rules)


def expected_running(
    candidate: AutoCandidate, turn: AutoTurn, pool: PoolOutlook, second_price: float
) -> tuple[float, float, float]:
    """Return the price, the seconds, and the cost of both, for a turn on a model."""
    prompt, output = turn.features.tokens, turn.answer_tokens
    cached = min(prompt, turn.cached.get(candidate.name, 0))
    price = (prompt - cached) * candidate.prompt_price + cached * candidate.cached_price
    price = (price + output * candidate.output_price) / _MILLION
    seconds = pool.wait_s + (prompt - cached) * pool.prompt_token_s + output * pool.output_token_s
    return price, seconds, price + second_price * seconds


_DOWN = PoolOutlook()
_RETRY_S = 2.0


def _by_cost(option: AutoOption) -> tuple[float, float, str]:
    return option.cost, -option.quality, option.name


def _fitting(candidates: Sequence[AutoCandidate], turn: AutoTurn) -> Sequence[AutoCandidate]:
    """Return the models whose context has room for the turn."""
    needed = turn.features.tokens * _CONTEXT_SLACK + min(turn.answer_tokens, _OUTPUT_TOKENS)
    fitting = [it for it in candidates if not 0 < it.context_tokens_max < needed]
    if fitting or not candidates:
        return fitting
    largest = max(it.context_tokens_max for it in candidates)
    # Because the estimate may be wrong, the models with the largest context remain if the prompt
    # alone may fit. The chosen model's exact token count decides later.
    if turn.features.tokens < largest * _CONTEXT_SLACK:
        return [it for it in candidates if it.context_tokens_max == largest]
    raise BadRequestError(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"The prompt has about {turn.features.tokens} tokens; the largest model that 'auto' may"
        f" choose takes {largest}. Shorten the conversation, or name a model with more room.",
        param="model",
    )


def _option(
    candidate: AutoCandidate,
    turn: AutoTurn,
    quality: float,
    pools: Mapping[str, PoolOutlook],
    rules: AutoRules,
) -> AutoOption:
    pool = pools.get(candidate.name, _DOWN)
    price, seconds, running = expected_running(candidate, turn, pool, rules.second_price)
    cost = running + rules.miss_price * (1.0 - quality)
    return AutoOption(candidate.name, candidate.release, price, seconds, running, quality, cost)


def _under_ceiling(options: Sequence[AutoOption], rules: AutoRules) -> list[AutoOption]:
    kept = [it for it in options if not rules.price_max or it.price <= rules.price_max]
    if kept:
        return kept
    if not options:
        raise PlatformError(
            ErrorCode.MODEL_NOT_FOUND,
            "'auto' may choose from no model that this key may use. Name a model, or ask for a key"
            " with one of them.",
            param="model",
        )
    least = min(options, key=lambda it: it.price)
    raise BadRequestError(
        ErrorCode.INVALID_REQUEST,
        f"No model is under the ceiling of price: this turn would cost {least.price:.6g} with"
        f" {least.name}, the cheapest, and may cost {rules.price_max:.6g}. Shorten it, lower its"
        " bound of output tokens, or have the ceiling raised.",
        param="model",
    )


def _eligible(
    served: Sequence[AutoOption],
    turn: AutoTurn,
    pools: Mapping[str, PoolOutlook],
    rules: AutoRules,
) -> tuple[Sequence[AutoOption], AutoReason]:
    """Return the eligible options, cheapest first, and the reason for choosing the first."""
    best = max(it.quality for it in served)
    good = [it for it in served if it.quality >= rules.quality_min]
    why = AutoReason.CHEAPEST
    if not good:
        good, why = [it for it in served if it.quality == best], AutoReason.BELOW_FLOOR
    if turn.features.tier_priority >= rules.queue_priority_min > 0:
        return good, why
    # If all good models are saturated, prefer an unsaturated model below the floor to a long queue.
    free = [it for it in good if not pools[it.name].is_saturated]
    free = free or [it for it in served if not pools[it.name].is_saturated]
    if not free:
        return good, why
    return free, why if free[0] is good[0] else AutoReason.SATURATED


def _decide(
    served: Sequence[AutoOption],
    eligible: Sequence[AutoOption],
    why: AutoReason,
    cluster: int,
    turn: AutoTurn,
    rules: AutoRules,
) -> AutoChoice:
    best = eligible[0]
    current = next((it for it in eligible if it.name == turn.current), None)
    if current is not None:
        if best is current or current.cost - best.cost <= SWITCH_MARGIN * current.cost:
            reason = why if best is current else AutoReason.KEPT
            return _chosen(current, served, reason, cluster)
        return _chosen(best, served, AutoReason.SWITCHED, cluster)
    if len(eligible) == 1 or turn.current:  # no exploration while a replica caches the prefix
        reason = AutoReason.ONLY if len(served) == 1 and why is AutoReason.CHEAPEST else why
        return _chosen(best, served, reason, cluster)
    chances = propensities([it.cost for it in eligible], rules.explored_share)
    drawn, reason = best, why
    if turn.draw < rules.explored_share:
        drawn = eligible[int(turn.draw / rules.explored_share * len(eligible))]
        reason = why if drawn is best else AutoReason.EXPLORED
    by_name = dict(zip([it.name for it in eligible], chances, strict=True))
    return _chosen(drawn, served, reason, cluster, by_name)


def propensities(costs: Sequence[float], explored_share: float) -> list[float]:
    """Return each model's probability to be chosen, where only explored turns choose uniformly."""
    each = explored_share / len(costs)
    best = min(range(len(costs)), key=lambda index: costs[index])
    return [each + (1.0 - explored_share) * (index == best) for index in range(len(costs))]


def _chosen(
    chosen: AutoOption,
    served: Sequence[AutoOption],
    reason: AutoReason,
    cluster: int,
    chances: Mapping[str, float] | None = None,
) -> AutoChoice:
    known = {chosen.name: 1.0} if chances is None else chances
    told = [_with_chance(it, known) for it in served]
    own = next(it for it in told if it.name == chosen.name)
    return AutoChoice(reason, cluster, own, [it for it in told if it.name != chosen.name])


def _with_chance(option: AutoOption, chances: Mapping[str, float]) -> AutoOption:
    return AutoOption(
        option.name,
        option.release,
        option.price,
        option.seconds,
        option.running,
        option.quality,
        option.cost,
        propensity=chances.get(option.name, 0.0),
        is_eligible=option.name in chances,
    )
