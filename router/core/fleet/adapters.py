"""Where the adapters of a cell are: in a slot, in an engine's host memory, or on disk.

Engines say which adapters are in slots. That one which left its slot stays in host memory for a
while is inferred, and how long a load takes from either place is learned; both are predictions.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import IntEnum

# Priors, from a rank-16 adapter of an 8-billion-parameter base (about 80 MB): a copy over PCIe
# between two steps, and a read from a local disk with its check.
_MEMORY_LOAD_S = 0.05
_COLD_LOAD_S = 1.0
_SMOOTHING = 0.2
# Adapters that a replica is thought to keep in memory beside those in slots; one that left a slot
# before so many others is probably gone.
IN_MEMORY_MAX = 64


class Tier(IntEnum):
    """How near an adapter is to being used."""

    SLOT = 0
    MEMORY = 1
    COLD = 2


class _Replica:
    """What one replica has.

    Attributes:
        slots: Digests in slots, as the engine said last.
        memory: Digests that were in a slot or on their way; the longest unused first.
        used: Digest -> living sequences.
        loading: Digest -> where it was when it was first needed.
    """

    __slots__ = ("loading", "memory", "slots", "used")

    def __init__(self) -> None:
        self.slots: frozenset[str] = frozenset()
        self.memory: OrderedDict[str, None] = OrderedDict()
        self.used: Counter[str] = Counter()
        self.loading: dict[str, Tier] = {}

    def tier(self, digest: str) -> Tier:
        """Return where an adapter is."""
        if digest in self.slots:
            return Tier.SLOT
        return Tier.MEMORY if digest in self.memory else Tier.COLD

    def keep(self, digest: str) -> None:
        """Note that an adapter is in host memory and used."""
        self.memory[digest] = None
        self.memory.move_to_end(digest)
        while len(self.memory) > IN_MEMORY_MAX + len(self.slots) + len(self.used):
            self.memory.popitem(last=False)


class AdapterResidency:
    """The adapters of all replicas of a cell."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._load_s = {Tier.SLOT: 0.0, Tier.MEMORY: _MEMORY_LOAD_S, Tier.COLD: _COLD_LOAD_S}

    def resident(self, replica_id: str, digests: Iterable[str]) -> None:
        """Take over which adapters are in slots: all of them."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        replica.slots = frozenset(digests)
        for digest in sorted(replica.slots):
            replica.keep(digest)

    def held(self, replica_id: str, digests: Iterable[str]) -> None:
        """Take over which adapters an engine says it holds in host memory."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        for digest in digests:
            replica.keep(digest)

    def forget(self, replica_id: str) -> None:
        """Forget a replica: its engine is gone."""
        self._replicas.pop(replica_id, None)

    def acquire(self, replica_id: str, digest: str) -> None:
        """Note the dispatch of a sequence that uses an adapter."""
        replica = self._replicas.setdefault(replica_id, _Replica())
        if not replica.used[digest]:
            tier = replica.tier(digest)
            if tier is not Tier.SLOT:
                replica.loading[digest] = tier
        replica.used[digest] += 1
        replica.keep(digest)  # the next one will not wait for a read

    def release(self, replica_id: str, digest: str) -> None:
        """Note the end of a sequence that was acquired; of a replica that is gone: nothing."""
        replica = self._replicas.get(replica_id)
        if replica is None or digest not in replica.used:
            return
        replica.used[digest] -= 1
        if not replica.used[digest]:
            del replica.used[digest]
            replica.loading.pop(digest, None)

    def loaded(self, replica_id: str, digest: str, seconds: float) -> None:
        """Learn from how long the first sequence that needed an adapter waited for it."""
        replica = self._replicas.get(replica_id)
        tier = None if replica is None else replica.loading.pop(digest, None)
        if tier is not None:
            self._load_s[tier] += _SMOOTHING * (max(0.0, seconds) - self._load_s[tier])

    def tier(self, replica_id: str, digest: str) -> Tier:
        """Return where an adapter is on a replica."""
        replica = self._replicas.get(replica_id)
        return Tier.COLD if replica is None else replica.tier(digest)

    def load_s(self, replica_id: str, digest: str) -> float:
        """Return the predicted time until an adapter is in a slot, if one is free."""
        return self._load_s[self.tier(replica_id, digest)]

    def is_cold(self, digest: str) -> bool:
        """Return whether no replica has an adapter in a slot or in memory."""
        return all(replica.tier(digest) is Tier.COLD for replica in self._replicas.values())

    def used(self, replica_id: str) -> set[str]:
        """Return the adapters of a replica's living sequences."""
        replica = self._replicas.get(replica_id)
        return set() if replica is None else set(replica.used)

    def has_room(self, replica_id: str, digest: str, adapter_slots: int) -> bool:
        """Return whether a sequence could run beside the others: it shares a slot or finds one."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return adapter_slots > 0
        return digest in replica.used or len(replica.used) < adapter_slots
