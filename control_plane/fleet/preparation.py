"""Prepares pools for rollouts, in the caller's transaction. Every function can be repeated.

The present replicas serve a new adapter as soon as their nodes have the adapter. A release with
another base has a separate pool. During the rollout this new pool has the replicas for its share of
the traffic plus one. The old pool keeps all of its replicas until the end. Each rollout has its own
demand in the pool (`pool_demands`), so that it overwrites neither another rollout's demand nor the
operators' number. The sum of all demands and of the replicas for other models is the pool's
`rollout_replicas`. The pool has the larger of `rollout_replicas` and `replicas_wanted`. After a
rollout the fleet's leader retires the pool of the replaced release (`retire_pools`). The leader
first waits for a short delay, and until the pool has no other user. The demand ends even if the
pool is not retired.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import (
    ColumnElement,
    and_,
    case,
    delete,
    exists,
    func,
    or_,
    select,
    table,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import column

from control_plane.audit import repository as audit
from control_plane.audit.repository import AuditRow
from control_plane.fleet.model import REPLICAS_MAX, ReplicaState
from control_plane.tables import (
    aliases,
    cells,
    models,
    pool_demands,
    pools,
    releases,
    replicas,
    splits,
    tenants,
)
from sluice.ids import new_id
from sluice.profiles import FRAMES
from sluice.split import SHARE_MAX

# extra replicas beyond the need of a share, so that one replica may fail while the others serve
SURGE = 1
# Delay in seconds before a pool is retired, so that no gateway uses the pool any more. A gateway
# that is silent for longer counts as stopped.
RETIRE_AFTER_S = 15.0
_USERS_MAX = 3  # largest number of a pool's users named in messages
_RETIREMENTS_MAX = 20  # largest number of retired pools per step

# A pool's wanted number of replicas, which the scaling loop sets. If the pool is not scaled, it is
# the operators' number.
_WANTED = func.coalesce(pools.c.scaled_replicas, pools.c.replicas_wanted)
# Columns of a table of the scaling domain, which imports the fleet. They are named here to avoid an
# import cycle.
_scalings = table(
    "pool_scalings",
    *map(column, ("pool_id", "is_on", "pin", "pin_prefill", "pin_until", "pinned_by")),
)
# Columns of a table with artifacts by node. The table belongs to the distribution domain, whose
# imports lead to rollouts and back to this module. They are named here to avoid an import cycle.
_artifacts = table("node_artifacts", column("node_id"), column("digest"))


@dataclass(frozen=True, slots=True)
class PreparedRelease:
    """A model's present or next release.

    Digests are in hex. An empty adapter digest means the base alone.

    Attributes:
        pool_id: Pool that serves the release, or empty without a pool.
    """

    model_id: str
    name: str
    base_digest: str
    adapter_digest: str
    pool_id: str


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """The replicas that a pool needs.

    Attributes:
        wanted: Number of replicas that operators or the scaling loop have set.
        rollout: Number of replicas that this rollout needs, or None if it has no demand.
        is_ending: Whether the rollout's demand is about to be deleted.
    """

    wanted: int
    rollout: int | None = None
    is_ending: bool = False


def serving(wanted: int, share: int) -> int:
    """Return the number of replicas for a share (basis points) of the work of `wanted` replicas."""
    return max(1, -(-wanted * share // SHARE_MAX))


def together(steady: int, demands: Iterable[int]) -> int | None:
    """Return the number of replicas that a pool needs for rollouts, or None without rollouts.

    Args:
        steady: Number of replicas for models without a rollout to this pool.
        demands: Demands of the rollouts, as numbers of replicas.
    """
    found = list(demands)
    return min(REPLICAS_MAX, steady + sum(found)) if found else None


def replicas_after(kept: PoolDemand, dropped: PoolDemand) -> int:
    """Return the wanted number of replicas of the pool that replaces another pool.

    The number is the demand of the rollout's last stage, or the operators' number if that is
    larger. With the sum of both numbers, repeated changes of a model between two pools would
    enlarge both pools without bound.
    """
    return min(REPLICAS_MAX, max(kept.wanted, serving(dropped.wanted, SHARE_MAX)))


def is_settled(kept: PoolDemand, dropped: PoolDemand) -> bool:
    """Return whether an ended rollout has no demand left, or never had a demand."""
    return kept.rollout is None and (dropped.rollout is None or dropped.is_ending)


async def prepare(
    connection: AsyncConnection, control: PreparedRelease, canary: PreparedRelease, share: int
) -> None:
    """Request replicas in the canary's pool for a share (basis points) of the model's requests."""
    if not _has_own_pool(control, canary):
        return
    known = await _locked(connection, canary.model_id, control.pool_id, canary.pool_id)
    if len(known) < 2:
        return
    demand = min(REPLICAS_MAX, serving(known[control.pool_id].wanted, share) + SURGE)
    await _demand(connection, canary, demand)
    await _forget(connection, control)
    for pool_id in (control.pool_id, canary.pool_id):
        await _write(connection, pool_id, retire_at=None)
        await _renew(connection, pool_id)


async def is_ready(
    connection: AsyncConnection, control: PreparedRelease, canary: PreparedRelease, share: int
) -> bool:
    """Return whether the canary's pool has enough ready replicas with its adapter for the share."""
    needed = 1
    if _has_own_pool(control, canary):
        known = await _locked(connection, canary.model_id, control.pool_id, canary.pool_id)
        if len(known) < 2:
            return False
        needed = serving(known[control.pool_id].wanted, share)
        needed += await _needed_besides(connection, canary, known[canary.pool_id].wanted)
    nodes = await _serving_nodes(connection, canary.pool_id)
    if len(nodes) < min(needed, REPLICAS_MAX):
        return False
    return not canary.adapter_digest or await _hold(connection, set(nodes), canary.adapter_digest)


