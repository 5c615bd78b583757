"""Reads and writes the rows of actuators, with their nodes, their pools and their requests."""

from collections import Counter
from collections.abc import Collection, Mapping

from sqlalchemy import delete, exists, func, null, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.scaling.actuators import Actuator, owners
from control_plane.scaling.nodes import AskOutcome, GroupNode, NodeGroup, NodesAsk, ask_warning
from control_plane.scaling.tables import actuator_asks, pool_scalings

_QUIET = AskOutcome("kept")
_UNNAMED = AskOutcome("failed", "it is not in the file of CONTROL_PLANE__SCALING_ACTUATORS")


async def groups(
    connection: AsyncConnection, actuators: Mapping[str, Actuator]
) -> dict[str, NodeGroup]:
    """Return the nodes and pools of each actuator that a scaled pool has chosen.

    The number of replicas includes the needs of rollouts, which may exceed the scaling loop's
    number.
    """
    p, s = tables.pools.c, pool_scalings.c
    count = func.greatest(p.scaled_replicas, func.coalesce(p.rollout_replicas, 0))
    query = (
        select(s.actuator, p.id, count + p.scaled_sleepers, s.replicas_per_node)
        .join(pool_scalings, s.pool_id == p.id)
        .where(s.is_on, s.actuator != "", p.scaled_replicas.is_not(None))
    )
    pools: dict[str, dict[str, tuple[int, int]]] = {}
    for name, pool_id, wanted, per_node in await connection.execute(query):
        pools.setdefault(name, {})[pool_id] = (wanted, per_node)
    n, r = tables.nodes.c, tables.replicas.c
    rows = (await connection.execute(select(n.id, n.is_lost, n.is_surplus))).all()
    of_node = owners([row.id for row in rows], actuators)
    held: dict[str, Counter[str]] = {}
    counts = select(r.node_id, r.pool_id, func.count()).group_by(r.node_id, r.pool_id)
    for node_id, pool_id, replicas in await connection.execute(counts):
        held.setdefault(node_id, Counter())[pool_id] = replicas
    nodes: dict[str, list[GroupNode]] = {}
    for node_id, is_lost, is_surplus in rows:
        name, on_it = of_node.get(node_id, ""), held.get(node_id, Counter[str]())
        foreign = sum(count for it, count in on_it.items() if it not in pools.get(name, {}))
        node = GroupNode(node_id, on_it.total(), foreign, is_lost=is_lost, is_surplus=is_surplus)
        nodes.setdefault(name, []).append(node)
    return {
        name: NodeGroup(
            nodes.get(name, ()),
            found,
            actuators[name].nodes_min,
            actuators[name].nodes_max,
            is_ordered=actuators[name].kind == "kubernetes",
        )
        for name, found in pools.items()
        if name in actuators
    }


async def write_surplus(connection: AsyncConnection, node_ids: Collection[str]) -> None:
    """Cordon exactly the given nodes as surplus, and delete surplus nodes that have ended.

    A cordon by an operator is not removed.
    """
    n, r = tables.nodes.c, tables.replicas.c
    for is_surplus in (True, False):
        is_one = n.id.in_(sorted(node_ids))
        chosen = is_one if is_surplus else ~is_one
        query = update(tables.nodes).where(chosen, n.is_surplus != is_surplus)
        await connection.execute(query.values(is_surplus=is_surplus))
    is_held = exists().where(r.node_id == n.id)
    has_ended = n.is_surplus & n.is_lost & ~n.is_unschedulable & ~is_held
    await connection.execute(delete(tables.nodes).where(has_ended))


async def write_asks(
    connection: AsyncConnection,
    asks: Mapping[str, NodesAsk],
    outcomes: Mapping[str, AskOutcome],
    late_after_s: Mapping[str, float],
) -> None:
    """Store the state of the requests to all actuators that pools have chosen.

    Args:
        connection: Connection for the write.
        asks: Present requests, by actuator.
        outcomes: Results of the last requests, by actuator.
        late_after_s: Seconds after which missing nodes count as late, by actuator.
    """
    t, s = actuator_asks.c, pool_scalings.c
    chosen = set(await connection.scalars(select(s.actuator).where(s.actuator != "").distinct()))
    await connection.execute(delete(actuator_asks).where(t.name.not_in(sorted(chosen))))
    since = func.extract("epoch", func.now() - t.short_since)
    short_s = dict((await connection.execute(select(t.name, since))).tuples().all())
    for name in sorted(chosen):
        # An actuator whose pools are all switched off receives no request and has no state.
        ask = asks.get(name, NodesAsk(0, 0, 0))
        outcome = outcomes.get(name, _UNNAMED) if name in asks or name not in outcomes else _QUIET
        late_s = float(short_s.get(name) or 0.0) - late_after_s.get(name, 0.0)
        values = {
            "nodes_wanted": ask.wanted,
            "nodes_present": ask.present,
            "result": outcome.result,
            "warning": ask_warning(name, ask, outcome, late_s),
            "asked_at": func.now(),
        }
        first = func.now() if ask.missing else null()
        query = insert(actuator_asks).values(name=name, short_since=first, **values)
        lasting = func.coalesce(t.short_since, func.now()) if ask.missing else null()
        await connection.execute(
            query.on_conflict_do_update(
                index_elements=["name"], set_=values | {"short_since": lasting}
            )
        )
