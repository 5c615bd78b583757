"""Reads and writes rollouts in PostgreSQL, in the caller's transactions."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError
from sqlalchemy import BigInteger, RowMapping, cast, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.fleet.preparation import PreparedRelease
from control_plane.models.model import release_id
from control_plane.rollouts.facts import Confirmation, GatewayFacts
from control_plane.rollouts.listing import why
from control_plane.rollouts.plan import Plan
from control_plane.rollouts.state import ENDED, STATE, Phase, Reason, Rollout, Verdict, explain
from control_plane.rollouts.tables import (
    gateway_confirmations,
    rollout_events,
    rollout_plans,
    rollouts,
)
from control_plane.tables import changes, models, releases, splits, tenants
from sluice.errors import ErrorCode, PlatformError
from sluice.ids import new_id

# Silence after which a process loses its claims on rollouts. It is much longer than a round of the
# loop.
_LEASE = timedelta(seconds=15)
_RENEW = timedelta(seconds=1)
_EVENTS_MAX = 1_000  # Largest number of events per rollout. The oldest events are deleted.
_GATEWAYS_KEPT = timedelta(hours=1)
_IS_LIVE = rollouts.c.is_live
HAS_WORK = select(rollouts.c.id).where(_IS_LIVE).exists()
_LIVE_PHASES = select(rollouts.c.phase, func.count()).where(_IS_LIVE).group_by(rollouts.c.phase)


@dataclass(frozen=True, slots=True)
class KeptRollout:
    """A stored rollout.

    Attributes:
        id: Id of the rollout.
        model_id: Model whose requests the rollout moves.
        control: Name of the release that the model points at.
        canary: Name of the new release.
        owner: Id of the tenant that owns the model, or None for a public model.
        salt: Salt of the rollout's split.
        state: State of the rollout's state machine.
        version: Version of the row, incremented by every stored step.
        is_live: Whether gateways or the fleet still use the rollout.
        created_ms: Unix time in milliseconds.
        split_ms: Time of the last change of the split, in Unix milliseconds.
    """

    id: str
    model_id: str
    control: str
    canary: str
    owner: str | None
    salt: str
    state: Rollout
    version: int
    is_live: bool
    created_ms: int
    split_ms: int


class UnreadableError(PlatformError):
    """The state of a rollout cannot be read. Another version of the control plane wrote it.

    Attributes:
        problem: Description of the problem in one line, for operators.
        reason: First validation error, if there are several.
    """

    def __init__(self, rollout_id: str, error: ValidationError) -> None:
        self.problem = why(error)
        super().__init__(ErrorCode.CONFLICT, f"{rollout_id}: {self.problem}")
        self.reason = str(error)


@dataclass(frozen=True, slots=True)
class Taken:
    """The rollouts that this process has claimed.

    Attributes:
        own: Rollouts that this process steps.
        others: Ids of rollouts in `own` that another process stepped before.
        unreadable: Errors of rollouts whose state this version of the control plane cannot read, by
            id. These rollouts are not claimed.
    """

    own: list[KeptRollout]
    others: set[str]
    unreadable: dict[str, UnreadableError]


def rollout_of(row: Any) -> KeptRollout:
    """Return the rollout in a row.

    Raises:
        UnreadableError: The state has an unknown form.
    """
    try:
        state = STATE.validate_json(json.dumps(row["state"]))
    except ValidationError as error:
        raise UnreadableError(row["id"], error) from None
    return _kept(row, state)


def without_state(row: Any, now_ms: int) -> KeptRollout:
    """Return a rollout with an unreadable state as an ended rollout without canary traffic.

    If the stored phase is an end phase, the result has this phase. Otherwise the phase is aborted.
    """
    ended = {phase.value: phase for phase in ENDED}
    phase = ended.get(row["phase"], Phase.ABORTED)
    return _kept(row, Rollout(Plan(), phase=phase, stepped_ms=now_ms))


def _kept(row: Any, state: Rollout) -> KeptRollout:
    return KeptRollout(
        id=row["id"],
        model_id=row["model_id"],
        control=row["control"],
        canary=row["canary"],
        owner=row["owner_tenant_id"],
        salt=row["salt"],
        state=state,
        version=row["version"],
        is_live=row["is_live"],
        created_ms=_ms(row["created_at"]),
        split_ms=_ms(row["split_at"]),
    )


async def clock_ms(connection: AsyncConnection) -> int:
    """Return the database's time (Unix ms), which all control planes use as their common clock."""
    now = cast(func.extract("epoch", func.clock_timestamp()) * 1000, BigInteger)
    return int(await connection.scalar(select(now)) or 0)


