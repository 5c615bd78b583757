"""Chooses the cell of a pool for a request; pure.

Three rules, in this order. A session stays in its cell, where its conversation is cached, unless
that cell is so busy that another one would compute the prompt anew sooner. Requests that share a
long beginning go to the same cell as long as it is not much fuller than the others. The rest go to
the cell that owes the least work per replica. Both kinds of keys are placed by rendezvous hashing:
when a cell comes or goes, only its own keys move.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from gateway.dispatch.tier_gate import NO_GATES, ToldGates
from sluice.hashing import HASH_BYTES

# The block whose hash is the affinity of a prompt: its first 2,048 tokens. Conversations that only
# have a system prompt in common mostly differ before it and spread; the same document, or the same
# long conversation, agrees beyond it. On the Mooncake conversation trace in 8 cells 0.371 of the
# prompt tokens can be hit with this depth, of 0.374 in one cell; 0.138 without affinity.
AFFINITY_BLOCKS = 64
# A cell takes requests by affinity while it owes at most this many times the pool's mean.
LOAD_FACTOR = 1.25
# Tokens owed per replica below which a cell counts as idle: about a fifth of a second of work.
IDLE_TOKENS = 2048
# A session leaves its cell when that makes it wait more than so many times as long as the best one,
# plus a time that grows with what would have to be computed anew.
WAIT_FACTOR = 2.0
WAIT_SLACK_MS = 250.0
WAIT_SLACK_MS_PER_TOKEN = 0.1
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class CellView:
    """The gateway's view of a cell.

    Attributes:
        cell_id: Id of the cell.
        replicas_ready: Replicas that can take requests now.
        tokens_owed: Prompt and output tokens that the cell has accepted and not computed: the last
            reported number, plus the tokens sent there since.
        wait_ms: Time until the first token of a new request, as predicted by its router.
        is_draining: Whether the cell is about to be removed; it serves until then.
        is_refusing: Whether the cell's router is shutting down.
        queued: Requests that wait in the router.
        running: Requests at the replicas.
        gates: Gates of tiers, as its router told of them.
        told_at_s: Time of the router's last message about the cell, on the monotonic clock.
        seed: Hash of the cell's id.
    """

    cell_id: str
    replicas_ready: int = 0
    tokens_owed: int = 0
    wait_ms: int = 0
    is_draining: bool = False
    is_refusing: bool = False
    queued: int = 0
    running: int = 0
    gates: ToldGates = field(default_factory=lambda: NO_GATES)
    told_at_s: float = 0.0
    seed: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.seed = _seed(self.cell_id)


class Wish(NamedTuple):
    """The traits of a request that decide its cell.

    Attributes:
        session: Hash of the session; 0 without one.
        prefix: Hash from `prefix_key`; 0 without one.
        prompt_tokens: Tokens of the prompt.
        salt: Number of the request; decides between equal cells.
    """

    session: int
    prefix: int
    prompt_tokens: int
    salt: int


class Wishing(Protocol):
    """A request that goes to a cell."""

    @property
    def wish(self) -> Wish:
        """The traits that decide the cell; computed once, since that takes a while."""
        ...


def prefix_key(block_hashes: bytes) -> int:
    """Return the key that prompts with the same long beginning share; 0 for short prompts."""
    end = AFFINITY_BLOCKS * HASH_BYTES
    if len(block_hashes) < end:
        return 0
    return int.from_bytes(block_hashes[end - 8 : end], "little") or 1


def choose(cells: Sequence[CellView], wish: Wish) -> CellView:
    """Return the cell for a request.

    Args:
        cells: Cells of the pool that can be reached; at least one.
        wish: The request's traits.
    """
    if len(cells) == 1:
        return cells[0]
    fit = _fittest(cells)
    if wish.session:
        limit_ms = min([cell.wait_ms for cell in fit]) * WAIT_FACTOR + WAIT_SLACK_MS
        limit_ms += WAIT_SLACK_MS_PER_TOKEN * wish.prompt_tokens
        return _heaviest([cell for cell in fit if cell.wait_ms <= limit_ms], wish.session)
    if wish.prefix:
        bound = load_bound(fit)
        free = [c for c in fit if c.tokens_owed <= bound * (c.replicas_ready or 1)]
        return _heaviest(free, wish.prefix)
    owed = [cell.tokens_owed / (cell.replicas_ready or 1) for cell in fit]
    least = min(owed)
    return _heaviest([cell for cell, it in zip(fit, owed, strict=True) if it == least], wish.salt)


def load_bound(cells: Sequence[CellView]) -> float:
    """Return how many tokens per replica a cell may owe to be chosen by affinity.

    At least one cell is below the bound: the mean lies above the smallest.
    """
    replicas = sum([cell.replicas_ready or 1 for cell in cells])
    return max(IDLE_TOKENS, LOAD_FACTOR * sum([cell.tokens_owed for cell in cells]) / replicas)


def _fittest(cells: Sequence[CellView]) -> Sequence[CellView]:
    """Return the cells of the best grade; nearly always these are all cells."""
    fit = [c for c in cells if c.replicas_ready and not (c.is_draining or c.is_refusing)]
    if fit:
        return fit
    best = min(map(_unfitness, cells))
    return [cell for cell in cells if _unfitness(cell) == best]


def _unfitness(cell: CellView) -> int:
    """Grade the objections to a cell: it drains, it has no replica, it refuses all requests."""
    if cell.is_refusing:
        return 3
    if not cell.replicas_ready:
        return 2
    return int(cell.is_draining)


def _heaviest(cells: Sequence[CellView], key: int) -> CellView:
    """Return the cell with the highest rendezvous weight for a key."""
    chosen, highest = cells[0], -1
    if len(cells) > 1:
        for cell in cells:  # written out: a call per cell would cost more than the rest
            mixed = (cell.seed ^ key) * 0xBF58476D1CE4E5B9 & _MASK
            weight = (mixed ^ mixed >> 32) * 0x94D049BB133111EB & _MASK
            if weight > highest:
                chosen, highest = cell, weight
    return chosen


@lru_cache(maxsize=4096)
def _seed(cell_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(cell_id.encode(), digest_size=8).digest(), "little")
