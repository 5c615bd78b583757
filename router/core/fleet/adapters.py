"""Records where each replica has an adapter, which is loaded, in host memory or only on disk.

Engines report the loaded adapters. The router assumes that an unloaded adapter stays in host memory
for a while. From the waits of requests the router learns the duration of a load from memory and
from disk.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from enum import IntEnum

# Prior load times, in seconds, for a rank-16 adapter of an 8-billion-parameter base (about 80 MB).
# The first time is that of a loaded adapter. The second is a copy over PCIe between two steps. The
# third includes reading the adapter from a local disk and verifying it.
_LOAD_S = (0.0, 0.05, 1.0)
_SMOOTHING = 0.2
# Assumed number of unloaded adapters that fit into a replica's host memory. The replica's answers
# and reports correct this number. The least recently used adapter is dropped first.
IN_MEMORY_MAX = 64


class AdapterPlace(IntEnum):
    """Where a replica has an adapter, in the order of load time."""

    LOADED = 0
    MEMORY = 1
    COLD = 2


class _Replica:
    """The adapters of one replica.

    Attributes:
        loaded: Digests of loaded adapters, from the engine's last report.
        memory: Digests of adapters that are in host memory or being read, least recently used
            first.
        used: Number of running sequences by digest.
        loading: Assumed place of each adapter when a sequence began to load it, by digest.
        memory_max: Assumed capacity of host memory, in adapters that are not loaded.
    """

    __slots__ = ("loaded", "loading", "memory", "memory_max", "used")

    def __init__(self) -> None:
        self.memory_max = IN_MEMORY_MAX
        self.loaded: frozenset[str] = frozenset()
        self.memory: OrderedDict[str, None] = OrderedDict()
        self.used: Counter[str] = Counter()
        self.loading: dict[str, AdapterPlace] = {}

    def place(self, digest: str) -> AdapterPlace:
        """Return where the replica has an adapter."""
        if digest in self.loaded:
            return AdapterPlace.LOADED
        return AdapterPlace.MEMORY if digest in self.memory else AdapterPlace.COLD

    def keep(self, digest: str) -> None:
        """Record that an adapter is in host memory, as the most recently used adapter."""
        self.memory[digest] = None
        self.memory.move_to_end(digest)
        while len(self.memory) > self.memory_max + len(self.loaded) + len(self.used):
            self.memory.popitem(last=False)

    def found(self, assumed: AdapterPlace, place: AdapterPlace) -> None:
        """Correct the assumed capacity of memory after an adapter was not at its assumed place."""
        self.memory_max = max(0, self.memory_max + assumed - place)

    def report(self, digests: Iterable[str]) -> None:
        """Record the complete list of adapters in host memory.

        If the engine has dropped unused adapters, its memory is full. The remaining number of
        adapters is then the capacity.
        """
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
        """Record an engine's complete list of loaded adapters."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        replica.loaded = frozenset(digests)
        for digest in sorted(replica.loaded):
            replica.keep(digest)

    def reported(self, replica_id: str, digests: Iterable[str]) -> None:
        """Record an engine's complete list of adapters in host memory."""
        self._replicas.setdefault(replica_id, _Replica()).report(digests)

    def forget(self, replica_id: str) -> None:
        """Delete the record of a replica whose engine is detached."""
        self._replicas.pop(replica_id, None)

    def acquire(self, replica_id: str, digest: str) -> None:
        """Record the dispatch of a sequence that uses an adapter."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        if not replica.used[digest]:
            place = replica.place(digest)
            if place is not AdapterPlace.LOADED:
                replica.loading[digest] = place
        replica.used[digest] += 1
        replica.keep(digest)  # the engine reads the adapter for the dispatched sequence

    def release(self, replica_id: str, digest: str) -> None:
        """Record the end of a sequence that uses an adapter. A lost replica is ignored."""
        replica = self._replicas.get(replica_id)
        if replica is None or digest not in replica.used:
            return
        replica.used[digest] -= 1
        if not replica.used[digest]:
            del replica.used[digest]
            replica.loading.pop(digest, None)

    def loaded(self, replica_id: str, digest: str, queue_s: float, read_s: float) -> None:
        """Update load times and the memory's capacity after the first sequence of an adapter.

        Args:
            replica_id: Replica of the sequence.
            digest: Adapter of the sequence.
            queue_s: Seconds that the sequence waited in the engine, including the read.
            read_s: Seconds until the adapter was read, or 0.0 if it was already in host memory.
        """
        replica = self._replicas.get(replica_id)
        assumed = None if replica is None else replica.loading.pop(digest, None)
        if replica is None or assumed is None:
            return
        place, seconds = AdapterPlace.COLD, read_s
        if read_s <= 0.0:
            place, seconds = AdapterPlace.MEMORY, max(0.0, queue_s)
        self._load_s[place] += _SMOOTHING * (seconds - self._load_s[place])
        replica.found(assumed, place)

    def place(self, replica_id: str, digest: str) -> AdapterPlace:
        """Return where a replica has an adapter."""
        replica = self._replicas.get(replica_id)
        return AdapterPlace.COLD if replica is None else replica.place(digest)

    def load_s(self, replica_id: str, digest: str) -> float:
        """Return the predicted seconds to load an adapter on a replica that has a free slot."""
        return self._load_s[self.place(replica_id, digest)]

    def held(self, replica_id: str) -> Collection[str]:
        """Return the adapters that a replica has loaded or in memory, or is loading."""
        replica = self._replicas.get(replica_id)
        return () if replica is None else replica.memory

    def room(self, replica_id: str, adapter_slots: int) -> int:
        """Return the number of adapters that fit on a replica, in slots and in host memory."""
        replica = self._replicas.get(replica_id)
        return adapter_slots + (IN_MEMORY_MAX if replica is None else replica.memory_max)

    def is_cold(self, digest: str) -> bool:
        """Return whether no replica has an adapter loaded or in memory."""
        return all(
            replica.place(digest) is AdapterPlace.COLD for replica in self._replicas.values()
        )

    def used(self, replica_id: str) -> set[str]:
        """Return the adapters of a replica's running sequences."""
        replica = self._replicas.get(replica_id)
        return set() if replica is None else set(replica.used)

    def has_room(self, replica_id: str, digest: str, adapter_slots: int) -> bool:
        """Return whether running sequences use the adapter, or an adapter slot is free."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return adapter_slots > 0
        return digest in replica.used or len(replica.used) < adapter_slots