async def take(connection: AsyncConnection, process: str) -> Taken:
    """Claim the live rollouts that no live process steps, and renew the claims of this process.

    A rollout whose row is locked is skipped, because the lock's owner may be frozen. An unreadable
    rollout is not claimed, and an existing claim is released, so that another process can claim it.
    """
    t = rollouts.c
    is_free = or_(t.taken_at.is_(None), t.taken_at < func.now() - _LEASE)
    found = select(rollouts).where(t.is_live, or_(t.taken_by == process, is_free)).order_by(t.id)
    found = found.with_for_update(skip_locked=True, key_share=True)
    taken = Taken([], set(), {})
    for row in (await connection.execute(found)).mappings():
        try:
            taken.own.append(rollout_of(row))
        except UnreadableError as error:
            taken.unreadable[row["id"]] = error
            continue
        if row["taken_by"] not in {"", process}:
            taken.others.add(row["id"])
    await _renew(connection, [kept.id for kept in taken.own], process)
    return taken


async def _renew(connection: AsyncConnection, ids: Sequence[str], process: str) -> None:
    """Renew the claims of this process on rollouts whose rows are locked."""
    t = rollouts.c
    is_due = or_(t.taken_by != process, t.taken_at < func.now() - _RENEW)
    query = update(rollouts).where(t.id.in_(ids), is_due)
    await connection.execute(query.values(taken_by=process, taken_at=func.now()))


async def lock(connection: AsyncConnection, rollout_id: str) -> RowMapping | None:
    """Return the row of a rollout, locked until the transaction ends, or None without a row."""
    query = select(rollouts).where(rollouts.c.id == rollout_id).with_for_update(key_share=True)
    return (await connection.execute(query)).mappings().first()


async def lock_own(
    connection: AsyncConnection, rollout_id: str, process: str
) -> KeptRollout | None:
    """Return a live rollout of this process, locked until the transaction ends.

    The claim is renewed. Returns None without waiting if another process has claimed the rollout or
    has locked its row, so that the other rollouts are not delayed.
    """
    t = rollouts.c
    query = select(rollouts).where(t.id == rollout_id, t.taken_by == process, t.is_live)
    locked = query.with_for_update(key_share=True, skip_locked=True)
    row = (await connection.execute(locked)).mappings().first()
    if row is None:
        return None
    await _renew(connection, [rollout_id], process)
    return rollout_of(row)


async def live_of(connection: AsyncConnection, model_id: str) -> str | None:
    """Return the id of a model's live rollout, or None if there is no live rollout."""
    t = rollouts.c
    return await connection.scalar(select(t.id).where(t.is_live, t.model_id == model_id))


async def create(
    connection: AsyncConnection,
    control: PreparedRelease,
    canary: PreparedRelease,
    owner: str | None,
    plan: Plan,
) -> KeptRollout:
    """Insert a planned rollout. Raises IntegrityError if the model already has a live rollout."""
    rollout_id = new_id("rollout")
    state = Rollout(plan, stepped_ms=await clock_ms(connection))
    made = insert(rollouts).values(
        id=rollout_id,
        model_id=canary.model_id,
        control=control.name,
        canary=canary.name,
        owner_tenant_id=owner,
        salt=rollout_id,
        state=_document(state),
        phase=state.phase,
        is_live=True,
    )
    row = (await connection.execute(made.returning(rollouts))).mappings().one()
    return rollout_of(row)


