"""The state of one cell, with its queue, its replicas and the figures that decisions need.

No function of `router.core.decide` sees a cell. Admission, forecast, preemption and disaggregation
receive plain figures, which this module, `router.core.cell_admission`, `preemption_figures` and
`handovers` read. Placement receives the replicas' records (`ReplicaBook`), because it prices few of
them, and reading figures of all would cost more than the decision.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum

from router.core import preemption_figures
from router.core.decide import placement, preemption
from router.core.decide.admission import AdmissionFigures
from router.core.decide.forecast import (
    NO_SUPPLY,
    RETRY_AFTER_UNKNOWN_S,
    FirstTokenForecast,
    Supply,
    TimedPrediction,
    WorkAhead,
    queue_wait_s,
)
from router.core.decide.placement import PlacementChoice
from router.core.decide.preemption import PreemptionRoom, RoomClaims, RunningSequence
from router.core.fleet.answer_lengths import AnswerLengths
from router.core.fleet.cell_fleet import CellFleet
from router.core.fleet.health import HealthState
from router.core.fleet.pool_speed import median_speed
from router.core.fleet.replica import ReplicaBook
from router.core.queue.adapter_waiters import AdapterWaiters
from router.core.queue.fair_queue import FairQueue
from router.core.queue.work_meter import WorkMeter
from router.core.types.config import CoreConfig
from router.core.types.plan import ReplicaRole
from router.core.types.request import Dispatch, Request
from router.core.types.service import ServiceReport
from router.core.types.work import WorkReport
from sluice.priority import CLASSES
from sluice.wire.router.v1 import router_pb2 as wire

_SMOOTHING = 0.05
_LATE_FACTOR = 4.0  # a request is far too late after this many objectives, see `held_for`
_GATHER_S = 0.4  # seconds between two groups of prompts for a replica whose memory is full
# Seconds for which a computed supply is reused. Computing the supply costs microseconds per
# replica. One dispatch changes a large cell's supply less, so that supply is reused for longer.
_SUPPLY_KEPT_S = 0.01
_SUPPLY_KEPT_PER_REPLICA_S = 0.0005
_RUNS_KEPT_S = 0.05  # seconds for which the result of `runs_below` is reused
_PREEMPT_PAUSE_S = 0.05  # pause of the search after it found nothing to preempt, in seconds


class CellReadiness(IntEnum):
    """Whether an open replica of a cell can start a request now."""

    READY = 1
    PACED = 2  # replicas with room should decode some steps before they start the request
    FULL = 3  # no open replica has room for the request


class CellBook:
    """The router's record of a cell that it owns, or of a former cell with running requests.

    Attributes:
        epoch: Epoch of this record, greater than the epochs of earlier records of the cell.
        work: Meter of the cell's demand, for reports to the control plane.
        uncached_mean: Recent mean of the prompt tokens to compute per request.
        sent_state: State in the last message to gateways.
        is_dirty: Whether the state has changed since the last message to gateways.
    """

    __slots__ = (
        *("cell_id", "config", "epoch", "is_owned", "queue", "fleet", "forecast", "answers"),
        *("work", "adapter_waiters", "uncached_mean", "sent_state", "is_dirty"),
        *("_claims", "_preempt_at", "_priced", "_supply", "_supply_until"),
        *("_runs_below", "_runs_below_of", "_runs_below_until"),
    )

    def __init__(self, cell_id: str, config: CoreConfig, epoch: int = 1) -> None:
        self.cell_id = cell_id
        self.config = config
        self.epoch = epoch
        self.is_owned = True
        self.queue = FairQueue()
        self.fleet = CellFleet()
        self.forecast = FirstTokenForecast()
        self.answers = AnswerLengths(config.output_tokens_expected)
        self.work = WorkMeter()
        self.adapter_waiters = AdapterWaiters()
        self.uncached_mean = 0.0
        self.sent_state = wire.CellState()
        self.is_dirty = True
        self._claims = RoomClaims()
        self._preempt_at = float("-inf")
        self._priced = 0
        self._supply = NO_SUPPLY
        self._supply_until = float("-inf")
        self._runs_below = False
        self._runs_below_of = 0
        self._runs_below_until = float("-inf")

    def aside(self) -> "CellBook":
        """Return a copy of the cell for hypothetical decisions.

        Predictions made with the copy do not change the forecast of the original. The attributes
        are copied one by one, because a compiled class supports neither `copy` nor a list of slots.
        """
        aside = CellBook(self.cell_id, self.config, self.epoch)
        aside.is_owned, aside.queue, aside.fleet = self.is_owned, self.queue, self.fleet
        aside.forecast, aside.answers = self.forecast.aside(), self.answers
        aside.work, aside.adapter_waiters = self.work, self.adapter_waiters
        aside.uncached_mean, aside.sent_state = self.uncached_mean, self.sent_state
        aside.is_dirty, aside._claims = self.is_dirty, self._claims
        aside._preempt_at, aside._priced = self._preempt_at, self._priced
        aside._supply, aside._supply_until = self._supply, self._supply_until
        aside._runs_below, aside._runs_below_of = self._runs_below, self._runs_below_of
        aside._runs_below_until = self._runs_below_until
        return aside

    # --- replicas ---------------------------------------------------------------------------

    def update(self, book: ReplicaBook) -> None:
        """Recompute the predictions for a replica after a change of its state."""
        self.fleet.update(book)
        self.is_dirty = True

    def finished(self, dispatch: Dispatch, now: float) -> None:
        """Update the predictions of answer lengths, health and sessions after a complete answer."""
        request = dispatch.request
        self.answers.observe(request.tenant_id, dispatch.emitted)
        self.fleet.health.succeeded(dispatch.replica_id, now)
        if request.session:
            self.fleet.sessions.seen(request.session, dispatch.replica_id, now)

    # --- waiting requests -------------------------------------------------------------------

    def price(self, request: Request) -> AdmissionFigures:
        """Predict the uncached tokens of a new request, and set its objective.

        Returns:
            The figures that admission needs of every request.
        """
        fleet, config = self.fleet, self.config
        self.renew_mean_speed(request.arrived_at)
        request.uncached_tokens = request.prompt_tokens - fleet.most_cached(
            request, fleet.matches(request)
        )
        least_s = fleet.least_prefill_s(request.prompt_tokens)
        request.objective_s = config.ttft_base_s + config.ttft_factor * least_s
        uncached = request.uncached_tokens
        prefill_s = fleet.mean_speed.prefill_s(uncached, request.prompt_tokens - uncached)
        request.late_at = request.arrived_at + request.objective_s - prefill_s
        request.overdue_at = request.arrived_at + config.overtake_factor * request.objective_s
        self._priced += 1
        weight = max(_SMOOTHING, 1 / self._priced)
        self.uncached_mean += weight * (uncached - self.uncached_mean)
        request.output_expected = self.answers.expected(request.tenant_id, request.output_max)
        idle_prefill_s = fleet.idle_prefill_s(uncached, request.prompt_tokens - uncached)
        # An answer that has begun is not refused because of its adapter.
        adapter = "" if request.is_begun else request.adapter
        adapter_s = fleet.cold_load_s(adapter) if adapter else 0.0
        queue = self.queue
        requests, tokens = queue.tenant_load(request.priority, request.tenant_id)
        return AdmissionFigures(
            requests,
            tokens,
            queue.requests,
            queue.tokens,
            fleet.prompt_tokens_max,
            fleet.has_adapters,
            idle_prefill_s,
            adapter_s,
        )

    def renew_mean_speed(self, now: float) -> None:
        """Recompute the mean speed of the replicas, if the last result is too old."""
        self.fleet.renew_mean_speed(now, self.uncached_mean or 1.0)

    def enqueue(self, request: Request, now: float) -> None:
        """Queue a new request."""
        self.is_dirty = True
        self.queue.push(request, now)
        self.work.came(request, is_refused=False)
        self.adapter_waiters.add(request, self.queue.requests)

    def look_up(self, request: Request) -> Mapping[str, int]:
        """Return a waiting request's cached blocks by replica, and update the request's cost."""
        matches = self.fleet.matches(request)
        uncached = request.prompt_tokens - self.fleet.most_cached(request, matches)
        if uncached != request.uncached_tokens:
            self.queue.reprice(request, uncached)
        return matches

    def output_expected(self, request: Request) -> int:
        """Return the output tokens to book for a request."""
        return self.answers.expected(request.tenant_id, request.output_max)

    # --- placement --------------------------------------------------------------------------

    def readiness(self, request: Request, matches: Mapping[str, int], now: float) -> CellReadiness:
        """Return whether an open replica can start the request now, is paced, or has no room."""
        found = CellReadiness.FULL
        for book in self.fleet.open_replicas.values():
            if book.opens_at(now) > now:
                continue
            cached = placement.cached_tokens(book, request, matches)
            if book.fits(request.prompt_tokens, 0, cached):
                if not placement.is_paced(book, request.prompt_tokens - cached, cached):
                    return CellReadiness.READY
                found = CellReadiness.PACED
        return found

    def held_for(self, request: Request) -> ReplicaBook | None:
        """Return the replica whose KV memory is reserved for a request that fits on no replica yet.

        Later requests may be placed on other replicas, but not on this replica. From now on all
        full replicas receive prompts in groups, because every step with a prompt costs extra time.
        A request far beyond its objective loses little by waiting for a group.
        """
        output, replicas = self.output_expected(request), self.fleet.open_replicas
        is_only = len(replicas) == 1
        full = [
            book
            for book in replicas.values()
            if placement.excluded_by(book, request, output, 0, is_only=is_only) == "kv"
        ]
        for book in full:
            book.gathers_until = book.sent_at + _GATHER_S
        return max(full, key=lambda book: book.kv_free_blocks(), default=None)

    def is_gathered(self, request: Request, now: float) -> bool:
        """Return whether a very late request should wait for the next group of prompts."""
        if not _is_far_too_late(request, now):
            return False
        return any(book.gathers_until > now for book in self.fleet.open_replicas.values())

    def choose(
        self,
        request: Request,
        matches: Mapping[str, int],
        now: float,
        *,
        held: ReplicaBook | None = None,
    ) -> PlacementChoice | None:
        """Return the best replica except `held` for a request, or None if no replica has room."""
        fleet = self.fleet
        without: set[str] = set()
        if held is not None:
            without.add(held.replica_id)
        replicas = fleet.open_replicas
        if _is_far_too_late(request, now):
            without.update(key for key, book in replicas.items() if book.gathers_until > now)
        return placement.choose(
            replicas,
            request,
            matches,
            owed_until=fleet.owed_until,
            mean_speed=fleet.mean_speed,
            output=self.output_expected(request),
            home=fleet.sessions.home(request.session, now) if request.session else None,
            adapter_waits_s=fleet.adapter_waits_s(request.adapter) if request.adapter else {},
            without=without,
            is_only=len(replicas) == 1,
            now=now,
        )

    def dispatched(self, book: ReplicaBook, request: Request, cached: int, now: float) -> None:
        """Record a dispatch, for which `cached` prompt tokens are predicted to be cached."""
        self.fleet.dispatched(book, request, cached, now)
        self.is_dirty = True

    # --- forecasts --------------------------------------------------------------------------

    def supply(self, now: float) -> Supply:
        """Return the capacity of the replicas, recomputed at intervals of some milliseconds."""
        if now >= self._supply_until:
            self._supply = self._supply_now(now)
            self._supply_until = now + max(
                _SUPPLY_KEPT_S, self._supply.replicas * _SUPPLY_KEPT_PER_REPLICA_S
            )
        return self._supply

    def _supply_now(self, now: float) -> Supply:
        queue, answer_tokens = self.queue, max(1.0, self.answers.mean)
        prompt = queue.tokens / queue.requests if queue.requests else self.uncached_mean
        sequence_tokens = max(1.0, prompt + self.answers.mean)  # mean tokens of a new sequence
        tokens_s = ends_s = 0.0
        backlog_s = float("inf")
        free = replicas = 0
        for book in self.fleet.ready():
            limits = book.limits
            assert limits is not None, "ready means attached"
            if self.fleet.health.state(book.replica_id) is HealthState.EJECTED:
                continue
            replicas += 1
            tokens_s += book.tokens_s
            backlog_s = min(backlog_s, book.backlog_s(now))
            if book.role is ReplicaRole.PREFILL:
                continue  # sequences do not decode on a prefill replica
            running = len(book.dispatches)
            room = int(book.kv_free_blocks() * limits.block_tokens / sequence_tokens)
            if not running:
                room = max(room, 1)  # an idle replica always accepts one sequence
            free += max(0, min(limits.sequences_max - running, room))
            speed, engine_model = book.speed, book.engine_model
            is_prefilling = engine_model.tokens > 0.0 or not engine_model.pauses
            step_s = speed.full_step_s() if is_prefilling else speed.decode_step_s
            ends_s += running / (answer_tokens * step_s)
        return Supply(replicas, tokens_s, backlog_s, free, ends_s) if replicas else NO_SUPPLY

    def demand(self, request: Request, own_s: tuple[float, float], now: float) -> WorkAhead:
        """Return the work ahead of a new request, beside its own work.

        Args:
            request: The request.
            own_s: Seconds of its own prefill on an idle replica, and of loading its adapter.
            now: Time, in seconds.
        """
        uncached = request.uncached_tokens
        requests, tokens = self.queue.ahead(
            request.priority, request.tenant_id, request.weight, uncached, now
        )
        return WorkAhead(requests, tokens, *own_s)

    def idle_prefill_s(self, request: Request) -> float:
        """Return the seconds of a request's own prefill on an idle replica."""
        uncached = request.uncached_tokens
        return self.fleet.idle_prefill_s(uncached, request.prompt_tokens - uncached)

    def predict(self, request: Request, own_s: tuple[float, float], now: float) -> TimedPrediction:
        """Return the TTFT prediction of a new request, with the arguments of `demand`."""
        supply, demand = self.supply(now), self.demand(request, own_s, now)
        return self.forecast.predict(request, supply, demand, self.uncached_mean, now)

    def runs_below(self, priority: int, now: float) -> bool:
        """Return whether a lower tier has a running request that uses no reserved share."""
        if now >= self._runs_below_until or priority != self._runs_below_of:
            self._runs_below = any(
                dispatch.is_open
                and dispatch.request.priority < priority
                and not dispatch.request.reserved_permille
                for book in self.fleet.replicas.values()
                for dispatch in book.dispatches.values()
            )
            self._runs_below_of = priority
            self._runs_below_until = now + _RUNS_KEPT_S
        return self._runs_below

    # --- preemption -------------------------------------------------------------------------

    def makes_room_for(self, request: Request) -> bool:
        """Return whether sequences have been preempted for a waiting request."""
        return self._claims.has(request)

    def victims(self, request: Request, now: float) -> list[Dispatch]:
        """Return the dispatches to preempt for a request, none if preemption cannot help.

        Each request causes at most one preemption, and room that was made for other requests is not
        treated as free.
        """
        if request.is_preemptible or now < self._preempt_at:
            return []
        self._claims.forget_ended(now)
        if self._claims.has(request):
            return []
        due_s = min(request.arrived_at + request.objective_s, request.deadline_at) - now
        if queue_wait_s(self.supply(now), 0, 0.0) + self.idle_prefill_s(request) <= due_s:
            return []  # running sequences end early enough without a preemption
        books = preemption_figures.candidates(self.fleet, request)
        output = self.output_expected(request)
        rooms: list[PreemptionRoom | None] = []
        for book in books:
            claims = self._claims.of(book.replica_id)
            room = preemption_figures.room(book, request, output, claims, now)
            if preemption.fits(room, due_s):
                self._preempt_at = now + _PREEMPT_PAUSE_S
                return []
            has_victims = any(
                preemption_figures.may_stop(one, request) for one in book.dispatches.values()
            )
            rooms.append(room if has_victims else None)
        stopped = self._claims.stopped()

        def running(index: int) -> Sequence[RunningSequence]:
            book = books[index]
            return preemption_figures.running(book, request, stopped)

        deadline_s = request.deadline_at - now
        found = preemption.cheapest_replica(rooms, running, due_s=due_s, deadline_s=deadline_s)
        if found is None:
            self._preempt_at = now + _PREEMPT_PAUSE_S
            return []
        index, chosen = found
        book, made = books[index], rooms[index]
        assert made is not None, "a replica without room is not chosen"
        occupants = preemption_figures.occupants(book, request)
        victims = [occupants[one] for one in chosen]
        sequences = [victim.sequence for victim in victims]
        self._claims.add(request, book.replica_id, made.blocks_needed, sequences, now)
        return victims

    # --- news for other cells ---------------------------------------------------------------

    def service_report(self, owner: str, accounts_max: int, now: float) -> ServiceReport:
        """Return the next report of the tokens that tenants received, with the largest changes."""
        accounts = self.queue.report(accounts_max, now)
        return ServiceReport(self.cell_id, owner, self.epoch, self.queue.reports, accounts)

    def service_now(self, owner: str, accounts_max: int) -> ServiceReport:
        """Return a report for a new reader, which has the number of the last report."""
        accounts = self.queue.recent(accounts_max)
        return ServiceReport(self.cell_id, owner, self.epoch, self.queue.reports, accounts)

    # --- news for the control plane ---------------------------------------------------------

    def work_report(self) -> WorkReport:
        """Return the next report of demand, and of the replicas' speed."""
        meter, ready = self.work, self.fleet.ready()
        meter.reports += 1
        queued: dict[int, tuple[int, int]] = {}
        for priority, requests, tokens in self.queue.backlogs():
            before = queued.get(priority // CLASSES, (0, 0))
            queued[priority // CLASSES] = (before[0] + requests, before[1] + tokens)
        sequence_tokens = meter.prompt_mean + self.answers.mean
        uncached = round(self.uncached_mean)
        return WorkReport(
            self.cell_id,
            self.epoch,
            meter.reports,
            meter.tiers,
            queued,
            running=sum(len(book.dispatches) for book in self.fleet.replicas.values()),
            replicas_ready=len(ready),
            speed=median_speed(ready, sequence_tokens=sequence_tokens, tpot_s=self.config.tpot_s),
            first_token_s=self.fleet.idle_prefill_s(uncached, 0) if uncached else 0.0,
        )

    # --- news for gateways ------------------------------------------------------------------

    def wait_s(self, now: float) -> float:
        """Return the predicted seconds of waiting for a short request that arrives now."""
        ready = self.fleet.ready()
        if not ready:
            return RETRY_AFTER_UNKNOWN_S
        backlog_s = min(book.backlog_s(now) for book in ready)
        return backlog_s + self.queue.tokens / max(1.0, sum(book.tokens_s for book in ready))

    def state(self, now: float, *, is_draining: bool = False) -> wire.CellState:
        """Return the cell's state, by which gateways choose a cell for a request."""
        output = int(self.answers.mean)
        books = self.fleet.replicas.values()
        owed = sum(int(book.owed_tokens(now)) + book.output_owed() for book in books)
        ready = self.fleet.ready()
        blocks = sum(book.limits.kv_blocks for book in ready if book.limits is not None)
        free = sum(max(0, book.kv_free_blocks()) for book in ready)
        return wire.CellState(
            cell_id=self.cell_id,
            queued=self.queue.requests,
            running=sum(len(book.dispatches) for book in books),
            replicas_ready=len(ready),
            tokens_owed=owed + self.queue.tokens + output * self.queue.requests,
            kv_free_permille=1000 * free // blocks if blocks else 0,
            wait_ms=min(int(self.wait_s(now) * 1000), 1 << 31),
            is_draining=is_draining,
        )


def _is_far_too_late(request: Request, now: float) -> bool:
    return now > request.arrived_at + _LATE_FACTOR * request.objective_s
