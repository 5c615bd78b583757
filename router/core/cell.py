"""One cell: its queue, its replicas, and what is known to place requests on them."""

from collections import OrderedDict, deque
from collections.abc import Mapping
from enum import IntEnum

from router.core.decide import placement
from router.core.decide.forecast import RETRY_AFTER_UNKNOWN_S, Forecast
from router.core.decide.placement import Choice
from router.core.decide.preemption import Preemption
from router.core.fleet.adapters import AdapterResidency
from router.core.fleet.health import CellHealth
from router.core.fleet.prefix_index import BlockHashes, PrefixIndex
from router.core.fleet.replica import ReplicaBook
from router.core.fleet.sessions import Sessions
from router.core.fleet.speed import Speed, Usual
from router.core.queue.adapter_waiters import AdapterWaiters, still_waiting
from router.core.queue.fair_queue import FairQueue
from router.core.types.model import CoreConfig, Request, Role, Slot
from sluice.wire.engine.v1 import engine_pb2 as engine
from sluice.wire.router.v1 import router_pb2 as wire

_SMOOTHING = 0.05
_OUTPUT_MARGIN = 1.0  # what is booked, over the mean answer; more when it outgrows that
_TENANTS_KEPT = 4096
_REPRICED_PER_PASS = 4  # waiting requests whose cached tokens are looked up again
_SLACK = 64  # of those that were to be looked at and do not wait, besides as many as do
_LATE_FACTOR = 4.0  # times the objective: from then on a request waits for a group
_GATHER_S = 0.4  # between two groups of prompts for a replica whose memory is full
_USUAL_KEPT_S = 0.1
_LOOK_AGAIN_S = 0.001  # frames come as often; this is for those that are late


class Readiness(IntEnum):
    """What the replicas that may be sent more now say to a request."""

    READY = 1
    PACED = 2  # they had better decode before they take it
    FULL = 3  # none has room for it