async def save(connection: AsyncConnection, kept: KeptRollout, *, is_split_new: bool) -> None:
    """Store a rollout whose row was locked by `lock`, with the next version."""
    state = kept.state
    has_started, has_ended = state.phase is not Phase.PLANNED, state.phase in ENDED
    t = rollouts.c
    values: dict[str, Any] = {
        "state": _document(state),
        "phase": state.phase,
        "is_live": kept.is_live,
        "version": t.version + 1,
    }
    if has_started:
        values["started_at"] = func.coalesce(t.started_at, func.clock_timestamp())
    if has_ended:
        values["ended_at"] = func.coalesce(t.ended_at, func.clock_timestamp())
    if is_split_new:
        values["split_at"] = func.clock_timestamp()
    await connection.execute(update(rollouts).where(t.id == kept.id).values(**values))


async def record(
    connection: AsyncConnection, rollout_id: str, event: str, state: Rollout, actor_id: str = ""
) -> None:
    """Store the event of a step, and delete the oldest events above the limit."""
    verdict = state.verdict if state.phase is Phase.HALTED else None
    row = {
        "id": new_id("revent"),
        "rollout_id": rollout_id,
        "at": func.clock_timestamp(),
        "event": event,
        "actor_id": actor_id,
        "phase": state.phase,
        "reason": state.reason or "",
        "stage": state.stage,
        "wanted": state.wanted,
        "share": state.share,
        "mirrored": state.mirrored,
        "detail": "" if verdict is None else explain(verdict),
        "verdict": None if verdict is None else verdict_document(verdict),
    }
    await connection.execute(insert(rollout_events).values(**row))
    t = rollout_events.c
    last = select(t.id).where(t.rollout_id == rollout_id).order_by(t.id.desc())
    oldest = last.offset(_EVENTS_MAX).limit(1).scalar_subquery()
    old = delete(rollout_events).where(t.rollout_id == rollout_id, t.id <= oldest)
    await connection.execute(old)


async def write_split(
    connection: AsyncConnection, kept: KeptRollout, wanted: tuple[int, int] | None
) -> bool:
    """Set or delete the split of a model, and return whether the split changed.

    Args:
        connection: Connection in the transaction of the step.
        kept: Stored rollout.
        wanted: Share and mirrored share in basis points, or None to delete the split.
    """
    t = splits.c
    query = select(t.rollout_id, t.share, t.mirrored).where(t.id == kept.model_id)
    there = (await connection.execute(query)).tuples().first()
    if wanted is None:
        if there is None or there[0] != kept.id:
            return False
        await connection.execute(delete(splits).where(t.id == kept.model_id))
        return True
    if there == (kept.id, *wanted):
        return False
    share, mirrored = wanted
    values = {
        "rollout_id": kept.id,
        "control": kept.control,
        "canary": kept.canary,
        "share": share,
        "mirrored": mirrored,
        "salt": kept.salt,
    }
    made = insert(splits).values(id=kept.model_id, **values)
    await connection.execute(made.on_conflict_do_update(index_elements=["id"], set_=values))
    return True


async def split_version(connection: AsyncConnection, model_id: str) -> int:
    """Return the version of the state with the model's present split, or 0 for a pruned version."""
    t = changes.c
    newest = select(func.max(t.version)).where(t.kind == "splits", t.object_id == model_id)
    return int(await connection.scalar(newest) or 0)


async def confirm(connection: AsyncConnection, said: Confirmation) -> None:
    """Store a confirmation, which has a worker process's version and its missing bases."""
    values = {
        "version": said.version,
        "oldest_open_unix_ms": said.oldest_open_ms,
        "missing_bases": sorted(said.missing_bases),
        "seen_at": func.clock_timestamp(),
    }
    made = insert(gateway_confirmations).values(id=said.gateway_id, **values)
    await connection.execute(made.on_conflict_do_update(index_elements=["id"], set_=values))


