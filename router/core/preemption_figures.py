"""Reads the figures of a replica for `router.core.decide.preemption`."""

from collections.abc import Sequence

from router.core.decide.preemption import (
    PREEMPTIONS_MAX,
    PreemptionRoom,
    RoomClaim,
    RunningSequence,
)
from router.core.fleet.cell_fleet import CellFleet
from router.core.fleet.replica import ReplicaBook
from router.core.types.plan import ReplicaRole
from router.core.types.request import Dispatch, Request


def candidates(fleet: CellFleet, request: Request) -> list[ReplicaBook]:
    """Return the replicas that could serve a request after preemptions."""
    return [
        book
        for book in fleet.ready()
        if book.limits is not None
        and request.prompt_tokens <= book.limits.prompt_tokens_max
        and (book.limits.adapter_slots or not request.adapter)
        and book.role is not ReplicaRole.PREFILL
        and not book.is_broken
        and fleet.health.may_take(book.replica_id, len(book.dispatches))
    ]


def room(
    book: ReplicaBook, request: Request, output: int, claims: Sequence[RoomClaim], now: float
) -> PreemptionRoom:
    """Return the free capacity of a replica, without the capacity that others claim.

    Args:
        book: The replica.
        request: The request that needs the capacity.
        output: Output tokens to book for the request.
        claims: Claims of other requests on the replica.
        now: Time, in seconds.
    """
    limits = book.limits
    assert limits is not None, "candidates are attached"
    uncached = request.uncached_tokens
    blocks = book.blocks(request.prompt_tokens + output)
    return PreemptionRoom(
        sequences_free=limits.sequences_max - len(book.dispatches) - len(claims),
        blocks_free=book.kv_free_blocks() - sum(claim.blocks for claim in claims),
        blocks_needed=min(blocks, limits.kv_blocks),  # a whole replica is enough
        backlog_s=book.backlog_s(now),
        prefill_s=book.prefill_s(uncached, request.prompt_tokens - uncached),
    )


def may_stop(dispatch: Dispatch, request: Request) -> bool:
    """Return whether a dispatch may be preempted for a request."""
    owner = dispatch.request
    return (
        owner.is_preemptible
        and dispatch.is_open
        and owner.priority < request.priority
        and owner.preemptions < PREEMPTIONS_MAX
    )


def occupants(book: ReplicaBook, request: Request) -> list[Dispatch]:
    """Return a replica's dispatches that are ending or may be preempted for a request."""
    return [one for one in book.dispatches.values() if not one.is_open or may_stop(one, request)]


def running(book: ReplicaBook, request: Request, stopped: frozenset[int]) -> list[RunningSequence]:
    """Return the figures of `occupants`, of which the sequences in `stopped` are ending."""
    return [_running(book, one, stopped) for one in occupants(book, request)]


def _running(book: ReplicaBook, dispatch: Dispatch, stopped: frozenset[int]) -> RunningSequence:
    computed = dispatch.prompt_tokens - dispatch.cached_tokens - dispatch.prefill_owed
    return RunningSequence(
        blocks=dispatch.kv_blocks,
        progress_tokens=max(0, computed) + dispatch.emitted,
        owed_s=dispatch.prefill_owed / book.tokens_s,
        is_ending=not dispatch.is_open or dispatch.sequence in stopped,
    )