class CellBook:
    """The state of one cell that this router owns (or owned, while its requests run).

    Attributes:
        absent_since: When somebody first saw that no replica is ready; None: one is, or was later.
        takers: Replicas that may be sent more, now or when their window opens.
        owed_until: `Shadow.owed_until` of the takers, as of their last change.
        prefillers: Those of them that compute prompts for others, and are no takers.
        prompt_tokens_max: Of any replica; None: nothing is attached.
        has_adapters: Whether any attached replica can serve adapters.
        uncached_mean: Prompt tokens to compute per request, of late.
        is_dirty: Gateways have not heard of the latest change.
    """

    __slots__ = (
        *(
            "absent_since",
            "adapter_waiters",
            "cell_id",
            "config",
            "forecast",
            "has_adapters",
            "health",
            "index",
        ),
        *("is_dirty", "is_owned", "output_mean", "preemption", "prompt_tokens_max", "queue"),
        *("replicas", "residency", "sessions"),
        *(
            "owed_until",
            "prefillers",
            "takers",
            "told",
            "uncached_mean",
            "_output_means",
            "_to_price",
            "_seen",
        ),
        *("usual", "_fastest", "_usual_until"),
    )

    def __init__(self, cell_id: str, config: CoreConfig) -> None:
        self.cell_id = cell_id
        self.config = config
        self.is_owned = True
        self.absent_since: float | None = None
        self.queue = FairQueue()
        self.replicas: dict[str, ReplicaBook] = {}
        self.takers: dict[str, ReplicaBook] = {}
        self.owed_until: dict[str, float] = {}
        self.prefillers: dict[str, ReplicaBook] = {}
        self.index = PrefixIndex()
        self.residency = AdapterResidency()
        self.sessions = Sessions()
        self.health = CellHealth()
        self.usual = Usual()
        self._fastest: Speed | None = None
        self._usual_until = float("-inf")
        self.forecast = Forecast()
        self.preemption = Preemption()
        self.adapter_waiters = AdapterWaiters()
        self.output_mean = config.output_tokens_expected / _OUTPUT_MARGIN
        self.uncached_mean = 0.0
        self.prompt_tokens_max: int | None = None
        self.has_adapters = False
        self.told = wire.CellState()
        self.is_dirty = True
        self._output_means: OrderedDict[str, float] = OrderedDict()
        self._to_price: deque[Request] = deque()
        self._seen = 0

    # --- replicas ---------------------------------------------------------------------------

    def update(self, book: ReplicaBook) -> None:
        """Predict a replica anew after a change and file it under `takers` or not."""
        book.refresh(is_healthy=self.health.may_take(book.replica_id, len(book.slots)))
        self._file(book)

    def _file(self, book: ReplicaBook) -> None:
        self.is_dirty = True
        is_prefiller = book.role is Role.PREFILL
        ours = self.prefillers if is_prefiller else self.takers
        others = self.takers if is_prefiller else self.prefillers
        others.pop(book.replica_id, None)
        if book.may_take:
            ours[book.replica_id] = book
            self.absent_since = None
        else:
            ours.pop(book.replica_id, None)
        if book.may_take and not is_prefiller:
            self.owed_until[book.replica_id] = book.shadow.owed_until
        else:
            self.owed_until.pop(book.replica_id, None)

    def attached(self, book: ReplicaBook, now: float) -> None:
        """Begin to use a replica that holds nothing of ours."""
        assert book.limits is not None
        self.index.drop_replica(book.replica_id)  # what it caches, it tells
        self.index.add_replica(book.replica_id, book.limits.kv_blocks)
        self.residency.forget(book.replica_id)
        self.health.attached(book.replica_id, now)
        self._relimit()
        self.update(book)

    def detached(self, book: ReplicaBook, slots: list[Slot], now: float) -> None:
        """Stop using a replica; `slots` is what was alive there."""
        for slot in slots:
            self.released(slot)
        self.health.lost(book.replica_id, now)
        self._relimit()
        self.update(book)

    def cached(self, replica_id: str, events: engine.KvEvents, now: float) -> None:
        """Take over what an engine says that it caches, and does not any more."""
        if events.reset:
            self.index.reset(replica_id)
        if events.stored:
            self.index.stored(replica_id, BlockHashes(events.stored), now)
        if events.removed:
            self.index.removed(replica_id, BlockHashes(events.removed), now)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that is not planned any more."""
        self.index.drop_replica(replica_id)
        self.residency.forget(replica_id)
        self.sessions.forget_replica(replica_id)
        self.health.forget(replica_id)
        self.takers.pop(replica_id, None)
        self.owed_until.pop(replica_id, None)
        self.prefillers.pop(replica_id, None)

    def replicas_ready(self) -> list[ReplicaBook]:
        """Return the replicas that are attached and not draining."""
        return [
            book
            for book in self.replicas.values()
            if book.limits is not None and not book.is_draining
        ]

    def absent_s(self, now: float) -> float:
        """Return for how long it has been seen to have no replica, of those who ask this."""
        if self.replicas_ready():
            self.absent_since = None
            return 0.0
        if self.absent_since is None:
            self.absent_since = now
        return now - self.absent_since

    def _relimit(self) -> None:
        """Find anew what any replica can take."""
        self._usual_until = float("-inf")
        limits = [book.limits for book in self.replicas.values() if book.limits is not None]
        longest = (entry.prompt_tokens_max for entry in limits)
        self.prompt_tokens_max = max(longest, default=None)
        self.has_adapters = any(entry.adapter_slots for entry in limits)

    def opens_at(self, now: float) -> float:
        """Return when the next replica may be sent something: `now` or later; inf: not by time."""
        first = float("inf")
        for book in self.takers.values():
            opens_at = book.opens_at(now)
            if opens_at <= now:
                return now
            first = min(first, opens_at)
        return first

    def retry_at(self, now: float) -> float:
        """Return when binding is to be tried again without any event; inf: not by time."""
        first, soonest = float("inf"), now + _LOOK_AGAIN_S
        for book in self.takers.values():
            at = book.shadow.boundary_at
            if now < at < first:
                if at <= soonest:
                    return soonest
                first = at
        return first

    def tokens_s(self) -> float:
        """Return the prompt tokens that the cell computes per second at most."""
        return sum(book.tokens_s for book in self.replicas_ready())

    # --- requests ---------------------------------------------------------------------------

    def price(self, request: Request) -> None:
        """Predict what a new request costs, and what its objective is."""
        self.find_usual(request.arrived_at)
        matches = self.index.matches(request.hashes) if request.hashes else {}
        request.uncached_tokens = request.prompt_tokens - self._most_cached(request, matches)
        config = self.config
        alone_s = self.prefill_alone_s(request.prompt_tokens)
        request.objective_s = config.ttft_base_s + config.ttft_factor * alone_s
        uncached = request.uncached_tokens
        own_s = self.usual.prefill_s(uncached, request.prompt_tokens - uncached)
        request.late_at = request.arrived_at + request.objective_s - own_s
        request.overdue_at = request.arrived_at + config.overtake_factor * request.objective_s
        self._seen += 1
        weight = max(_SMOOTHING, 1 / self._seen)
        self.uncached_mean += weight * (request.uncached_tokens - self.uncached_mean)

    def prefill_alone_s(self, prompt_tokens: int) -> float:
        """Return the time of a prompt's prefill on a replica of the cell that does nothing else."""
        fastest = self._fastest
        return 0.0 if fastest is None else fastest.prefill_s(prompt_tokens, 0)

    def enqueue(self, request: Request, now: float) -> None:
        """Let a new request wait."""
        self.is_dirty = True
        self.queue.push(request, now)
        waiting = self.queue.requests
        self.adapter_waiters.add(request, waiting)
        if request.hashes:
            self._to_price.append(request)
            if len(self._to_price) > 2 * waiting + _SLACK:  # mostly of those who have gone
                self._to_price = deque(still_waiting(self._to_price))

    def find_usual(self, now: float) -> None:
        """Take the mean of the replicas' speeds anew, and the fastest of them, now and then."""
        if now >= self._usual_until:
            self._usual_until = now + _USUAL_KEPT_S
            speeds = [book.speed for book in self.replicas_ready()]
            self.usual = Usual(speeds)
            tokens = self.uncached_mean or 1.0
            self._fastest = min(speeds, key=lambda it: it.prefill_s(tokens, 0), default=None)

    def reprice_some(self) -> None:
        """Look again, in turn, at what waiting requests would find cached."""
        for _ in range(min(_REPRICED_PER_PASS, len(self._to_price))):
            request = self._to_price.popleft()
            if request.slot is not None or request.is_done:
                continue  # one that comes back is looked at when it is next
            self._to_price.append(request)
            if self.queue.requests > 1:  # one alone is next, and looked at anyway
                self._reprice(request, self.index.matches(request.hashes))

    def look_up(self, request: Request) -> Mapping[str, int]:
        """Return a waiting request's cached blocks by replica, and price it anew by them."""
        matches = self.index.matches(request.hashes) if request.hashes else {}
        self._reprice(request, matches)
        return matches

    def readiness(self, request: Request, matches: Mapping[str, int], now: float) -> "Readiness":
        """Return whether any replica that may be sent more now can take a request."""
        found = Readiness.FULL
        for book in self.takers.values():
            if book.opens_at(now) > now:
                continue
            cached = placement.cached_tokens(book, request, matches)
            if book.fits(request.prompt_tokens, 0, cached):
                if not placement.is_paced(book, request.prompt_tokens - cached, cached):
                    return Readiness.READY
                found = Readiness.PACED
        return found

    def held_for(self, request: Request) -> ReplicaBook | None:
        """Return the replica whose memory is to be kept for a request that finds none free.

        Whoever is behind it may go elsewhere, but must not take what it waits for. All that are
        full are sent to in groups from now on: a step with a prompt in it costs more, however short
        the prompt, and who has missed its objective by far loses little until the next group.
        """
        output, takers = self.output_expected(request), self.takers
        full = [
            book
            for book in takers.values()
            if placement.excluded_by(book, request, output, 0, is_only=len(takers) == 1) == "kv"
        ]
        for book in full:
            book.gathers_until = book.sent_at + _GATHER_S
        return max(full, key=lambda book: book.kv_free_blocks(), default=None)

    def is_gathered(self, request: Request, now: float) -> bool:
        """Return whether a request is left for a replica's next group."""
        if not _is_far_too_late(request, now):
            return False
        return any(book.gathers_until > now for book in self.takers.values())

    def choose(
        self,
        request: Request,
        matches: Mapping[str, int],
        now: float,
        *,
        held: ReplicaBook | None = None,
    ) -> Choice | None:
        """Return the best replica but `held` for a request; None: none can hold it now."""
        without: set[str] = set()
        if held is not None:
            without.add(held.replica_id)
        takers = self.takers
        if _is_far_too_late(request, now):
            without.update(key for key, book in takers.items() if book.gathers_until > now)
        return placement.choose(
            takers,
            request,
            matches,
            owed_until=self.owed_until,
            usual=self.usual,
            output=self.output_expected(request),
            home=self.sessions.home(request.session, now) if request.session else None,
            adapter_s=self.adapter_s(request.adapter) if request.adapter else {},
            without=without,
            is_only=len(takers) == 1,
            now=now,
        )

    def adapter_s(self, adapter: str) -> dict[str, float]:
        """Return the seconds until an adapter is in a slot, by replica; inf: none is free."""
        return {
            replica_id: self._adapter_s(book, adapter) for replica_id, book in self.takers.items()
        }

    def _adapter_s(self, book: ReplicaBook, adapter: str) -> float:
        slots = book.limits.adapter_slots if book.limits is not None else 0
        if not self.residency.has_room(book.replica_id, adapter, slots):
            return float("inf")
        return self.residency.load_s(book.replica_id, adapter)

    def _reprice(self, request: Request, matches: Mapping[str, int]) -> None:
        uncached = request.prompt_tokens - self._most_cached(request, matches)
        if uncached != request.uncached_tokens:
            self.queue.reprice(request, uncached)

    def _most_cached(self, request: Request, matches: Mapping[str, int]) -> int:
        most = most_blocks = 0
        for replica_id, blocks in matches.items():
            if blocks > most_blocks:  # most replicas hold the same few blocks
                book = self.replicas.get(replica_id)
                if book is not None and book.limits is not None:
                    most_blocks = blocks
                    most = placement.cached_tokens(book, request, matches)
        return most

    def dispatched(self, book: ReplicaBook, request: Request, now: float) -> None:
        """Note what a dispatch brings to a replica."""
        if request.hashes:
            self.index.dispatched(book.replica_id, request.hashes, now)
        if request.adapter:
            self.residency.acquire(book.replica_id, request.adapter)
        if request.session:
            self.sessions.seen(request.session, book.replica_id, now)
        book.recount(is_healthy=self.health.may_take(book.replica_id, len(book.slots)))
        self._file(book)

    def released(self, slot: Slot) -> None:
        """Note that an engine has ended a sequence."""
        if slot.request.adapter:
            self.residency.release(slot.replica_id, slot.request.adapter)

    def finished(self, slot: Slot, now: float) -> None:
        """Learn from a complete answer."""
        request = slot.request
        self.observe_output(request.tenant_id, slot.emitted)
        self.health.succeeded(slot.replica_id, now)
        if request.session:
            self.sessions.seen(request.session, slot.replica_id, now)

    # --- answers ----------------------------------------------------------------------------

    def output_expected(self, request: Request) -> int:
        """Return how many output tokens to book for a request."""
        mean = int(self._output_means.get(request.tenant_id, self.output_mean) * _OUTPUT_MARGIN)
        return mean if 1 <= mean <= request.output_max else min(request.output_max, max(1, mean))

    def observe_output(self, tenant_id: str, tokens: int) -> None:
        """Learn from the length of an answer."""
        self.output_mean += _SMOOTHING * (tokens - self.output_mean)
        means = self._output_means
        mean = means.pop(tenant_id, self.output_mean)
        means[tenant_id] = mean + _SMOOTHING * (tokens - mean)
        if len(means) > _TENANTS_KEPT:
            means.popitem(last=False)

    # --- what others are told ---------------------------------------------------------------

    def wait_s(self, now: float) -> float:
        """Return the predicted time until a short request that came now would be started."""
        ready = self.replicas_ready()
        if not ready:
            return RETRY_AFTER_UNKNOWN_S
        backlog_s = min(book.backlog_s(now) for book in ready)
        return backlog_s + self.queue.tokens / max(1.0, self.tokens_s())

    def state(self, now: float, *, is_draining: bool = False) -> wire.CellState:
        """Return what gateways are told about the cell."""
        output = int(self.output_mean)
        books = self.replicas.values()
        owed = sum(int(book.owed_tokens(now)) + book.output_owed() for book in books)
        ready = self.replicas_ready()
        blocks = sum(book.limits.kv_blocks for book in ready if book.limits is not None)
        free = sum(max(0, book.kv_free_blocks()) for book in ready)
        return wire.CellState(
            cell_id=self.cell_id,
            queued=self.queue.requests,
            running=sum(len(book.slots) for book in books),
            replicas_ready=len(ready),
            tokens_owed=owed + self.queue.tokens + output * self.queue.requests,
            kv_free_permille=1000 * free // blocks if blocks else 0,
            wait_ms=min(int(self.wait_s(now) * 1000), 1 << 31),
            is_draining=is_draining,
        )


def _is_far_too_late(request: Request, now: float) -> bool:
    return now > request.arrived_at + _LATE_FACTOR * request.objective_s
