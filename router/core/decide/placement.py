"""Chooses the replica for a request by predicted cost, and decides which replicas are excluded.

This module has all cost formulas of placement. `router.core.explain` reports their results.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from router.core.fleet.engine_model import IDLE
from router.core.fleet.replica import ReplicaBook
from router.core.fleet.speed import MeanSpeed
from router.core.types.plan import ReplicaRole
from router.core.types.request import Request

# Extra cost of an uncached token, as a multiple of its prefill time, because every recomputed token
# uses capacity that other requests need.
_RECOMPUTE_WEIGHT = 1.0
# Cost of each sequence that would miss its TPOT objective, as a share of that objective.
_RISK_SHARE = 0.2
# Most decode-only steps that delay a prompt, so that decoding sequences regain their TPOT
# objective.
_PAUSES_MAX = 8
# Bonus of the replica that served the session's last request, expressed in cached tokens. The bonus
# only breaks near ties, because the prefix index already reports cached prompts. A larger bonus
# would send conversations to overloaded replicas.
_HOME_TOKENS = 16
# Tolerance, in seconds, between two sums of the same owed prefill that are rounded differently. A
# difference within the tolerance only causes one more replica to be priced.
ROUNDED_S = 1e-6


@dataclass(slots=True)
class PlacementChoice:
    """The replica chosen for a request, with the predictions behind the choice.

    Attributes:
        book: The router's record of the replica.
        cached_tokens: Prompt tokens that the replica has cached.
        cost_s: Predicted cost in seconds, which placement minimises.
        is_split: Whether the replica only computes the prompt, as `disaggregation` decides.
    """

    book: ReplicaBook
    cached_tokens: int
    cost_s: float
    is_split: bool = False


def cost_s(
    book: ReplicaBook,
    mean_speed: MeanSpeed,
    uncached: int,
    cached: int,
    adapter_s: float,
    now: float,
    *,
    is_home: bool,
) -> float:
    """Return the weighted predicted TTFT, which placement minimises."""
    cost = book.backlog_s(now) + prompt_cost_s(mean_speed, uncached, cached) + adapter_s
    engine_model = book.engine_model
    at_risk = engine_model.at_risk(uncached, book.speed.prompt_work_s(uncached, cached))
    cost += _RISK_SHARE * engine_model.tpot_s * at_risk
    return cost - _HOME_TOKENS * mean_speed.token_s if is_home else cost


def prompt_cost_s(mean_speed: MeanSpeed, uncached: int, cached: int) -> float:
    """Return the part of the cost that depends only on the cached tokens."""
    return (
        mean_speed.prefill_s(uncached, cached) + _RECOMPUTE_WEIGHT * uncached * mean_speed.token_s
    )


def is_paced(book: ReplicaBook, uncached: int, cached: int) -> bool:
    """Return whether a replica should decode some more steps before its next prompt.

    The caller must have called `opens_at` or `cost_s` for the replica at this time. These calls
    advance the engine model, which this function only reads.
    """
    engine_model = book.engine_model
    if engine_model.is_idle or engine_model.pauses >= _PAUSES_MAX:
        return False
    return engine_model.at_risk(uncached, book.speed.prompt_work_s(uncached, cached)) > 0


def excluded_by(
    book: ReplicaBook, request: Request, output: int, cached: int, *, is_only: bool
) -> str:
    """Return the reason why a replica cannot start a request soon, or an empty string."""
    limits = book.limits
    if limits is None:
        return "not attached"
    prompt = request.prompt_tokens + (len(request.output) if request.output else 0)
    reason = ""
    if book.is_draining:
        reason = "draining"
    elif len(book.dispatches) >= limits.sequences_max:
        reason = "sequences"
    elif not book.may_take:
        reason = "ejected"
    elif book.role is ReplicaRole.PREFILL:
        reason = "role"
    elif request.adapter and not limits.adapter_slots:
        reason = "adapter"
    elif prompt > limits.prompt_tokens_max:
        reason = "context"
    elif not book.fits(prompt, output, cached):
        reason = "kv"
    elif book.replica_id == request.avoid and not is_only:
        reason = "failed_here"
    return reason


def cached_tokens(book: ReplicaBook, request: Request, matches: Mapping[str, int]) -> int:
    """Return the prompt tokens that a replica probably has cached, at most all but the last."""
    blocks = matches.get(book.replica_id)
    return book.cached_in(request.prompt_tokens, blocks) if blocks else 0


def choose(
    books: Mapping[str, ReplicaBook],
    request: Request,
    matches: Mapping[str, int],
    *,
    owed_until: dict[str, float],
    mean_speed: MeanSpeed,
    output: int,
    home: str | None,
    adapter_waits_s: Mapping[str, float],
    without: Collection[str],
    is_only: bool,
    now: float,
) -> PlacementChoice | None:
    """Return the cheapest replica for a request, even if its next step is already full.

    Replicas with more cached blocks of the prompt than most are priced first, then the others by
    owed prefill. The search stops when the owed prefill alone costs more than the best replica.

    Args:
        books: Replicas that accept work, by name. Among equals the first is chosen.
        request: The request to place.
        matches: Number of cached leading blocks by replica, without replicas that have none.
        owed_until: `EngineModel.owed_until` of `books`, updated where that time has passed.
        mean_speed: Speed of the cell's replicas.
        output: Output tokens to book KV blocks for.
        home: Replica of the session's last request.
        adapter_waits_s: Seconds until the request's adapter is loaded, by replica, or empty.
        without: Names of `books` to exclude.
        is_only: Whether the cell has a single open replica, which `Request.avoid` cannot exclude.
        now: Time, in seconds.
    """
    names, best_s, best_at, best_cached = list(books), float("inf"), -1, 0

    def look_at(name: str, least_prompt_s: float) -> bool:
        """Compute a replica's cost, unless its lower bound already exceeds the best cost."""
        nonlocal best_s, best_at, best_cached
        at, left_s = names.index(name), owed_until[name] - now - ROUNDED_S
        least_s = least_prompt_s + left_s if left_s > 0.0 else least_prompt_s
        if (least_s, at) >= (best_s, best_at):
            return False
        book = books[name]
        cached = cached_tokens(book, request, matches)
        uncached, wait_s = request.prompt_tokens - cached, adapter_waits_s.get(name, 0.0)
        score_s = cost_s(book, mean_speed, uncached, cached, wait_s, now, is_home=name == home)
        is_better = (score_s, at) < (best_s, best_at) and name not in without
        if is_better and not excluded_by(book, request, output, cached, is_only=is_only):
            best_s, best_at, best_cached = score_s, at, cached
        return True

    if not books:
        return None
    prompt_of_most_s, first = _looked_at_first(books, request, matches, mean_speed, home)
    for name, least_prompt_s in first.items():
        look_at(name, least_prompt_s)
    for name in _by_owed(books, owed_until, now):
        if not look_at(name, prompt_of_most_s):
            break
    return PlacementChoice(books[names[best_at]], best_cached, best_s) if best_at >= 0 else None


