"""Moves replicas so that nodes become free, one at a time. The rows of PostgreSQL are the state.

The scaling loop begins and ends moves in its own transaction. The fleet's loop carries a move out:
it starts the new replica, and drains the old one when all wanted replicas are ready.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.scaling import moves_repository, nodes_repository
from control_plane.scaling.actuators import Actuator
from control_plane.scaling.ahead import ahead_count
from control_plane.scaling.consolidation import (
    Consolidation,
    by_hand,
    hindrance,
    next_move,
    soon_replicas,
)
from control_plane.scaling.decision import Looked
from control_plane.scaling.memory import EFFECT_FACTOR
from control_plane.scaling.moves_repository import OpenMove

log = structlog.get_logger(__name__)

_OFF = "moves are switched off"


@dataclass(frozen=True, slots=True)
class MovablePool:
    """A scaled pool in a round, as moves need it.

    Attributes:
        growth: Number of replicas that the forecast adds within an hour.
        hindrance: Reason why no move may begin, or empty.
        by_hand: Reason why a move under way ends, or empty.
        deadline_s: Seconds after which a replacement that is not ready is given up.
        ahead: Number of the pool's next replicas for which nodes fetch its base.
    """

    growth: int
    hindrance: str
    by_hand: str
    deadline_s: float
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class MoveNews:
    """A move that began (`begun`) or ended (`done`, `given_up`, `ended`) in a round."""

    pool_id: str
    result: str
    text: str


def movable_pool(group: Sequence[Looked]) -> MovablePool:
    """Return the facts of a pool, or of both of its roles, that moves and next replicas need."""
    found = [_movable_part(one) for one in group]
    return MovablePool(
        sum(it.growth for it in found),
        next((it.hindrance for it in found if it.hindrance), ""),
        found[0].by_hand,
        max(it.deadline_s for it in found),
        sum(it.ahead for it in found),
    )


def _movable_part(one: Looked) -> MovablePool:
    settings, decided = one.state.settings, one.decided
    hand = by_hand(one.state, one.memory.looked_at)
    refused = sum(sums[3] for sums in one.memory.came.values())
    growth = soon_replicas(one.state.history, decided.wanted, settings.replicas_max)
    wanted = decided.wanted + decided.asleep
    return MovablePool(
        growth,
        hand or hindrance(one.state, decided, refused, one.late_s),
        hand,
        EFFECT_FACTOR * one.state.boot_s(1.0),
        ahead_count(wanted, growth, wanted if hand else settings.replicas_max),
    )


def outcome_of(
    move: OpenMove, pool: MovablePool | None, *, is_on: bool, is_in_rollout: bool
) -> tuple[str, str] | None:
    """Return the result of a move with its text, or None while the move goes on.

    A move whose replica drains already is not ended.
    """
    if not move.is_there:
        free = f", and {move.node_id} is empty" if move.is_last else ""
        return "done", f"{move.replica_id} has left {move.node_id} for {move.moves_to}{free}"
    if move.is_draining:
        return None
    why = "" if is_on else _OFF
    if pool is None:
        why = why or "the pool is no longer scaled"
    elif is_in_rollout:
        why = why or "a rollout uses the pool"
    else:
        why = why or pool.by_hand
    if why:
        return "ended", f"{move.replica_id} stays on {move.node_id}: {why}"
    if pool is not None and move.running_s > pool.deadline_s:
        text = f"not ready on {move.moves_to} after {move.running_s:.0f} s"
        return "given_up", f"{move.replica_id} stays on {move.node_id}: its replacement was {text}"
    return None


class Moving:
    """Begins and ends moves in the rounds of the leader."""

    def __init__(
        self, actuators: Mapping[str, Actuator], mode: Consolidation, hold_s: float
    ) -> None:
        """Create the owner of moves.

        Args:
            actuators: All actuators by name.
            mode: Gains for which replicas move.
            hold_s: Seconds for which a replica has run, and its pool's number has not changed,
                before the replica moves.
        """
        self._actuators = actuators
        self._mode = mode
        self._hold_s = hold_s

    async def look(
        self, connection: AsyncConnection, pools: Mapping[str, MovablePool]
    ) -> list[MoveNews]:
        """End the move under way if it is over, else begin the next one. Return what changed.

        Args:
            connection: Connection of the round's transaction.
            pools: Scaled pools that are switched on.
        """
        move = await moves_repository.open_move(connection)
        if move is None:
            begun = await self._begun(connection, pools)
            return [] if begun is None else [begun]
        ended = outcome_of(
            move,
            pools.get(move.pool_id),
            is_on=self._mode is not Consolidation.OFF,
            is_in_rollout=move.pool_id in await moves_repository.in_rollouts(connection),
        )
        if ended is None:
            return []
        await moves_repository.end(connection, move, ended[0])
        await moves_repository.record(connection, move.pool_id, ended[1])
        return [MoveNews(move.pool_id, *ended)]

    async def _begun(
        self, connection: AsyncConnection, pools: Mapping[str, MovablePool]
    ) -> MoveNews | None:
        """Begin the next move, and return it, or None if there is none."""
        groups = await nodes_repository.groups(connection, self._actuators) if pools else {}
        may_gain = (
            self._mode is Consolidation.ALWAYS
            or bool(groups)
            or await moves_repository.has_waiting(connection)
        )
        move = None
        if pools and may_gain and self._mode is not Consolidation.OFF:
            rollouts = await moves_repository.in_rollouts(connection)
            changed = await moves_repository.changed_lately(connection, self._hold_s)
            known = {
                key: (it.growth, it.hindrance or _hindrance(key, rollouts, changed))
                for key, it in pools.items()
            }
            fleet = await moves_repository.packed_fleet(connection, known, groups, self._hold_s)
            move = await asyncio.to_thread(next_move, fleet, self._mode)
        node_id = "" if move is None else move.replica.node_id
        is_off = self._mode is Consolidation.OFF
        await moves_repository.write_vacated(connection, node_id, keeps_empty=not is_off)
        if move is None:
            return None
        await moves_repository.begin(connection, move)
        await moves_repository.record(connection, move.replica.pool_id, move.text)
        return MoveNews(move.replica.pool_id, "begun", move.text)


def _hindrance(pool_id: str, rollouts: set[str], changed: set[str]) -> str:
    if pool_id in rollouts:
        return "a rollout uses the pool"
    return "its number has changed lately" if pool_id in changed else ""
