"""Which replica gets a request, and how far ahead of its work a replica is sent more.

The one place with the formulas; `explain` shows what is computed here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from router.core.model import Request, Role
from router.core.replica_book import ReplicaBook
from router.core.speed import Usual

# Computing what another replica holds takes capacity from everybody else, too.
_RECOMPUTE_WEIGHT = 1.0
# A sequence that would miss the objective of its time per token costs this share of it.
_RISK_SHARE = 0.2
# Decode-only steps that a prompt waits for at most, so that those who decode are in time again.
_PAUSES_MAX = 8
# A session stays where it was between equals, as if so many tokens more were cached there. What is
# really cached the index knows; a larger bonus sends conversations to where they do harm.
_HOME_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica for a request, with what was predicted.

    Attributes:
        book: The replica.
        cached_tokens: Of the prompt, there.
        cost_s: What placement minimises.
        is_split: It computes the prompt only; see `disaggregation`.
    """

    book: ReplicaBook
    cached_tokens: int
    cost_s: float
    is_split: bool = False


def cost_s(
    book: ReplicaBook,
    usual: Usual,
    uncached: int,
    cached: int,
    adapter_s: float,
    now: float,
    *,
    is_home: bool,
) -> float:
    """Return what placement minimises: the predicted time until the first token, weighted."""
    cost = book.backlog_s(now) + own_s(usual, uncached, cached) + adapter_s
    shadow = book.shadow
    at_risk = shadow.at_risk(uncached, book.speed.prompt_s(uncached, cached))
    cost += _RISK_SHARE * shadow.tpot_s * at_risk
    return cost - _HOME_TOKENS * usual.token_s if is_home else cost


def own_s(usual: Usual, uncached: int, cached: int) -> float:
    """Return the part of the cost that is the same wherever as much of the prompt is cached."""
    return usual.prefill_s(uncached, cached) + _RECOMPUTE_WEIGHT * uncached * usual.token_s


def is_paced(book: ReplicaBook, uncached: int, cached: int) -> bool:
    """Return whether a replica had better decode for some more steps before its next prompt.

    Call after `opens_at` or `cost_s`.
    """
    shadow = book.shadow
    if shadow.is_idle or shadow.pauses >= _PAUSES_MAX:
        return False
    return shadow.at_risk(uncached, book.speed.prompt_s(uncached, cached)) > 0


def excluded_by(
    book: ReplicaBook, request: Request, output: int, cached: int, *, is_only: bool
) -> str:
    """Return why a replica may not take a request now or soon, in a word; empty when it may."""
    limits = book.limits
    if limits is None:
        return "not attached"
    prompt = request.prompt_tokens + (len(request.output) if request.output else 0)
    reason = ""
    if book.is_draining:
        reason = "draining"
    elif len(book.slots) >= limits.sequences_max:
        reason = "sequences"
    elif not book.may_take:
        reason = "ejected"
    elif book.role is Role.PREFILL:
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
    """Return how many prompt tokens a replica is predicted to have cached; never the last one."""
    blocks = matches.get(book.replica_id, 0)
    if not blocks or book.limits is None:
        return 0
    return min(blocks * book.limits.block_tokens, request.prompt_tokens - 1)


def choose(
    books: Iterable[ReplicaBook],
    request: Request,
    matches: Mapping[str, int],
    *,
    usual: Usual,
    output: int,
    home: str | None,
    adapter_s: Mapping[str, float],
    is_only: bool,
    now: float,
) -> Choice | None:
    """Return the cheapest replica; it may be one above its window that holds the prompt.

    Args:
        books: Those that may take something.
        request: To be placed.
        matches: Cached leading blocks by replica; holders only.
        usual: Speed of the cell's replicas.
        output: Output tokens that KV blocks are to be booked for.
        home: Where the session's last request ran.
        adapter_s: Seconds until its adapter is in a slot, by replica; empty for the base.
        is_only: There is no other replica than those to be avoided.
        now: Time.
    """
    best: ReplicaBook | None = None
    best_s = float("inf")
    best_cached = 0
    # Most replicas hold the same few blocks, and most cost more than the best so far by the least
    # that is owed there, without an adapter and a risk: the formula is for the rest.
    bonus_s = _HOME_TOKENS * usual.token_s if home else 0.0
    blocks_at = matches.get
    own_by_blocks: dict[int | None, float] = {None: own_s(usual, request.prompt_tokens, 0)}
    for book in books:
        blocks = blocks_at(book.replica_id)
        if blocks not in own_by_blocks:
            cached = cached_tokens(book, request, matches)
            own_by_blocks[blocks] = own_s(usual, request.prompt_tokens - cached, cached)
        least_s = own_by_blocks[blocks]
        shadow = book.shadow
        left_s = shadow.boundary_at - now
        if left_s > 0.0:
            least_s += shadow.work_s + left_s
        if least_s - bonus_s >= best_s:
            continue
        cached = cached_tokens(book, request, matches)
        uncached = request.prompt_tokens - cached
        wait_s = adapter_s.get(book.replica_id, 0.0) if adapter_s else 0.0
        is_home = home == book.replica_id
        score_s = cost_s(book, usual, uncached, cached, wait_s, now, is_home=is_home)
        if score_s < best_s and not excluded_by(book, request, output, cached, is_only=is_only):
            best, best_s, best_cached = book, score_s, cached
    return None if best is None else Choice(best, best_cached, best_s)
