"""The replicas of one cell, with their health, adapters, cached blocks, sessions and mean speed.

The queue and the decisions access replicas only through this class.
"""

from collections.abc import Iterable, Mapping

from router.core.fleet.adapter_plan import AdapterDemand, missing_copies
from router.core.fleet.adapters import AdapterResidency
from router.core.fleet.health import CellHealth
from router.core.fleet.prefix_index import BlockHashes, PrefixIndex
from router.core.fleet.prefix_sketch import PrefixSketch
from router.core.fleet.replica import ReplicaBook
from router.core.fleet.sessions import Sessions
from router.core.fleet.speed import MeanSpeed, Speed
from router.core.types.plan import ReplicaRole
from router.core.types.request import Dispatch, Request
from sluice.wire.engine.v1 import engine_pb2 as engine

_MEAN_SPEED_KEPT_S = 0.1
_RECHECK_S = 0.001  # least seconds until a check for a step whose frame is late


class CellFleet:
    """The replicas of one cell.

    Attributes:
        replicas: All planned replicas, and replicas that still run requests, by id.
        open_replicas: Replicas that may be sent requests, now or when their next step has room.
        owed_until: `EngineModel.owed_until` of the open replicas, as of their last change.
        open_prefillers: Open replicas with the role PREFILL, which `open_replicas` omits.
        absent_since: Time of the first check that found no ready replica, or None if the last check
            found a ready replica.
        prompt_tokens_max: Longest prompt that any replica accepts, or None if none is attached.
        has_adapters: Whether any attached replica serves adapters.
    """

    __slots__ = (
        *("replicas", "open_replicas", "owed_until", "open_prefillers", "absent_since"),
        *("index", "sketch", "residency", "adapter_demand", "sessions", "health", "mean_speed"),
        *("prompt_tokens_max", "has_adapters", "_fastest", "_mean_speed_until"),
    )

    def __init__(self) -> None:
        self.replicas: dict[str, ReplicaBook] = {}
        self.open_replicas: dict[str, ReplicaBook] = {}
        self.owed_until: dict[str, float] = {}
        self.open_prefillers: dict[str, ReplicaBook] = {}
        self.absent_since: float | None = None
        self.index = PrefixIndex()
        self.sketch = PrefixSketch()
        self.residency = AdapterResidency()
        self.adapter_demand = AdapterDemand()
        self.sessions = Sessions()
        self.health = CellHealth()
        self.mean_speed = MeanSpeed()
        self.prompt_tokens_max: int | None = None
        self.has_adapters = False
        self._fastest: Speed | None = None
        self._mean_speed_until = float("-inf")

    # --- attachment -------------------------------------------------------------------------

    def update(self, book: ReplicaBook) -> None:
        """Recompute a replica's predictions after a change, and whether the replica is open."""
        book.refresh(is_healthy=self.health.may_take(book.replica_id, len(book.dispatches)))
        self._file(book)

    def _file(self, book: ReplicaBook) -> None:
        is_prefiller = book.role is ReplicaRole.PREFILL
        ours = self.open_prefillers if is_prefiller else self.open_replicas
        others = self.open_replicas if is_prefiller else self.open_prefillers
        others.pop(book.replica_id, None)
        if book.may_take:
            ours[book.replica_id] = book
            self.absent_since = None
        else:
            ours.pop(book.replica_id, None)
        if book.may_take and not is_prefiller:
            self.owed_until[book.replica_id] = book.engine_model.owed_until
        else:
            self.owed_until.pop(book.replica_id, None)

    def attached(self, book: ReplicaBook, now: float) -> None:
        """Start to use a replica whose engine has no sequences."""
        assert book.limits is not None
        self.index.drop_replica(book.replica_id)  # the engine will report its cached blocks
        self.index.add_replica(book.replica_id, book.limits.kv_blocks)
        self.residency.forget(book.replica_id)
        self.health.attached(book.replica_id, now)
        self._relimit()
        self.update(book)

    def detached(self, book: ReplicaBook, dispatches: list[Dispatch], now: float) -> None:
        """Stop using a replica, on which `dispatches` were live."""
        for dispatch in dispatches:
            self.released(dispatch)
        self.health.lost(book.replica_id, now)
        self._relimit()
        self.update(book)

    def forget(self, replica_id: str) -> None:
        """Delete all records of a replica that is no longer planned."""
        del self.replicas[replica_id]
        self.index.drop_replica(replica_id)
        self.residency.forget(replica_id)
        self.sessions.forget_replica(replica_id)
        self.health.forget(replica_id)
        self.open_replicas.pop(replica_id, None)
        self.owed_until.pop(replica_id, None)
        self.open_prefillers.pop(replica_id, None)

    def _relimit(self) -> None:
        """Recompute the limits over all attached replicas."""
        self._mean_speed_until = float("-inf")
        limits = [book.limits for book in self.replicas.values() if book.limits is not None]
        longest = (entry.prompt_tokens_max for entry in limits)
        self.prompt_tokens_max = max(longest, default=None)
        self.has_adapters = any(entry.adapter_slots for entry in limits)

    # --- work -------------------------------------------------------------------------------

    def cached(self, replica_id: str, events: engine.KvEvents, now: float) -> None:
        """Record an engine's report of stored and removed KV blocks."""
        if events.reset:
            self.index.reset(replica_id)
        if events.stored:
            self.index.stored(replica_id, BlockHashes(events.stored), now)
        if events.removed:
            self.index.removed(replica_id, BlockHashes(events.removed), now)

    def dispatched(
        self, book: ReplicaBook, request: Request, cached_tokens: int, now: float
    ) -> None:
        """Record the blocks, the adapter and the session of a dispatch to a replica."""
        if request.hashes:
            if self.sketch.is_wanted and not request.session:
                self._sketch(book, request, cached_tokens, now)
            self.index.dispatched(book.replica_id, request.hashes, now)
        self.adapter_demand.came(request.adapter, now)
        if request.adapter:
            self.residency.acquire(book.replica_id, request.adapter)
        if request.session:
            self.sessions.seen(request.session, book.replica_id, now)
        book.recount(is_healthy=self.health.may_take(book.replica_id, len(book.dispatches)))
        self._file(book)

    def _sketch(self, book: ReplicaBook, request: Request, cached_tokens: int, now: float) -> None:
        """Add a prompt without a session to the prefix sketch for gateways."""
        limits, index = book.limits, self.index
        assert limits is not None, "only attached replicas get requests"
        self.sketch.use(request.hashes, cached_tokens // limits.block_tokens, now)
        self.sketch.age(index.evicted, len(index))

    def released(self, dispatch: Dispatch) -> None:
        """Record that an engine has ended a sequence."""
        if dispatch.request.adapter:
            self.residency.release(dispatch.replica_id, dispatch.request.adapter)

    # --- queries ----------------------------------------------------------------------------

    def ready(self) -> list[ReplicaBook]:
        """Return the replicas that are attached and not draining."""
        return [
            book
            for book in self.replicas.values()
            if book.limits is not None and not book.is_draining
        ]

    def absent_s(self, now: float) -> float:
        """Return the seconds since a check first found no ready replica, or 0.0 if one is ready."""
        if self.ready():
            self.absent_since = None
            return 0.0
        if self.absent_since is None:
            self.absent_since = now
        return now - self.absent_since

    def opens_at(self, now: float) -> float:
        """Return the time at which a replica may be sent a request, or inf if none is open."""
        first = float("inf")
        for book in self.open_replicas.values():
            opens_at = book.opens_at(now)
            if opens_at <= now:
                return now
            first = min(first, opens_at)
        return first

    def prefillers_open_at(self, now: float) -> float:
        """Return the time at which a prefill replica may be sent a request, or inf if none may."""
        opens_at = (book.opens_at(now) for book in self.open_prefillers.values())
        return min(opens_at, default=float("inf"))

    def retry_at(self, now: float) -> float:
        """Return the earliest predicted end of a step on an open replica, or inf if none runs."""
        first, soonest = float("inf"), now + _RECHECK_S
        for book in self.open_replicas.values():
            at = book.engine_model.boundary_at
            if now < at < first:
                if at <= soonest:
                    return soonest
                first = at
        return first

    def renew_mean_speed(self, now: float, prompt_tokens: float) -> None:
        """Recompute, at intervals, the mean speed and the fastest replica for a usual prompt."""
        if now >= self._mean_speed_until:
            self._mean_speed_until = now + _MEAN_SPEED_KEPT_S
            speeds = [book.speed for book in self.ready()]
            self.mean_speed = MeanSpeed(speeds)
            self._fastest = min(speeds, key=lambda it: it.prefill_s(prompt_tokens, 0), default=None)

    def least_prefill_s(self, prompt_tokens: int) -> float:
        """Return the prefill seconds of an uncached prompt on the fastest replica when idle."""
        fastest = self._fastest
        return 0.0 if fastest is None else fastest.prefill_s(prompt_tokens, 0)

    def idle_prefill_s(self, uncached: int, cached: int) -> float:
        """Return the prefill seconds of a prompt on some open replica when idle."""
        book = next(iter(self.open_replicas.values()), None) or next(iter(self.ready()), None)
        return 0.0 if book is None else book.prefill_s(uncached, cached)

    def adapter_waits_s(self, adapter: str) -> dict[str, float]:
        """Return the seconds until an adapter is loaded, by replica, or inf without a free slot."""
        return {
            replica_id: self._adapter_wait_s(book, adapter)
            for replica_id, book in self.open_replicas.items()
        }

    def _adapter_wait_s(self, book: ReplicaBook, adapter: str) -> float:
        room = book.limits.adapter_slots if book.limits is not None else 0
        if not self.residency.has_room(book.replica_id, adapter, room):
            return float("inf")
        return self.residency.load_s(book.replica_id, adapter)

    def adapter_loads(self, known: Iterable[str]) -> dict[str, list[str]]:
        """Return the adapters that each replica should load ahead of requests.

        Args:
            known: All adapters that requests may name. Adapters without requests are loaded last.
        """
        rooms = {
            book.replica_id: self.residency.room(book.replica_id, book.limits.adapter_slots)
            for book in self.ready()
            if book.limits is not None and book.limits.adapter_slots
        }
        room = sum(rooms.values())
        shares = self.adapter_demand.shares(room)
        for adapter in known:
            if len(shares) >= room:
                break
            shares.setdefault(adapter, 0.0)
        held = {replica_id: self.residency.held(replica_id) for replica_id in rooms}
        return missing_copies(shares, rooms, held) if shares else {}

    def cold_load_s(self, adapter: str) -> float:
        """Return the seconds to load an adapter, or 0.0 if a replica has it loaded or in memory."""
        if not adapter or not self.residency.is_cold(adapter):
            return 0.0
        anywhere = next(iter(self.replicas), "")
        return self.residency.load_s(anywhere, adapter)

    def matches(self, request: Request) -> Mapping[str, int]:
        """Return the number of cached leading blocks by replica, omitting replicas with none."""
        return self.index.matches(request.hashes) if request.hashes else {}

    def most_cached(self, request: Request, matches: Mapping[str, int]) -> int:
        """Return the most prompt tokens that any attached replica has cached for a request."""
        most = most_blocks = 0
        for replica_id, blocks in matches.items():
            if blocks > most_blocks:  # most replicas have cached equally many blocks
                book = self.replicas.get(replica_id)
                if book is not None and book.limits is not None:
                    most_blocks = blocks
                    most = book.cached_in(request.prompt_tokens, blocks)
        return most