async def settle(
    connection: AsyncConnection, kept: PreparedRelease, dropped: PreparedRelease
) -> None:
    """End the request of `prepare`, after which `kept` serves alone.

    The pool of `dropped` is retired.
    """
    if not _has_own_pool(kept, dropped):
        return
    known = await _locked(connection, kept.model_id, kept.pool_id, dropped.pool_id)
    if len(known) < 2:
        return
    one, other = known[kept.pool_id], known[dropped.pool_id]
    if is_settled(one, other):
        return
    if one.rollout is not None:
        wanted = replicas_after(one, other)
        await _write(connection, kept.pool_id, replicas_wanted=wanted)
        await _record(connection, kept.pool_id, one.wanted, wanted, f"rollout of {kept.model_id}")
        await _forget(connection, kept)
        await _renew(connection, kept.pool_id)
        await _follow(connection, kept, dropped)
    await _write(connection, dropped.pool_id, retire_at=_soon(pools.c.retire_at))
    ends_at = _soon(pool_demands.c.ends_at)
    await connection.execute(update(pool_demands).where(_own(dropped)).values(ends_at=ends_at))


async def abandon(connection: AsyncConnection, model_id: str) -> None:
    """End the demands of `prepare` for a model whose release no longer exists.

    The pool that serves the model keeps the replicas of the last stage. Any other pool returns to
    the operators' number, because the pool to be retired is unknown.
    """
    t, d = pools.c, pool_demands.c
    held = select(t.id, _WANTED, d.replicas, t.id == models.c.pool_id)
    held = held.join(pool_demands, d.pool_id == t.id).join(models, models.c.id == d.model_id)
    held = held.where(d.model_id == model_id).order_by(t.id)
    rows = await connection.execute(held.with_for_update(of=pools, key_share=True))
    for pool_id, wanted, asked, is_serving in rows.all():
        demand = and_(d.pool_id == pool_id, d.model_id == model_id)
        if not is_serving:
            ending = update(pool_demands).where(demand)
            await connection.execute(ending.values(ends_at=_soon(d.ends_at)))
            continue
        kept = max(wanted, asked - SURGE)
        await _write(connection, pool_id, replicas_wanted=kept)
        await _record(connection, pool_id, wanted, kept, f"rollout of {model_id}")
        await connection.execute(delete(pool_demands).where(demand))
        await _renew(connection, pool_id)


async def retire_pools(connection: AsyncConnection) -> list[str]:
    """Set the pools to be retired to 0 replicas, a few per step, and return their ids.

    Demands of ended rollouts are deleted as well. A pool that a model or a rollout uses again is
    checked later.
    """
    t, d = pools.c, pool_demands.c
    is_over = exists().where(d.pool_id == t.id, d.ends_at <= func.now())
    is_orphan = and_(t.rollout_replicas.is_not(None), ~exists().where(d.pool_id == t.id))
    is_due = func.coalesce(t.retire_at <= func.now(), False)
    due = (
        select(t.id, _WANTED, is_due)
        .where(or_(is_due, is_over, is_orphan))
        .order_by(t.retire_at)
        .limit(_RETIREMENTS_MAX)
        .with_for_update(skip_locked=True)
    )
    retired: list[str] = []
    for pool_id, wanted, is_retiring in (await connection.execute(due)).all():
        over = delete(pool_demands).where(d.pool_id == pool_id, d.ends_at <= func.now())
        await connection.execute(over)
        is_wanted = await _renew(connection, pool_id) is not None
        if not is_retiring:
            continue
        if is_wanted or await users(connection, pool_id):
            await _write(connection, pool_id, retire_at=_soon(t.retire_at))
            continue
        await _write(connection, pool_id, replicas_wanted=0, scaled_replicas=None, retire_at=None)
        unscaled = update(_scalings).where(_scalings.c.pool_id == pool_id)
        await connection.execute(unscaled.values(is_on=False))
        await _record(connection, pool_id, wanted, 0, "no request gets its release any more")
        retired.append(pool_id)
    return retired


