"""Chooses the cell of a pool for a request. Pure.

The first of these rules that applies decides:

1. A session stays in its cell, where its conversation is cached. The session leaves only if the
   cell is so busy that another cell would compute the whole prompt sooner.
2. A prompt goes to the cell that caches its longest prefix, if that cell is not much busier than
   the others. Sketches of the routers report the cached prefixes. If several cells cache equally
   much, the first block that no cell caches is hashed to choose one of them. Later turns of the
   conversation share that block and so reach the same cell, but other conversations do not.
3. Requests for the same adapter go to the same cell, so that few cells load the adapter.
4. Other requests go to the cell with the fewest uncomputed tokens per replica.

A key (a session, block or adapter) chooses its cell by rendezvous hashing. So if a cell is added
or removed, only the keys of that cell move.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from gateway.dispatch.prefix_board import PrefixBoard
from gateway.dispatch.tier_gate import NO_GATES, ToldGates
from sluice.hashing import HASH_BYTES
from sluice.prefix_marks import DEPTH_MIN, following

# Number of leading blocks (2,048 tokens) whose hash is the affinity key of a prompt while no router
# reports sketches. Conversations that share only a system prompt mostly differ within these blocks,
# so they are spread over the cells. Prompts about one document, or turns of one long conversation,
# share all these blocks and reach one cell.
AFFINITY_BLOCKS = 64
# A cell is chosen for its cache only while its owed (uncomputed) tokens per replica are below this
# multiple of the pool's mean.
LOAD_FACTOR = 1.25
# Owed tokens per replica up to which a cell counts as idle, about a fifth of a second of work. If
# the prompt is shorter than this number, the prompt's length is the bound.
IDLE_TOKENS = 2048
# A session leaves its cell if the wait there exceeds the shortest wait times this factor, plus a
# slack. The slack grows with the prompt, since another cell would have to compute the prompt anew.
WAIT_FACTOR = 2.0
WAIT_SLACK_MS = 250.0
WAIT_SLACK_MS_PER_TOKEN = 0.1
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class CellView:
    """The gateway's view of a cell.

    Attributes:
        cell_id: Id of the cell.
        replicas_ready: Replicas that can accept requests now.
        tokens_owed: Prompt and output tokens that the cell has accepted and not yet computed. The
            value is the router's last report plus the prompt tokens sent to the cell since then.
        wait_ms: Time until the first token of a new request, as predicted by its router.
        is_draining: Whether the cell is about to be removed. Until then, its replicas still serve.
        is_refusing: Whether the cell's router is shutting down.
        queued: Requests that wait in the router.
        running: Requests at the replicas.
        gates: Shares of requests that the router accepts, by tier and tenant. See `tier_gate`.
        told_at_s: Monotonic time of the router's last message about the cell.
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
        session: Hash of the session, or 0 if the request names no session.
        hashes: First eight bytes of the hash of each full block of the prompt.
        prompt_tokens: Tokens of the prompt.
        salt: Number derived from the request's id, which chooses among equally good cells.
        adapter: Hash of the adapter, or 0 if the model has no adapter.
    """

    session: int
    hashes: Sequence[int]
    prompt_tokens: int
    salt: int
    adapter: int = 0


class Wishing(Protocol):
    """A request that needs a cell."""

    @property
    def wish(self) -> Wish:
        """The traits that decide the cell. Read this property once, because it computes a hash."""
        ...


def hashes_of(block_hashes: bytes) -> "memoryview[int]":
    """Return a view of the first eight bytes of each of a prompt's concatenated block hashes."""
    return memoryview(block_hashes).cast("Q")[:: HASH_BYTES // 8]


class CellChoice(NamedTuple):
    """The cell that was chosen for a request.

    Attributes:
        cell: The cell.
        known: Leading blocks that the cell caches according to its sketch, or 0 if none was read.
    """

    cell: CellView
    known: int = 0


def choose(cells: Sequence[CellView], wish: Wish, board: PrefixBoard | None = None) -> CellChoice:
    """Return the cell for a request.

    Args:
        cells: Cells of the pool whose routers are connected, at least one.
        wish: The request's traits.
        board: Sketches of the pool's cells, or None if no router reports sketches.
    """
    if len(cells) == 1:
        return CellChoice(cells[0])
    fit = _fittest(cells)
    if wish.session:
        limit_ms = min([cell.wait_ms for cell in fit]) * WAIT_FACTOR + WAIT_SLACK_MS
        limit_ms += WAIT_SLACK_MS_PER_TOKEN * wish.prompt_tokens
        near = [cell for cell in fit if cell.wait_ms <= limit_ms]
        return CellChoice(_heaviest(near, wish.session))
    if len(wish.hashes) >= DEPTH_MIN:
        if board is not None and len(board):
            return _by_sketches(fit, wish, board)
        if len(wish.hashes) >= AFFINITY_BLOCKS:
            free = _free(fit, wish)
            return CellChoice(_heaviest(free, wish.hashes[AFFINITY_BLOCKS - 1]))
    if wish.adapter:
        return CellChoice(_heaviest(_free(fit, wish), wish.adapter))
    return CellChoice(_idlest(fit, wish))


def _by_sketches(fit: Sequence[CellView], wish: Wish, board: PrefixBoard) -> CellChoice:
    """Return the cell with the longest cached prefix, among cells below `load_bound`."""
    free = _free(fit, wish)
    depth, names = board.holders(wish.hashes, [cell.cell_id for cell in free])
    held = set(names)
    holders = [cell for cell in free if cell.cell_id in held] if depth else free
    if not depth and wish.adapter:
        return CellChoice(_heaviest(free, wish.adapter))
    new = following(depth)
    if len(wish.hashes) < new:
        return CellChoice(_idlest(holders, wish), depth)
    return CellChoice(_heaviest(holders, wish.hashes[new - 1]), depth)


def _free(cells: Sequence[CellView], wish: Wish) -> list[CellView]:
    bound = load_bound(cells, wish.prompt_tokens)
    return [cell for cell in cells if cell.tokens_owed <= bound * (cell.replicas_ready or 1)]


def _idlest(cells: Sequence[CellView], wish: Wish) -> CellView:
    owed = [cell.tokens_owed / (cell.replicas_ready or 1) for cell in cells]
    least = min(owed)
    return _heaviest([cell for cell, it in zip(cells, owed, strict=True) if it == least], wish.salt)


def load_bound(cells: Sequence[CellView], prompt_tokens: int) -> float:
    """Return the number of owed tokens per replica above which a cell is not chosen for its cache.

    At least one cell is within the bound, because the bound is above the mean over all cells.
    """
    replicas = sum([cell.replicas_ready or 1 for cell in cells])
    idle = min(IDLE_TOKENS, prompt_tokens)
    return max(idle, LOAD_FACTOR * sum([cell.tokens_owed for cell in cells]) / replicas)


def _fittest(cells: Sequence[CellView]) -> Sequence[CellView]:
    """Return the cells with the lowest `_unfitness`, nearly always all cells."""
    fit = [c for c in cells if c.replicas_ready and not (c.is_draining or c.is_refusing)]
    if fit:
        return fit
    best = min(map(_unfitness, cells))
    return [cell for cell in cells if _unfitness(cell) == best]


def _unfitness(cell: CellView) -> int:
    """Return 3 if a cell's router refuses all, 2 without replicas, 1 while draining, or else 0."""
    if cell.is_refusing:
        return 3
    if not cell.replicas_ready:
        return 2
    return int(cell.is_draining)


def _heaviest(cells: Sequence[CellView], key: int) -> CellView:
    """Return the cell with the highest rendezvous weight for a key."""
    chosen, highest = cells[0], -1
    if len(cells) > 1:
        for cell in cells:  # inlined, because a function call per cell would double the time
            mixed = (cell.seed ^ key) * 0xBF58476D1CE4E5B9 & _MASK
            weight = (mixed ^ mixed >> 32) * 0x94D049BB133111EB & _MASK
            if weight > highest:
                chosen, highest = cell, weight
    return chosen


@lru_cache(maxsize=4096)
def _seed(cell_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(cell_id.encode(), digest_size=8).digest(), "little")
