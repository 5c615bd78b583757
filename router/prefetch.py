"""Loads adapters into engines' host memory before their first requests.

An adapter is prefetched for three reasons. A running rollout uses the adapter, its model's release
has just changed, or the router's plan assigns the adapter to a replica by demand. Any other adapter
is loaded by its first request, so a failed prefetch is only logged.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from sluice.errors import FailedError
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as control
from sluice.wire.engine.v1 import engine_pb2 as engine

log = structlog.get_logger(__name__)

PROMOTED_S = 60.0  # seconds after a change of a model's release in which its adapter is prefetched
ADAPTERS_MAX = 64  # most prefetched adapters per pool, because more would evict used adapters
AT_ONCE_MAX = 16  # replicas that load at the same time
_LOAD_S = 60.0
_RETRY_S = 10.0  # seconds until a failed load is retried
PLAN_S = 5.0  # seconds between two plans, enough for the loads of one plan

# Loads adapters into a replica, and returns the adapters that the replica has after the load. A
# failed load raises FailedError.
Load = Callable[[str, list[str], float], Awaitable[engine.AdapterList]]
# Maps the adapters that requests may name, by cell, to the adapters that each replica should load.
Plan = Callable[[Mapping[str, Sequence[str]]], Mapping[str, Sequence[str]]]


class Promotions:
    """The adapters of models whose release has just changed. Pure."""

    def __init__(self) -> None:
        # Time of expiry, by pool and adapter.
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()

    def on_change(self, response: control.WatchResponse, now_s: float) -> None:
        """Record changed models. A snapshot is ignored, because it has no times of changes."""
        if response.is_snapshot:
            return
        for model in response.upserts.models:
            if model.adapter_digest:
                key = (model.pool_id, model.adapter_digest)
                self._until[key] = now_s + PROMOTED_S
                self._until.move_to_end(key)

    def urgent(self, state: ControlState, now_s: float) -> dict[str, set[str]]:
        """Return the adapters that replicas should load, by pool, adapters of rollouts first."""
        while self._until and next(iter(self._until.values())) <= now_s:
            self._until.popitem(last=False)
        wanted: dict[str, set[str]] = {}
        for split in sorted(state.splits.values(), key=lambda split: split.id):
            for name in (split.canary, split.control):
                release = state.releases.get(f"{split.id}@{name}")
                if release is not None and release.adapter_digest:
                    _add(wanted, release.pool_id, release.adapter_digest)
        for pool_id, digest in reversed(self._until):
            _add(wanted, pool_id, digest)
        return wanted


@dataclass(slots=True)
class _PrefetchOrder:
    """The adapters that one replica was ordered to load, and the replica's address."""

    address: str
    digests: set[str] = field(default_factory=set[str])
    not_before_s: float = 0.0
    is_busy: bool = False


class Prefetch:
    """Sends load orders to this router's replicas, by tasks in a TaskGroup."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        load: Load,
        held: Callable[[str, Iterable[str]], None],
        plan: Plan = lambda _: {},
        *,
        router_id: str,
    ) -> None:
        """Create a prefetch without orders.

        Args:
            tasks: TaskGroup in which loads run.
            load: Loads adapters into a replica, given by id, within a timeout.
            held: Called with the adapters that a replica has in host memory.
            plan: Returns the adapters that each replica should load, most important first.
            router_id: Id of this router.
        """
        self._tasks = tasks
        self._load = load
        self._held = held
        self._router_id = router_id
        self._plan = plan
        self._planned: Mapping[str, Sequence[str]] = {}
        self._planned_at_s = float("-inf")
        self._promotions = Promotions()
        self._orders: dict[str, _PrefetchOrder] = {}
        self._places = asyncio.Semaphore(AT_ONCE_MAX)
        self._loads: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Cancel running loads, after which `follow` must not be called."""
        for task in self._loads:
            task.cancel()

    def on_change(self, response: control.WatchResponse) -> None:
        """Record changed models. The caller must call `follow` afterwards."""
        self._promotions.on_change(response, asyncio.get_running_loop().time())

    def follow(self, state: ControlState) -> None:
        """Send the load orders that replicas have not received yet. The caller repeats the call."""
        now_s = asyncio.get_running_loop().time()
        wanted = self._promotions.urgent(state, now_s)
        if now_s - self._planned_at_s >= PLAN_S:
            self._planned, self._planned_at_s = self._plan(self._known(state)), now_s
        ready = self._ready(state, wanted) if wanted or self._planned else {}
        for replica_id in self._orders.keys() - ready.keys():
            if not self._orders[replica_id].is_busy:
                del self._orders[replica_id]
        for replica_id, replica in ready.items():
            told = self._orders.get(replica_id)
            if told is None or (told.address != replica.grpc_address and not told.is_busy):
                told = self._orders[replica_id] = _PrefetchOrder(replica.grpc_address)
            if told.is_busy or now_s < told.not_before_s:
                continue
            urgent = wanted.get(replica.pool_id, set())
            planned = self._planned.get(replica_id, ())
            told.digests &= urgent.union(planned)
            missing = sorted(urgent - told.digests)
            missing += [it for it in planned if it not in told.digests and it not in urgent]
            if missing:
                told.is_busy = True
                task = self._tasks.create_task(self._order(replica_id, told, missing))
                self._loads.add(task)
                task.add_done_callback(self._loads.discard)

    def _known(self, state: ControlState) -> dict[str, list[str]]:
        """Return, for each cell of this router, the adapters of all models of the cell's pool."""
        of_pool: dict[str, set[str]] = {}
        for model in state.models.values():
            if model.adapter_digest:
                of_pool.setdefault(model.pool_id, set()).add(model.adapter_digest)
        cells = [cell for cell in state.cells.values() if cell.router_id == self._router_id]
        return {cell.id: sorted(of_pool.get(cell.pool_id, ())) for cell in cells}

    def _ready(
        self, state: ControlState, wanted: Mapping[str, set[str]]
    ) -> dict[str, control.Replica]:
        cells = {cell.id for cell in state.cells.values() if cell.router_id == self._router_id}
        return {
            replica.id: replica
            for replica in state.replicas.values()
            if replica.cell_id in cells
            and (replica.pool_id in wanted or replica.id in self._planned)
            and replica.state == control.REPLICA_STATE_READY
        }

    async def _order(self, replica_id: str, told: _PrefetchOrder, digests: list[str]) -> None:
        now = asyncio.get_running_loop().time
        try:
            async with self._places:
                answer = await self._load(replica_id, digests, _LOAD_S)
        except FailedError as error:
            log.info("adapters_not_loaded", replica_id=replica_id, reason=str(error))
            told.not_before_s = now() + _RETRY_S
        else:
            told.digests.update(digests)
            self._held(replica_id, [adapter.digest for adapter in answer.adapters])
            for problem in answer.problems:
                log.info(
                    "adapter_not_loaded",
                    replica_id=replica_id,
                    digest=problem.digest,
                    reason=problem.message,
                )
        finally:
            told.is_busy = False


def _add(wanted: dict[str, set[str]], pool_id: str, digest: str) -> None:
    digests = wanted.setdefault(pool_id, set())
    if len(digests) < ADAPTERS_MAX:
        digests.add(digest)