async def pin(connection: AsyncConnection, pool_id: str, replicas: int) -> None:
    """Fix a scaled pool at the operators' number, until an operator resumes scaling."""
    t = _scalings.c
    pinned = update(_scalings).where(t.pool_id == pool_id, t.is_on)
    values = {"pin": replicas, "pin_prefill": None, "pin_until": None}
    values |= {"pinned_by": "replicas_wanted"}
    await connection.execute(pinned.values(values))


async def end_demands(connection: AsyncConnection, pool_id: str) -> None:
    """Delete the demands of ended rollouts in a pool. The caller has locked the pool's row."""
    t = pool_demands.c
    ended = delete(pool_demands).where(t.pool_id == pool_id, t.ends_at.is_not(None))
    await connection.execute(ended)
    await _renew(connection, pool_id)


async def users(
    connection: AsyncConnection, pool_id: str, besides: Collection[str] = ()
) -> list[str]:
    """Return the first users of a pool (models, releases and others), as texts for messages.

    Args:
        connection: Connection to read with.
        pool_id: Id of the pool.
        besides: Ids of models that are ignored, together with their releases.
    """
    others = sorted(besides)
    release = and_(releases.c.pool_id == pool_id, releases.c.model_id.not_in(others))
    pins = func.jsonb_each_text(tenants.c.pins).table_valued("key", "value")
    named = or_(
        releases.c.id == splits.c.id + "@" + splits.c.control,
        releases.c.id == splits.c.id + "@" + splits.c.canary,
    )
    queries = (
        select("model " + models.c.id).where(
            models.c.pool_id == pool_id, models.c.id.not_in(others)
        ),
        select("rollout of " + splits.c.id).join(releases, named).where(release),
        select("alias " + aliases.c.id)
        .join(releases, releases.c.id == aliases.c.release_id)
        .where(release),
        select("pin of tenant " + tenants.c.id)
        .join(pins, tenants.c.pins != text("'{}'::jsonb"))
        .join(releases, releases.c.id == pins.c.key + "@" + pins.c.value)
        .where(release),
    )
    found: list[str] = []
    for query in queries:
        found += (await connection.scalars(query.limit(_USERS_MAX))).all()
    return found[:_USERS_MAX]


def _has_own_pool(one: PreparedRelease, other: PreparedRelease) -> bool:
    return bool(one.pool_id and other.pool_id) and one.pool_id != other.pool_id


def _own(release: PreparedRelease) -> ColumnElement[bool]:
    """Return the condition that a demand belongs to the release's model in the release's pool."""
    t = pool_demands.c
    return and_(t.pool_id == release.pool_id, t.model_id == release.model_id)


async def _locked(
    connection: AsyncConnection, model_id: str, *ids: str
) -> Mapping[str, PoolDemand]:
    """Lock the given pools, and return their demands with the demand of one model's rollout."""
    t, d = pools.c, pool_demands.c
    held = select(t.id, _WANTED).where(t.id.in_(sorted(ids))).order_by(t.id)
    rows = await connection.execute(held.with_for_update(key_share=True))
    found = {key: PoolDemand(wanted) for key, wanted in rows.all()}
    query = select(d.pool_id, d.replicas, d.ends_at.is_not(None))
    query = query.where(d.model_id == model_id, d.pool_id.in_(sorted(found)))
    for key, asked, is_ending in (await connection.execute(query)).all():
        found[key] = PoolDemand(found[key].wanted, asked, is_ending)
    return found


async def _demand(connection: AsyncConnection, canary: PreparedRelease, demand: int) -> None:
    """Store how many replicas a rollout needs. `asked_at` changes only if the number grows."""
    key = {"pool_id": canary.pool_id, "model_id": canary.model_id}
    made = insert(pool_demands).values(**key, replicas=demand, asked_at=func.clock_timestamp())
    t, coming = pool_demands.c, made.excluded
    asked_at = case((coming.replicas > t.replicas, coming.asked_at), else_=t.asked_at)
    changed = {"replicas": demand, "asked_at": asked_at, "ends_at": None}
    await connection.execute(
        made.on_conflict_do_update(index_elements=["pool_id", "model_id"], set_=changed)
    )


