"""Trial loads of canaries' adapters on nodes.

The module selects the trials of a node for its agent, and stores the results. A release without an
adapter needs no trial, because its replicas are ready only after they have loaded the base.
"""

from collections.abc import Collection

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.models.model import release_id
from control_plane.rollouts.tables import rollout_trials, rollouts
from sluice.watch import ControlState
from sluice.wire.agent.v1 import agent_pb2 as wire

_TRIALS_MAX = 256  # largest number of trials per node
_MESSAGE_MAX = 500


def trials_of(state: ControlState, pool_ids: Collection[str]) -> list[wire.Trial]:
    """Return the trial loads for a node that has replicas of the given pools. Pure."""
    found: list[wire.Trial] = []
    for split in sorted(state.splits.values(), key=lambda split: split.id):
        release = state.releases.get(release_id(split.id, split.canary))
        if release is not None and release.adapter_digest and release.pool_id in pool_ids:
            trial = wire.Trial(rollout_id=split.rollout_id, pool_id=release.pool_id)
            trial.adapter_digest = release.adapter_digest
            found.append(trial)
    return found[:_TRIALS_MAX]


async def write_trials(connection: AsyncConnection, message: wire.SyncRequest) -> None:
    """Store an agent's trial results. Results that are already stored are not written again."""
    found = {
        it.rollout_id: (it.code, it.message[:_MESSAGE_MAX].replace("\0", ""))
        for it in message.trial_results[:_TRIALS_MAX]
    }
    if not found:
        return
    t = rollout_trials.c
    is_own = t.node_id == message.node_id
    known = select(t.rollout_id, t.code, t.message).where(is_own, t.rollout_id.in_(sorted(found)))
    for rollout_id, code, text in (await connection.execute(known)).all():
        if found[rollout_id] == (code, text):
            del found[rollout_id]
    live = select(rollouts.c.id).where(rollouts.c.id.in_(sorted(found)), rollouts.c.is_live)
    for rollout_id in (await connection.scalars(live)).all():
        code, text = found[rollout_id]
        values = {"code": code, "message": text}
        made = insert(rollout_trials).values(
            rollout_id=rollout_id, node_id=message.node_id, **values
        )
        keys = ["rollout_id", "node_id"]
        await connection.execute(made.on_conflict_do_update(index_elements=keys, set_=values))


async def codes_of(connection: AsyncConnection, rollout_id: str) -> frozenset[str]:
    """Return the result codes of all nodes. An empty code means that the trial succeeded."""
    query = select(rollout_trials.c.code).where(rollout_trials.c.rollout_id == rollout_id)
    return frozenset((await connection.scalars(query)).all())