def _looked_at_first(
    books: Mapping[str, ReplicaBook],
    request: Request,
    matches: Mapping[str, int],
    mean_speed: MeanSpeed,
    home: str | None,
) -> tuple[float, dict[str, float]]:
    """Return the `prompt_cost_s` of most replicas, and of each replica to price first.

    Replicas to price first are the session's last replica and the replicas with more cached blocks
    than most. The session's replica precedes all others, because the lower bounds do not include
    its bonus.
    """
    book = next(iter(books.values()))
    blocks_of_all = min(matches.values()) if len(matches) >= len(books) else 0
    cost_by_blocks: dict[int, float] = {}
    for blocks in {blocks_of_all, *matches.values()}:
        cached = book.cached_in(request.prompt_tokens, blocks)
        cost_by_blocks[blocks] = prompt_cost_s(mean_speed, request.prompt_tokens - cached, cached)
    first: dict[str, float] = {}
    if home is not None and home in books:
        first[home] = cost_by_blocks[blocks_of_all]
    for name, blocks in matches.items():
        if blocks > blocks_of_all and name in books:
            first[name] = cost_by_blocks[blocks]
    return cost_by_blocks[blocks_of_all], first


def _by_owed(
    books: Mapping[str, ReplicaBook], owed_until: dict[str, float], now: float
) -> list[str]:
    """Return replica names in the order in which their owed work ends, idle replicas first."""
    until = owed_until.__getitem__
    order = sorted(owed_until, key=until)
    free = bisect_right(order, now, key=until)
    # The model says that the owed work of some replica has ended, although no frame has reported
    # the end yet. So the models of these replicas are advanced before the comparison.
    if free and until(order[free - 1]) > IDLE:
        for name in order[:free]:
            engine_model = books[name].engine_model
            engine_model.advance(now)
            owed_until[name] = engine_model.owed_until
        order = sorted(owed_until, key=until)
    return order