async def gateways(connection: AsyncConnection) -> list[GatewayFacts]:
    """Return the recent confirmations of all gateways."""
    t = gateway_confirmations.c
    lately = t.seen_at > func.now() - timedelta(minutes=1)
    rows = await connection.execute(
        select(t.version, t.oldest_open_unix_ms, t.seen_at, t.missing_bases).where(lately)
    )
    return [
        GatewayFacts(version, oldest, _ms(seen_at), frozenset(missing))
        for version, oldest, seen_at, missing in rows.tuples()
    ]


async def prune_gateways(connection: AsyncConnection) -> None:
    """Delete the confirmations of gateways that have long been silent."""
    gone = gateway_confirmations.c.seen_at < func.now() - _GATEWAYS_KEPT
    await connection.execute(delete(gateway_confirmations).where(gone))


async def release_of(
    connection: AsyncConnection, model_id: str, name: str
) -> PreparedRelease | None:
    """Return a release of a model, or None if the release does not exist."""
    t = releases.c
    query = select(t.base_digest, t.adapter_digest, t.pool_id)
    row = (await connection.execute(query.where(t.id == release_id(model_id, name)))).first()
    return None if row is None else PreparedRelease(model_id, name, row[0], row[1], row[2] or "")


async def gone(connection: AsyncConnection, kept: KeptRollout) -> Reason | None:
    """Return why an unfinished rollout cannot continue, or None if it can."""
    arms = [release_id(kept.model_id, name) for name in (kept.control, kept.canary)]
    there = select(func.count()).where(releases.c.id.in_(arms)).scalar_subquery()
    query = select(models.c.release, there, func.coalesce(tenants.c.is_disabled, False))
    query = query.outerjoin(tenants, tenants.c.id == models.c.owner_tenant_id)
    row = (await connection.execute(query.where(models.c.id == kept.model_id))).first()
    if row is None or row[1] < len(arms):
        return Reason.RELEASE_GONE
    if row[0] != kept.control:
        return Reason.MODEL_CHANGED
    return Reason.OWNER_DISABLED if row[2] else None


async def plan_of(connection: AsyncConnection, model_id: str) -> Plan:
    """Return the rollout plan of a model.

    Raises:
        PlatformError: Another version of the control plane wrote the plan, in an unknown form.
    """
    document = await stored_plan(connection, model_id)
    if document is None:
        return Plan()
    try:
        return Plan.model_validate_json(json.dumps(document))
    except ValidationError:
        message = f"the plan of model {model_id} cannot be read: set it anew, or delete it"
        raise PlatformError(ErrorCode.CONFLICT, message, param="plan") from None


async def stored_plan(connection: AsyncConnection, model_id: str) -> dict[str, Any] | None:
    """Return the stored plan of a model, or None if the default plan applies."""
    query = select(rollout_plans.c.plan).where(rollout_plans.c.id == model_id)
    return await connection.scalar(query)


async def live_phases(connection: AsyncConnection) -> dict[str, int]:
    """Return the numbers of live rollouts by phase."""
    found = await connection.execute(_LIVE_PHASES)
    return dict(found.tuples().all())


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON, for records and clients."""
    counts = {"suspect": verdict.suspect, "reference": verdict.reference}
    return {
        "metric": verdict.metric.value,
        "stage": verdict.stage,
        **{name: {"bad": count.bad, "total": count.total} for name, count in counts.items()},
        "tolerated": verdict.tolerated,
        "log_e": verdict.log_e,
        "log_needed": verdict.log_needed,
        "window_end_unix_ms": verdict.window_end_ms,
        "at_unix_ms": verdict.at_ms,
        "explanation": explain(verdict),
    }


def _document(state: Rollout) -> Any:
    return STATE.dump_python(state, mode="json")


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
