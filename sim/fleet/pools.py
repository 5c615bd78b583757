"""The pools of a fleet over a day, scaled by the product's `plan` in a fluid model of work.

The fluid model has amounts of work (work-seconds) instead of single requests. A ready replica does
one work-second per second. `plan` decides for all pools under one budget, as in the control plane.
The control plane's functions assign replicas to cells, and cells to routers.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from control_plane.fleet.cells import CELL_DRAIN_S, assign_cells, spread_pools
from control_plane.fleet.model import Cell, Pool, Replica, ReplicaState, Router
from control_plane.scaling.demand import BUCKET_S
from control_plane.scaling.model import FleetBudget, PoolFacts, PoolState, ScalingSettings
from control_plane.scaling.plan import plan, remember
from control_plane.scaling.sleeping import urgent
from sim.fleet.day import STEP_S, ZONES, BaseKind, DemandOfDay, FleetDay, Moment

OBJECTIVE_S = 1.5
_IDLE_S, _BUSY, _BUSY_S = 0.15, 0.9, 3.0  # the TTFT model of `control_plane.scaling.fluid`
_BATCH_SHARE, _BATCH_S = 0.3, 900.0
_WAKE_S = 6.0
_FIRST_UTILISATION = 0.75
_SLOW = 0.25  # speed of a bad replica
_EJECTED_S = 15.0  # seconds until the router sends a bad replica no more requests
_ROUTERS = 30
_CELLS_EVERY_S = 60.0
_SLEEPERS = 0.05


@dataclass(slots=True)
class FleetReplica:
    """A replica of the simulated fleet.

    Attributes:
        number: Number in its pool.
        zone: Zone of the replica.
        ready_at_s: Time from which the replica serves.
        bad_at_s: Time at which the replica became slow, or infinite if it is not slow.
    """

    number: int
    zone: int
    ready_at_s: float
    bad_at_s: float = float("inf")


@dataclass(slots=True)
class FleetPool:
    """A pool of the simulated fleet with its replicas, its queue and its figures.

    Attributes:
        base: Number of the base.
        kind: Kind of the base.
        capacity_rps: Requests per second that a fully used replica serves.
        state: State of the pool that `plan` reads.
        replicas: Replicas that serve or boot.
        sleepers: Number of sleeping replicas by zone.
        waiting: Work-seconds in the queue, for urgent work and for batch work.
        violated_minutes: Minutes with a step in which first tokens missed the objective.
        work: Urgent work-seconds that arrived.
        late_work: Urgent work-seconds that arrived while first tokens missed the objective.
        gpu_s: Paid accelerator-seconds.
    """

    base: int
    kind: BaseKind
    capacity_rps: float
    state: PoolState
    replicas: list[FleetReplica] = field(default_factory=list[FleetReplica])
    sleepers: list[int] = field(default_factory=list[int])
    waiting: list[float] = field(default_factory=lambda: [0.0, 0.0])
    violated_minutes: int = 0
    work: float = 0.0
    late_work: float = 0.0
    gpu_s: float = 0.0
    made: int = 0
    bucket: list[float] = field(default_factory=list[float])
    minute: list[tuple[float, float, float]] = field(
        default_factory=list[tuple[float, float, float]]
    )
    has_new_bad: bool = False

    @property
    def name(self) -> str:
        """The id of the pool."""
        return f"base-{self.base}"


class FleetOfPools:
    """The simulated pools of a day, with the figures of the whole fleet.

    Attributes:
        pools: The pools.
        moments: One entry per minute and pool, to be grouped into strata.
        replica_moves: Number of moves of a replica to another cell.
        cell_moves: Number of moves of a cell to another router.
        timeline: Demand, ready and paid accelerators, and violated pools of each minute.
    """

    def __init__(self, day: FleetDay, capacity_rps: Mapping[str, float]) -> None:
        """Begin with the replicas that the demand of the first minute needs.

        Args:
            day: The day.
            capacity_rps: Requests per second that a fully used replica serves, by kind.
        """
        self._day = day
        self._draw = random.Random(f"fleet {day.seed}")  # noqa: S311 - repeatable on purpose
        self.demand = DemandOfDay(day)
        self._is_lost = False
        self.pools = [self._pool(base, capacity_rps) for base in range(day.bases)]
        self.moments: list[Moment] = []
        self.timeline: list[dict[str, float]] = []
        self.replica_moves = self.cell_moves = 0
        self._cells: list[Cell] = []
        self._cell_of: dict[str, str] = {}

    def _pool(self, base: int, capacity_rps: Mapping[str, float]) -> FleetPool:
        day, kind = self._day, self._day.kind(base)
        settings = ScalingSettings(
            replicas_min=2,
            replicas_max=day.accelerators // kind.accelerators,
            accelerators=kind.accelerators,
            sleepers_share=_SLEEPERS,
        )
        state = PoolState(settings, PoolFacts(0, 0, 0.0, OBJECTIVE_S), boots_s=[*kind.boot_s] * 8)
        pool = FleetPool(base, kind, capacity_rps[kind.name], state)
        first = self.demand.rps(base, 0.0) / pool.capacity_rps
        state.history.fill(first, 3600.0)
        for _ in range(max(2, ceil(first / _FIRST_UTILISATION))):
            self._start(pool, 0.0)
        return pool

    # --- time -------------------------------------------------------------------------------

    def step(self, at_s: float) -> None:
        """Simulate the next five seconds."""
        self._lose_zone(at_s)
        for pool in self.pools:
            self._serve(pool, at_s)
        if at_s % BUCKET_S == 0.0:
            self._plan(at_s)
        if at_s % 60.0 == 0.0 and at_s:
            self._end_minute()
        if at_s % _CELLS_EVERY_S == 0.0:
            self._deal(at_s)

    def _serve(self, pool: FleetPool, at_s: float) -> None:
        ready = [it for it in pool.replicas if it.ready_at_s <= at_s]
        self._break(pool, ready, at_s)
        capacity = sum(
            1.0 if at_s < it.bad_at_s else _SLOW if at_s < it.bad_at_s + _EJECTED_S else 0.0
            for it in ready
        )
        rps = self.demand.rps(pool.base, at_s)
        demand = rps / pool.capacity_rps
        urgent_work = (1 - _BATCH_SHARE) * demand * STEP_S
        pool.waiting[0] += urgent_work
        pool.waiting[1] += _BATCH_SHARE * demand * STEP_S
        left = room = capacity * STEP_S
        for tier, waiting in enumerate(pool.waiting):
            done = min(waiting, left)
            pool.waiting[tier] -= done
            left -= done
        used = (room - left) / room if room else 1.0
        # The router serves urgent work before batch work, so only queued urgent work delays first
        # tokens.
        ttft_s = _IDLE_S + pool.waiting[0] / max(capacity, 0.25)
        if urgent_work > 0.9 * room:
            ttft_s += _BUSY_S * max(0.0, used - _BUSY)
        is_late = ttft_s > OBJECTIVE_S
        pool.work += urgent_work
        pool.late_work += urgent_work * is_late
        paid = len(pool.replicas) + len(pool.sleepers)
        pool.gpu_s += paid * pool.kind.accelerators * STEP_S
        pool.bucket.append(demand)
        pool.minute.append((rps * STEP_S, demand / max(capacity, 0.25), float(is_late)))
        self._observe(pool, len(ready))

    def _break(self, pool: FleetPool, ready: list[FleetReplica], at_s: float) -> None:
        """Make replicas slow by chance, and replace the slow replicas that routers have ejected."""
        rate = self._day.bad_per_hour / 1000 / 3600 * STEP_S * len(ready)
        if self._draw.random() < rate:
            victim = self._draw.choice(ready)
            victim.bad_at_s = min(victim.bad_at_s, at_s)
            pool.has_new_bad = True
        for one in [it for it in ready if at_s >= it.bad_at_s + 2 * _EJECTED_S]:
            pool.replicas.remove(one)
            ready.remove(one)
            self._start(pool, at_s)

    def _observe(self, pool: FleetPool, ready: int) -> None:
        pool.state.facts = replace(
            pool.state.facts,
            ready=ready,
            booting=len(pool.replicas) - ready,
            asleep=len(pool.sleepers),
            backlog_work_s=pool.waiting[0],
            deferred_work_s=pool.waiting[1],
            deferrable_share=_BATCH_SHARE,
            deferrable_s=_BATCH_S,
        )

    # --- scaling ----------------------------------------------------------------------------

    def _plan(self, at_s: float) -> None:
        for pool in self.pools:
            if pool.bucket:
                pool.state.history.add(sum(pool.bucket) / len(pool.bucket))
                pool.bucket.clear()
        share = (ZONES - self._is_lost) / ZONES
        budget = FleetBudget(accelerators=self._day.accelerators * share)
        states = {pool.name: pool.state for pool in self.pools}
        plans = plan(states, budget, at_s)
        for pool in self.pools:
            decided = plans[pool.name]
            remember(pool.state, decided, at_s)
            self._wake(pool, urgent(pool.state, at_s), at_s)
            self._scale(pool, decided.wanted, decided.asleep, at_s)

    def _scale(self, pool: FleetPool, wanted: int, asleep: int, at_s: float) -> None:
        missing = wanted - len(pool.replicas)
        if missing > 0:
            missing -= self._wake(pool, missing, at_s)
            for _ in range(missing):
                self._start(pool, at_s)
        elif missing < 0:
            pool.replicas.sort(key=lambda it: it.ready_at_s)
            going = pool.replicas[missing:]
            del pool.replicas[missing:]
            served = [it.zone for it in going if it.ready_at_s <= at_s]
            pool.sleepers += served[: max(0, asleep - len(pool.sleepers))]
        del pool.sleepers[asleep:]

    def _wake(self, pool: FleetPool, count: int, at_s: float) -> int:
        woken = min(count, len(pool.sleepers))
        for _ in range(woken):
            self._add(pool, pool.sleepers.pop(), at_s + _WAKE_S)
        return woken

    def _start(self, pool: FleetPool, at_s: float) -> None:
        """Boot a replica in the zone with the pool's fewest replicas, without delay at time 0."""
        zones = [zone for zone in range(ZONES) if not self._is_gone(zone)]
        held = [sum(it.zone == zone for it in pool.replicas) for zone in zones]
        zone = zones[held.index(min(held))]
        self._add(pool, zone, at_s + self._draw.uniform(*pool.kind.boot_s) if at_s else 0.0)

    def _add(self, pool: FleetPool, zone: int, ready_at_s: float) -> None:
        pool.made += 1
        pool.replicas.append(FleetReplica(pool.made, zone, ready_at_s))

    # --- faults -----------------------------------------------------------------------------

    def _is_gone(self, zone: int) -> bool:
        return self._is_lost and zone == self.demand.zone_loss.zone

    def _lose_zone(self, at_s: float) -> None:
        loss = self.demand.zone_loss
        is_lost = loss.from_s <= at_s < loss.until_s
        if is_lost and not self._is_lost:
            for pool in self.pools:
                pool.replicas = [it for it in pool.replicas if it.zone != loss.zone]
                pool.sleepers = [zone for zone in pool.sleepers if zone != loss.zone]
        self._is_lost = is_lost

    # --- cells ------------------------------------------------------------------------------

    def _deal(self, at_s: float) -> None:
        """Assign replicas to cells and cells to routers, by the control plane's functions."""
        pools = [Pool(pool.name, "sim", max(1, len(pool.replicas))) for pool in self.pools]
        replicas = [
            Replica(
                key,
                pool.name,
                self._cell_of.get(key, ""),
                f"zone-{it.zone}",
                state=_state(it, at_s),
            )
            for pool in self.pools
            for it in pool.replicas
            if (key := f"{pool.name}-r{it.number}")
        ]
        spread = spread_pools(pools, self._cells, replicas)
        gone = set(spread.remove)
        cells = [
            self._aged(cell, spread.drain, spread.revive)
            for cell in self._cells
            if cell.id not in gone
        ]
        cells += spread.create
        for key, cell_id in spread.move.items():
            self.replica_moves += bool(self._cell_of.get(key))
            self._cell_of[key] = cell_id
        self._place_new(replicas, spread.open)
        sizes: dict[str, int] = {}
        for one in replicas:
            cell_id = self._cell_of[one.id]
            sizes[cell_id] = sizes.get(cell_id, 0) + 1
        routers = {
            f"router-{number}": Router(f"router-{number}", "", 0.0, here_s=at_s)
            for number in range(_ROUTERS)
            if not self._is_gone(number % ZONES)
        }
        moved = assign_cells(cells, routers, sizes, may_take=True)
        owners = {cell.id: cell for cell in cells}
        self.cell_moves += sum(bool(owners[cell.id].router_id) for cell in moved)
        self._cells = list({**owners, **{cell.id: cell for cell in moved}}.values())

    @staticmethod
    def _aged(cell: Cell, drain: tuple[str, ...], revive: tuple[str, ...]) -> Cell:
        if cell.id in drain:
            return replace(cell, is_draining=True, draining_s=0.0)
        if cell.id in revive:
            return replace(cell, is_draining=False, draining_s=0.0)
        return replace(cell, draining_s=2 * CELL_DRAIN_S) if cell.is_draining else cell

    def _place_new(self, replicas: list[Replica], opened: Mapping[str, tuple[str, ...]]) -> None:
        sizes: dict[str, int] = {}
        for one in replicas:
            cell_id = self._cell_of.get(one.id, "")
            sizes[cell_id] = sizes.get(cell_id, 0) + 1
        known = {one.id for one in replicas}
        for key in self._cell_of.keys() - known:
            del self._cell_of[key]
        for one in replicas:
            if one.id not in self._cell_of:
                smallest = min(opened[one.pool_id], key=lambda it: sizes.get(it, 0))
                self._cell_of[one.id] = smallest
                sizes[smallest] = sizes.get(smallest, 0) + 1

    # --- figures ----------------------------------------------------------------------------

    def _end_minute(self) -> None:
        row = {"demand": 0.0, "ready": 0.0, "paid": 0.0, "violated": 0.0, "rps": 0.0}
        for pool in self.pools:
            requests = sum(it[0] for it in pool.minute)
            used = sum(it[0] * it[1] for it in pool.minute) / max(requests, 1e-9)
            is_late = any(it[2] for it in pool.minute)
            pool.violated_minutes += is_late
            facts, per = pool.state.facts, pool.kind.accelerators
            self.moments.append(Moment(pool.kind.name, used, requests, pool.has_new_bad))
            row["demand"] += used * facts.ready * per
            row["ready"] += facts.ready * per
            row["paid"] += (len(pool.replicas) + len(pool.sleepers)) * per
            row["violated"] += is_late
            row["rps"] += requests / 60.0
            pool.minute.clear()
            pool.has_new_bad = False
        self.timeline.append(row)


def _state(replica: FleetReplica, at_s: float) -> ReplicaState:
    return ReplicaState.READY if replica.ready_at_s <= at_s else ReplicaState.STARTING
