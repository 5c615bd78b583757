"""Caches the status of all pools, which is computed at most once a second."""

import time

from gateway.dispatch.routers import RouterLinks
from gateway.embedding.embedders import Embedders
from gateway.pool_status import PoolStatus, status_of_cells
from sluice.engines import profile_of
from sluice.profiles import EMBED
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as control

_FRESH_S = 1.0
_UNKNOWN = PoolStatus()


class PoolBoard:
    """Caches the status of pools."""

    def __init__(self, state: ControlState, links: RouterLinks, embedders: Embedders) -> None:
        self._state = state
        self._links = links
        self._embedders = embedders
        self._looked_at_s = float("-inf")
        self._statuses: dict[str, PoolStatus] = {}

    def status(self, pool_id: str) -> PoolStatus:
        """Return a pool's status, at most one second old. An unknown pool has no replica."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= _FRESH_S:
            self._looked_at_s = now_s
            self._statuses = self._looked_up()
        return self._statuses.get(pool_id, _UNKNOWN)

    def _looked_up(self) -> dict[str, PoolStatus]:
        starting: dict[str, int] = {}
        for replica in self._state.replicas.values():
            if replica.state == control.REPLICA_STATE_STARTING:
                starting[replica.pool_id] = starting.get(replica.pool_id, 0) + 1
        return {
            pool_id: self._embedders.status(pool_id, starting.get(pool_id, 0))
            if profile_of(pool.engine) is EMBED
            else status_of_cells(self._links.views(pool_id), starting.get(pool_id, 0))
            for pool_id, pool in self._state.pools.items()
        }
