"""Derives the artifacts that each node should have from the watched state. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from control_plane.distribution.model import Priority
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire

_NOTHING: Mapping[str, Priority] = MappingProxyType({})
# A replica in these states does not start an engine again, so its base need not be fetched. A base
# that is on disk stays there while the agent runs the replica.
_ENDING = (wire.REPLICA_STATE_DRAINING, wire.REPLICA_STATE_STOPPED)
_KINDS = ("replicas", "pools", "models", "splits", "releases")


@dataclass(frozen=True, slots=True)
class _Served:
    """The pools that a node serves, and those whose bases it fetches ahead."""

    serving: frozenset[str]
    ahead: frozenset[str]


class WantedIndex:
    """Computes the artifacts that every node should have, and recomputes them after changes.

    Nodes that serve the same pools share one mapping. So for a thousand nodes with ten thousand
    adapters the cost is one pass over the state instead of ten million entries.
    """

    def __init__(self, state: ControlState) -> None:
        """Create the index on a state, which its owner updates in place."""
        self._state = state
        self._revisions: tuple[int, ...] = ()
        # Number of passes over the whole state. The results of `of` change only when this number
        # grows.
        self.looks = 0
        self._pools_of: dict[str, _Served] = {}
        self._of_pool: dict[str, dict[str, Priority]] = {}
        self._of_pools: dict[_Served, Mapping[str, Priority]] = {}
        self._before: dict[_Served, Mapping[str, Priority]] = {}
        self._ahead: Mapping[str, frozenset[str]] = {}

    def prefetch(self, ahead: Mapping[str, frozenset[str]]) -> None:
        """Set the pools whose bases a node fetches before it has a replica, by node."""
        if ahead != self._ahead:
            self._ahead = ahead
            self._revisions = ()

    def refresh(self) -> None:
        """Recompute if a relevant part of the state has changed."""
        revisions = tuple(self._state.revisions[kind] for kind in _KINDS)
        if revisions == self._revisions:
            return
        self._look()
        self._revisions = revisions
        self.looks += 1

    def of(self, node_id: str) -> Mapping[str, Priority]:
        """Return the priority of each artifact that a node should have, by digest.

        The same object is returned until the result changes. The bases of the node's replicas and
        the adapters of a rollout have priority WARMING. The adapters of all other models that the
        node serves have priority PREFETCH, and so have the bases that the node fetches ahead. An
        adapter of another release is fetched when a request needs it.
        """
        self.refresh()
        pools = self._pools_of.get(node_id)
        if pools is None:
            return _NOTHING
        known = self._of_pools.get(pools)
        if known is None:
            merged = _most_urgent(self._of_pool[pool] for pool in sorted(pools.serving))
            for pool_id in sorted(pools.ahead):
                merged.setdefault(self._state.pools[pool_id].base_digest, Priority.PREFETCH)
            before = self._before.pop(pools, None)
            # Nodes keep the old mapping object and all data derived from it while the content is
            # equal.
            if before is None or before != merged:
                before = MappingProxyType(merged)
            known = self._of_pools[pools] = before
        return known

    def _look(self) -> None:
        state = self._state
        pools_of: dict[str, set[str]] = {}
        for replica in state.replicas.values():
            if replica.node_id and replica.pool_id in state.pools and replica.state not in _ENDING:
                pools_of.setdefault(replica.node_id, set()).add(replica.pool_id)
        none = frozenset[str]()
        self._pools_of = {
            node_id: _Served(
                frozenset(pools_of.get(node_id, none)),
                frozenset(it for it in self._ahead.get(node_id, none) if it in state.pools),
            )
            for node_id in pools_of.keys() | self._ahead.keys()
        }
        self._of_pool = {
            pool_id: {pool.base_digest: Priority.WARMING} for pool_id, pool in state.pools.items()
        }
        served = set(self._pools_of.values())
        kept = {**self._before, **self._of_pools}
        self._before = {pools: of for pools, of in kept.items() if pools in served}
        self._of_pools = {}
        for split in state.splits.values():
            for name in (split.control, split.canary):
                release = state.releases.get(f"{split.id}@{name}")
                if release is not None:
                    self._note(release, Priority.WARMING)
        for model in state.models.values():
            self._note(model, Priority.PREFETCH)

    def _note(self, served: wire.Model | wire.Release, priority: Priority) -> None:
        digest = served.adapter_digest
        if digest and (wanted := self._of_pool.get(served.pool_id)) is not None:
            wanted.setdefault(digest, priority)  # earlier calls are at least as urgent


def wanted(state: ControlState, node_id: str) -> dict[str, Priority]:
    """Return the priority of each artifact that one node should have, by digest."""
    return dict(WantedIndex(state).of(node_id))


def _most_urgent(parts: Iterable[Mapping[str, Priority]]) -> dict[str, Priority]:
    merged: dict[str, Priority] = {}
    for part in parts:
        for digest, priority in part.items():
            merged[digest] = min(priority, merged.get(digest, priority))
    return merged
