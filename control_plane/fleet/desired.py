"""The replicas that should run on each node, updated incrementally. Pure.

The cost of an update is proportional to the change. A pass over all replicas for every node would
take ten million steps per change of a large fleet.
"""

from collections.abc import Collection

from sluice.watch import ControlState
from sluice.wire.agent.v1 import agent_pb2 as wire
from sluice.wire.control.v1 import control_pb2 as control


class DesiredIndex:
    """An index of replicas by node, with the settings of their pools."""

    def __init__(self, state: ControlState) -> None:
        """Build the index from a state. Every later change must be passed to `apply`."""
        self._pools: dict[str, control.Pool] = {}
        self._replicas: dict[str, control.Replica] = {}
        self._of_node: dict[str, dict[str, control.Replica]] = {}
        self.restart(state)

    def restart(self, state: ControlState) -> None:
        """Rebuild the index from a state, because the single changes are not available."""
        self._pools = dict(state.pools)
        self._replicas, self._of_node = {}, {}
        for replica in state.replicas.values():
            self._put(replica)

    def apply(self, delta: control.WatchResponse) -> set[str]:
        """Apply changes, and return the nodes whose desired state may have changed."""
        nodes = {self._drop(replica_id) for replica_id in delta.removals.replicas}
        for replica in delta.upserts.replicas:
            nodes.add(self._drop(replica.id))
            nodes.add(self._put(replica))
        nodes |= self.nodes_of(self._take_pools(delta))
        return nodes - {""}

    def of(self, node_id: str, version: int) -> wire.SyncResponse:
        """Return the message with all replicas that should run on a node, in the order of ids."""
        response = wire.SyncResponse(version=version)
        mine = self._of_node.get(node_id, {})
        for _, replica in sorted(mine.items()):
            pool = self._pools.get(replica.pool_id)
            if pool is not None:
                response.replicas.add(
                    replica_id=replica.id,
                    pool_id=pool.id,
                    base_digest=pool.base_digest,
                    engine=pool.engine,
                    is_draining=replica.state == control.REPLICA_STATE_DRAINING,
                    engine_options=pool.engine_options,
                    accelerators=replica.accelerators,
                    is_quarantined=replica.is_quarantined,
                    sleeps=replica.sleeps,
                )
        return response

    def nodes_of(self, pool_ids: Collection[str]) -> set[str]:
        """Return the ids of the nodes that have replicas of the given pools."""
        if not pool_ids:
            return set()
        return {r.node_id for r in self._replicas.values() if r.pool_id in pool_ids} - {""}

    def _take_pools(self, delta: control.WatchResponse) -> set[str]:
        """Store the changed pools, and return the pools whose settings for agents have changed."""
        changed: set[str] = set()
        for pool_id in delta.removals.pools:
            if self._pools.pop(pool_id, None) is not None:
                changed.add(pool_id)
        for pool in delta.upserts.pools:
            before = self._pools.get(pool.id)
            if before is None or _agent_fields(before) != _agent_fields(pool):
                changed.add(pool.id)
            self._pools[pool.id] = pool
        return changed

    def _put(self, replica: control.Replica) -> str:
        self._replicas[replica.id] = replica
        if replica.node_id:
            self._of_node.setdefault(replica.node_id, {})[replica.id] = replica
        return replica.node_id

    def _drop(self, replica_id: str) -> str:
        """Remove a replica, and return its node, which is empty for an unknown replica."""
        before = self._replicas.pop(replica_id, None)
        if before is None or not before.node_id:
            return ""
        mine = self._of_node[before.node_id]
        del mine[replica_id]
        if not mine:
            del self._of_node[before.node_id]
        return before.node_id


def _agent_fields(pool: control.Pool) -> tuple[object, ...]:
    """Return the settings of a pool that agents use."""
    return pool.base_digest, pool.engine, dict(pool.engine_options)
