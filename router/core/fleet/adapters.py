"""The places of a cell's adapters: loaded, in an engine's host memory, or on disk.

Engines report loaded adapters. The router infers that an unloaded one stays in host memory for a
while, and learns how long a load from either place takes; both are predictions.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from enum import IntEnum

# Priors by place, from a rank-16 adapter of an 8-billion-parameter base (about 80 MB): nothing, a
# copy over PCIe between two steps, and a read from a local disk with its check.
_LOAD_S = (0.0, 0.05, 1.0)
_SMOOTHING = 0.2
# Adapters that a replica probably keeps in memory beside the loaded ones; one that was unloaded
# before this many others is probably gone.
IN_MEMORY_MAX = 64


class AdapterPlace(IntEnum):
    """The place of an adapter on a replica, the nearest to use first."""

    LOADED = 0
    MEMORY = 1
    COLD = 2


class _Replica:
    """The adapters of one replica.

    Attributes:
        loaded: Digests of loaded adapters, by the engine's last report.
        memory: Digests of adapters in host memory or on their way; the least recently used first.
        used: Digest -> living sequences.
        loading: Digest -> place of the adapter when a sequence first needed it.
        memory_max: Adapters that its memory holds beside the loaded ones, as far as is known.
    """

    __slots__ = ("loaded", "loading", "memory", "memory_max", "used")

    def __init__(self) -> None:
        self.memory_max = IN_MEMORY_MAX
        self.loaded: frozenset[str] = frozenset()
        self.memory: OrderedDict[str, None] = OrderedDict()
        self.used: Counter[str] = Counter()
        self.loading: dict[str, AdapterPlace] = {}

    def place(self, digest: str) -> AdapterPlace:
        """Return the place of an adapter."""
        if digest in self.loaded:
            return AdapterPlace.LOADED
        return AdapterPlace.MEMORY if digest in self.memory else AdapterPlace.COLD

    def keep(self, digest: str) -> None:
        """Note that an adapter is in host memory and used."""
        self.memory[digest] = None
        self.memory.move_to_end(digest)
        while len(self.memory) > self.memory_max + len(self.loaded) + len(self.used):
            self.memory.popitem(last=False)

    def report(self, digests: Iterable[str]) -> None:
        """Take all adapters in memory; a memory that has lost unused ones is full."""
        reported = dict.fromkeys(digests)
        gone = self.memory.keys() - reported.keys() - self.used.keys() - self.loaded
        beside = len(reported.keys() - self.loaded)
        self.memory_max = beside if gone else max(self.memory_max, beside)
        for digest in gone:
            del self.memory[digest]
        for digest in reported:
            self.keep(digest)


class AdapterResidency:
    """The adapters of all replicas of a cell."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._load_s = dict(zip(AdapterPlace, _LOAD_S, strict=True))

    def resident(self, replica_id: str, digests: Iterable[str]) -> None:
        """Take an engine's report of all loaded adapters."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        replica.loaded = frozenset(digests)
        for digest in sorted(replica.loaded):
            replica.keep(digest)

    def reported(self, replica_id: str, digests: Iterable[str]) -> None:
        """Take an engine's report of adapters in host memory."""
        self._replicas.setdefault(replica_id, _Replica()).report(digests)

    def forget(self, replica_id: str) -> None:
        """Drop a replica: its engine is gone."""
        self._replicas.pop(replica_id, None)

    def acquire(self, replica_id: str, digest: str) -> None:
        """Note the dispatch of a sequence that uses an adapter."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        if not replica.used[digest]:
            place = replica.place(digest)
            if place is not AdapterPlace.LOADED:
                replica.loading[digest] = place
        replica.used[digest] += 1
        replica.keep(digest)  # the next one will not wait for a read

    def release(self, replica_id: str, digest: str) -> None:
        """Note the end of an acquired sequence; a lost replica is ignored."""
        replica = self._replicas.get(replica_id)
        if replica is None or digest not in replica.used:
            return
        replica.used[digest] -= 1
        if not replica.used[digest]:
            del replica.used[digest]
            replica.loading.pop(digest, None)

    def loaded(self, replica_id: str, digest: str, seconds: float) -> None:
        """Learn from the wait of the first sequence that needed an adapter."""
        replica = self._replicas.get(replica_id)
        place = None if replica is None else replica.loading.pop(digest, None)
        if place is not None:
            self._load_s[place] += _SMOOTHING * (max(0.0, seconds) - self._load_s[place])

    def place(self, replica_id: str, digest: str) -> AdapterPlace:
        """Return the place of an adapter on a replica."""
        replica = self._replicas.get(replica_id)
        return AdapterPlace.COLD if replica is None else replica.place(digest)

    def load_s(self, replica_id: str, digest: str) -> float:
        """Return the predicted seconds until an adapter is loaded, if there is room for it."""
        return self._load_s[self.place(replica_id, digest)]

    def held(self, replica_id: str) -> Collection[str]:
        """Return the adapters that a replica has loaded or in memory, or is loading."""
        replica = self._replicas.get(replica_id)
        return () if replica is None else replica.memory

    def room(self, replica_id: str, adapter_slots: int) -> int:
        """Return how many adapters a replica can hold, in slots or in memory."""
        replica = self._replicas.get(replica_id)
        return adapter_slots + (IN_MEMORY_MAX if replica is None else replica.memory_max)

    def is_cold(self, digest: str) -> bool:
        """Return whether no replica has an adapter loaded or in memory."""
        return all(
            replica.place(digest) is AdapterPlace.COLD for replica in self._replicas.values()
        )

    def used(self, replica_id: str) -> set[str]:
        """Return the adapters of a replica's living sequences."""
        replica = self._replicas.get(replica_id)
        return set() if replica is None else set(replica.used)

    def has_room(self, replica_id: str, digest: str, adapter_slots: int) -> bool:
        """Return whether an adapter is used already, or has room beside the used ones."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return adapter_slots > 0
        return digest in replica.used or len(replica.used) < adapter_slots
