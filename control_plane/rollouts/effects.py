"""Writes a rollout's step in one transaction, with its event, its split and its model.

The loop and the admin REST step rollouts only through this module, under a lock on the rollout's
row.
"""

from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Protocol

from sqlalchemy import RowMapping, update
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.fleet.preparation import PreparedRelease
from control_plane.models.routes import MODELS
from control_plane.rollouts import facts, repository
from control_plane.rollouts.machine import step
from control_plane.rollouts.repository import KeptRollout
from control_plane.rollouts.state import Event, Phase
from control_plane.tables import models
from sluice.errors import ErrorCode, PlatformError


class Preparation(Protocol):
    """The operations that a rollout requests from the fleet.

    The implementation is `control_plane.fleet.preparation`.
    """

    def prepare(
        self,
        connection: AsyncConnection,
        control: PreparedRelease,
        canary: PreparedRelease,
        share: int,
    ) -> Awaitable[None]:
        """Request capacity with which canary can serve a share of the requests, in basis points."""
        ...

    def is_ready(
        self,
        connection: AsyncConnection,
        control: PreparedRelease,
        canary: PreparedRelease,
        share: int,
    ) -> Awaitable[bool]:
        """Return whether the fleet can serve this share of the requests from canary."""
        ...

    def settle(
        self, connection: AsyncConnection, kept: PreparedRelease, dropped: PreparedRelease
    ) -> Awaitable[None]:
        """Delete the capacity request of a finished rollout."""
        ...

    def abandon(self, connection: AsyncConnection, model_id: str) -> Awaitable[None]:
        """Delete the capacity requests for a model whose release no longer exists."""
        ...


@dataclass(frozen=True, slots=True)
class News:
    """A step that changed the rollout's phase or stage.

    Attributes:
        event: Name of the step's event.
        kept: Rollout after the step.
        was: Phase before the step.
    """

    event: str
    kept: KeptRollout
    was: Phase

    @property
    def is_incident(self) -> bool:
        """Whether the platform, and not an operator, sent all requests back to control."""
        return self.kept.state.phase is Phase.HALTED and self.was is not Phase.HALTED


async def apply(
    connection: AsyncConnection,
    kept: KeptRollout,
    told: tuple[Event, ...],
    now_ms: int,
    actor: str = "",
) -> tuple[KeptRollout, list[News]]:
    """Step a rollout whose row is locked, and store all consequences of the step.

    Args:
        connection: Connection in the transaction of the step.
        kept: Stored rollout.
        told: Events for the rollout, in order.
        now_ms: Unix time in milliseconds.
        actor: Id of the caller's admin key. It is empty if no caller requested the step.

    Raises:
        PlatformError: `CONFLICT` if the operator's command is not possible in the rollout's phase.
    """
    before, news = kept, list[News]()
    for event in told:
        was = kept.state.phase
        result = step(kept.state, event, now_ms)
        kept = replace(kept, state=result.rollout)
        if result.actions:
            news.append(News(event.kind, kept, was))
            await repository.record(connection, kept.id, event.kind, kept.state, actor)
    if news or facts.must_store(before.state, kept.state):
        await write(connection, kept)
    return kept, news


async def give_up(
    connection: AsyncConnection, row: RowMapping, now_ms: int, actor: str
) -> KeptRollout:
    """Abort a rollout whose state cannot be read. The row of the rollout must be locked."""
    kept = repository.without_state(row, now_ms)
    await repository.record(connection, kept.id, "abort", kept.state, actor)
    await write(connection, kept)
    return kept


async def write(connection: AsyncConnection, kept: KeptRollout) -> None:
    """Store a rollout, and update its model and its split accordingly."""
    if kept.is_live and kept.state.phase is Phase.DONE:
        await _finish(connection, kept)
    wanted = facts.wanted_split(kept.state, is_live=kept.is_live)
    is_news = await repository.write_split(connection, kept, wanted)
    await repository.save(connection, kept, is_split_new=is_news)


async def settle(connection: AsyncConnection, fleet: Preparation, kept: KeptRollout) -> KeptRollout:
    """End the fleet's preparations for an ended rollout, which is then no longer live."""
    control, canary = await _releases(connection, kept)
    if control is not None and canary is not None:
        is_done = kept.state.phase is Phase.DONE
        stays, goes = (canary, control) if is_done else (control, canary)
        await fleet.settle(connection, stays, goes)
    else:
        await fleet.abandon(connection, kept.model_id)
    ended = replace(kept, is_live=False)
    await write(connection, ended)
    await repository.record(connection, kept.id, "settled", kept.state)
    return ended


async def both_releases(
    connection: AsyncConnection, kept: KeptRollout
) -> tuple[PreparedRelease, PreparedRelease]:
    """Return the releases control and canary, which cannot be deleted during the rollout."""
    control, canary = await _releases(connection, kept)
    if control is None or canary is None:
        message = f"{kept.id}: a release of {kept.model_id} is not there any more"
        raise PlatformError(ErrorCode.NOT_FOUND, message)
    return control, canary


async def _releases(
    connection: AsyncConnection, kept: KeptRollout
) -> tuple[PreparedRelease | None, PreparedRelease | None]:
    """Return the releases control and canary. A deleted release is None."""
    control = await repository.release_of(connection, kept.model_id, kept.control)
    return control, await repository.release_of(connection, kept.model_id, kept.canary)


async def _finish(connection: AsyncConnection, kept: KeptRollout) -> None:
    """Point the model at the canary release, because the rollout has succeeded."""
    _, canary = await both_releases(connection, kept)
    values = {
        "base_digest": canary.base_digest,
        "adapter_digest": canary.adapter_digest,
        "pool_id": canary.pool_id,
        "release": canary.name,
        "previous_release": kept.control,
    }
    await connection.execute(update(models).where(models.c.id == kept.model_id).values(**values))
    await MODELS.after_write(connection, kept.model_id, values)
