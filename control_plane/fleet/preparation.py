"""What rollouts ask of the fleet; everything runs in the caller's transaction, and may run again.

An adapter is served by the replicas that are there: it has to lie on their nodes. Another base has
a pool of its own: while it is rolled out, that pool has as many replicas as its share of the
traffic needs and one more, beside the old pool, which keeps all of its own until the end. The
demand is a column of its own, so what operators want is never overwritten, and an effective number
is the larger of the two. The pool of the release that nobody gets any more is given up by the
fleet's leader: a little later, and not before nothing stands for it (`retire_pools`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ColumnElement, and_, case, func, or_, select, table, text, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import column

from control_plane.audit import repository as audit
from control_plane.audit.repository import AuditRow
from control_plane.fleet.model import ReplicaState
from control_plane.tables import aliases, cells, models, pools, releases, replicas, splits, tenants
from sluice.ids import new_id
from sluice.profiles import FRAMES
from sluice.split import SHARE_MAX

SURGE = 1  # replicas beyond what a share needs: one may end while the others serve
# A gateway that is silent for so long is not waited for either when a split ends.
RETIRE_AFTER_S = 15.0
_USERS_MAX = 3  # of a pool, named to people
_RETIREMENTS_MAX = 20  # in one step

# What lies on which node. The table is distribution's, whose metrics are all metrics, rollouts'
# too, which build on this module: named here, it is no circle.
_artifacts = table("node_artifacts", column("node_id"), column("digest"))


@dataclass(frozen=True, slots=True)
class Release:
    """What a model stands for, or shall; digests in hex, no adapter: the base alone.

    Attributes:
        pool_id: That serves it; empty: none.
    """

    model_id: str
    name: str
    base_digest: str
    adapter_digest: str
    pool_id: str


@dataclass(frozen=True, slots=True)
class Demand:
    """What is wanted of a pool.

    Attributes:
        wanted: By operators.
        rollout: By a rollout; None: there is none.
        is_retiring: It is to be given up.
    """

    wanted: int
    rollout: int | None = None
    is_retiring: bool = False


def serving(wanted: int, share: int) -> int:
    """Return how many replicas serve a share (basis points) of what `wanted` ones serve."""
    return max(1, -(-wanted * share // SHARE_MAX))


def kept_after(kept: Demand, dropped: Demand, *, is_shared: bool) -> int:
    """Return how many replicas the pool wants that takes over from another one.

    Args:
        kept: The pool that goes on; it was canary's.
        dropped: The pool that it takes over from.
        is_shared: Whether it serves other models, too: then it needs what it had besides.
    """
    needed = dropped.wanted + (kept.wanted if is_shared else 0)
    return max(kept.wanted, needed)


def is_settled(kept: Demand, dropped: Demand) -> bool:
    """Return whether a rollout that ended asks for nothing more; true if it never did."""
    return kept.rollout is None and (dropped.rollout is None or dropped.is_retiring)


async def prepare(
    connection: AsyncConnection, control: Release, canary: Release, share: int
) -> None:
    """Ask the fleet to get ready to serve a share (basis points) of a model by canary."""
    if not _has_own_pool(control, canary):
        return
    known = await _locked(connection, control.pool_id, canary.pool_id)
    if len(known) < 2:
        return
    demand = await _needed(connection, known, control, canary, share) + SURGE
    for pool_id, rollout in ((control.pool_id, None), (canary.pool_id, demand)):
        await _write(connection, pool_id, rollout_replicas=rollout, retire_at=None)


async def is_ready(
    connection: AsyncConnection, control: Release, canary: Release, share: int
) -> bool:
    """Return whether replicas are ready that can serve the share by canary, with its adapter."""
    needed = 1
    if _has_own_pool(control, canary):
        known = await _locked(connection, control.pool_id, canary.pool_id)
        if len(known) < 2:
            return False
        needed = await _needed(connection, known, control, canary, share)
    nodes = await _serving_nodes(connection, canary.pool_id)
    if len(nodes) < needed:
        return False
    return not canary.adapter_digest or await _hold(connection, set(nodes), canary.adapter_digest)


async def settle(connection: AsyncConnection, kept: Release, dropped: Release) -> None:
    """End what `prepare` asked for: `kept` serves alone, the pool of `dropped` is given up."""
    if not _has_own_pool(kept, dropped):
        return
    known = await _locked(connection, kept.pool_id, dropped.pool_id)
    if len(known) < 2:
        return
    one, other = known[kept.pool_id], known[dropped.pool_id]
    if is_settled(one, other):
        return
    if one.rollout is not None:
        is_shared = bool(await users(connection, kept.pool_id, besides=kept.model_id))
        wanted = kept_after(one, other, is_shared=is_shared)
        await _write(connection, kept.pool_id, replicas_wanted=wanted, rollout_replicas=None)
        await _record(connection, kept.pool_id, one.wanted, wanted, f"rollout of {kept.model_id}")
    await _write(connection, dropped.pool_id, retire_at=_soon())


async def retire_pools(connection: AsyncConnection) -> list[str]:
    """Let the pools that are to be given up go to 0 replicas, a few at once; return them.

    One that something stands for again is looked at again later.
    """
    t = pools.c
    due = (
        select(t.id, t.replicas_wanted)
        .where(t.retire_at <= func.now())
        .order_by(t.retire_at)
        .limit(_RETIREMENTS_MAX)
        .with_for_update(skip_locked=True)
    )
    retired: list[str] = []
    for pool_id, wanted in (await connection.execute(due)).all():
        if await users(connection, pool_id):
            await _write(connection, pool_id, retire_at=_soon())
            continue
        await _write(connection, pool_id, replicas_wanted=0, rollout_replicas=None, retire_at=None)
        await _record(connection, pool_id, wanted, 0, "nobody gets its release any more")
        retired.append(pool_id)
    return retired


async def users(connection: AsyncConnection, pool_id: str, besides: str = "") -> list[str]:
    """Return what stands for a pool, in words, the first few.

    Args:
        connection: To read with.
        pool_id: The pool.
        besides: A model that does not count, with its releases.
    """
    release = and_(releases.c.pool_id == pool_id, releases.c.model_id != besides)
    pins = func.jsonb_each_text(tenants.c.pins).table_valued("key", "value")
    named = or_(
        releases.c.id == splits.c.id + "@" + splits.c.control,
        releases.c.id == splits.c.id + "@" + splits.c.canary,
    )
    queries = (
        select("model " + models.c.id).where(models.c.pool_id == pool_id, models.c.id != besides),
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


def _has_own_pool(one: Release, other: Release) -> bool:
    return bool(one.pool_id and other.pool_id) and one.pool_id != other.pool_id


async def _locked(connection: AsyncConnection, *ids: str) -> Mapping[str, Demand]:
    """Return what is wanted of the pools, held until the transaction ends."""
    t = pools.c
    query = select(t.id, t.replicas_wanted, t.rollout_replicas, t.retire_at.is_not(None))
    rows = await connection.execute(
        query.where(t.id.in_(sorted(ids))).order_by(t.id).with_for_update(key_share=True)
    )
    return {key: Demand(*demand) for key, *demand in rows.all()}


async def _needed(
    connection: AsyncConnection,
    known: Mapping[str, Demand],
    control: Release,
    canary: Release,
    share: int,
) -> int:
    """Return how many replicas serve the share and what the pool of canary serves besides."""
    needed = serving(known[control.pool_id].wanted, share)
    if await users(connection, canary.pool_id, besides=canary.model_id):
        needed += known[canary.pool_id].wanted
    return needed


async def _serving_nodes(connection: AsyncConnection, pool_id: str) -> list[str]:
    """Return the nodes of a pool's ready replicas that requests can reach, one each."""
    t = replicas.c
    is_reached: ColumnElement[bool] = or_(t.profile != FRAMES.name, cells.c.router_id != "")
    query = (
        select(t.node_id)
        .join(cells, cells.c.id == t.cell_id)
        .where(t.pool_id == pool_id, t.state == int(ReplicaState.READY), ~t.is_draining, is_reached)
    )
    return list((await connection.scalars(query)).all())


async def _hold(connection: AsyncConnection, nodes: set[str], digest: str) -> bool:
    """Return whether all nodes hold an artifact; also true where none says what it holds."""
    t = _artifacts.c
    query = select(t.node_id, func.bool_or(t.digest == digest)).where(t.node_id.in_(sorted(nodes)))
    held = dict((await connection.execute(query.group_by(t.node_id))).all())
    return not held or (len(held) == len(nodes) and all(held.values()))


def _soon() -> ColumnElement[object]:
    """Return when a pool is given up; the moment stands once it is set."""
    later = func.now() + timedelta(seconds=RETIRE_AFTER_S)
    return case((pools.c.retire_at > func.now(), pools.c.retire_at), else_=later)


async def _write(connection: AsyncConnection, pool_id: str, **values: object) -> None:
    await connection.execute(update(pools).where(pools.c.id == pool_id).values(**values))


async def _record(
    connection: AsyncConnection, pool_id: str, before: int, after: int, why: str
) -> None:
    """Leave an audit row: operators see what became of their number."""
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