async def _forget(connection: AsyncConnection, release: PreparedRelease) -> None:
    await connection.execute(delete(pool_demands).where(_own(release)))


async def _renew(connection: AsyncConnection, pool_id: str) -> int | None:
    """Recompute, store and return the total demand of rollouts in a locked pool."""
    t = pool_demands.c
    query = select(t.model_id, t.replicas).where(t.pool_id == pool_id)
    demands = dict((await connection.execute(query)).all())
    steady = await _steady(connection, pool_id, demands.keys()) if demands else 0
    demand = together(steady, demands.values())
    await _write(connection, pool_id, rollout_replicas=demand)
    return demand


async def _steady(connection: AsyncConnection, pool_id: str, besides: Collection[str]) -> int:
    """Return the number of replicas for models without a rollout to the pool."""
    if not await users(connection, pool_id, besides):
        return 0
    query = select(_WANTED).where(pools.c.id == pool_id)
    return await connection.scalar(query) or 0


async def _needed_besides(connection: AsyncConnection, canary: PreparedRelease, wanted: int) -> int:
    """Return the number of replicas that the canary's pool needs without this rollout.

    Of other rollouts, only earlier demands are included. So a later rollout waits for an earlier
    one, and never the reverse. Replicas beyond these needs are not required.
    """
    t = pool_demands.c
    query = select(t.model_id, t.replicas, t.asked_at).where(t.pool_id == canary.pool_id)
    rows = (await connection.execute(query)).all()
    own = next((asked_at for model, _, asked_at in rows if model == canary.model_id), None)
    others = [row for row in rows if row[0] != canary.model_id]
    needed = sum(asked - SURGE for _, asked, at in others if own is None or at < own)
    besides = {canary.model_id, *(model for model, *_ in others)}
    is_shared = await users(connection, canary.pool_id, besides)
    return needed + (wanted if is_shared else 0)


async def _follow(
    connection: AsyncConnection, kept: PreparedRelease, dropped: PreparedRelease
) -> None:
    """Move the model's other releases with the same base from the dropped pool to the kept pool.

    During the rollout each release was served in its own pool (`control_plane.models.routes`).
    """
    t = releases.c
    query = update(releases).where(
        t.model_id == kept.model_id,
        t.base_digest == kept.base_digest,
        t.pool_id == dropped.pool_id,
    )
    await connection.execute(query.values(pool_id=kept.pool_id))


async def _serving_nodes(connection: AsyncConnection, pool_id: str) -> list[str]:
    """Return the nodes of a pool's ready and reachable replicas, one entry per replica."""
    t = replicas.c
    is_reached: ColumnElement[bool] = or_(t.profile != FRAMES.name, cells.c.router_id != "")
    query = (
        select(t.node_id)
        .join(cells, cells.c.id == t.cell_id)
        .where(t.pool_id == pool_id, t.state == int(ReplicaState.READY), is_reached)
        .where(~t.is_draining, ~t.sleeps)
    )
    return list((await connection.scalars(query)).all())


async def _hold(connection: AsyncConnection, nodes: set[str], digest: str) -> bool:
    """Return whether all nodes have an artifact. This is also true if no node reports artifacts."""
    t = _artifacts.c
    query = select(t.node_id, func.bool_or(t.digest == digest)).where(t.node_id.in_(sorted(nodes)))
    held = dict((await connection.execute(query.group_by(t.node_id))).all())
    return not held or (len(held) == len(nodes) and all(held.values()))


def _soon(moment: ColumnElement[datetime | None]) -> ColumnElement[object]:
    """Return the time at which a pool is retired. A stored time in the future does not change."""
    later = func.now() + timedelta(seconds=RETIRE_AFTER_S)
    return case((moment > func.now(), moment), else_=later)


async def _write(connection: AsyncConnection, pool_id: str, **values: object) -> None:
    await connection.execute(update(pools).where(pools.c.id == pool_id).values(**values))


async def _record(
    connection: AsyncConnection, pool_id: str, before: int, after: int, why: str
) -> None:
    """Write an audit row about a change of the operators' number of replicas."""
    row = AuditRow(
        id=new_id("audit"),
        actor_id="fleet",
        actor_role="system",
        action="replace",
        kind="pools",
        object_id=pool_id,
        outcome="done",
        detail=why,
        before={"id": pool_id, "replicas_wanted": before},
        after={"id": pool_id, "replicas_wanted": after},
        request_id="",
        idempotency_key="",
    )
    await audit.record(connection, [row])
