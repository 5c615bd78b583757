"""The routers that this worker is connected to, and the choice of a router for a request."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.directory import Directory
from gateway.dispatch.cell_choice import CellView, Wishing
from gateway.dispatch.pace import AttemptPace
from gateway.dispatch.pool_moves import PoolMoves
from gateway.dispatch.prefix_boards import PrefixBoards
from gateway.dispatch.router_link import RouterLink
from gateway.dispatch.tier_gate import EarlyGate, GateAsk
from gateway.pool_choice import PoolReason

_SWEEP_S = 1.0


# A connected router, and the id of its cell that serves the request.
Found = tuple[RouterLink, str]


@dataclass(frozen=True, slots=True)
class CellHome:
    """The cell in which an answer was begun. Its replicas have cached the answer so far.

    Attributes:
        cell_id: Id of the cell.
        until_s: Loop time until which the answer waits for this cell. Later any cell may continue.
    """

    cell_id: str
    until_s: float


class RouterLinks:
    """The links to all routers that own a cell. `run` must run in the worker's TaskGroup.

    Attributes:
        is_stopping: Whether the process is about to exit.
        moves: Requests that wait and may move to another pool.
    """

    def __init__(
        self,
        directory: Directory,
        gateway_id: str,
        pace: AttemptPace,
        emit: Callable[[bytes], None] = lambda _: None,
        on_lost: Callable[[], None] = lambda: None,
        count_choice: Callable[[str, PoolReason], None] = lambda _, __: None,
    ) -> None:
        """Open no links before `run`.

        Args:
            directory: Reports which routers own which cells.
            gateway_id: Id of this worker, sent to the routers.
            pace: Pace of this worker, to which links report begin and end of steps.
            emit: Queues events that routers wrote for requests of a gateway that was killed.
            on_lost: Called when a router is lost, since its record of ended requests is lost too.
            count_choice: Counts a move to another pool, by the pool and the reason.
        """
        self._emit = emit
        self._on_lost = on_lost
        self._pace = pace
        self._directory = directory
        self._gateway_id = gateway_id
        self._links: dict[str, RouterLink] = {}
        self._gate = EarlyGate()
        self.moves = PoolMoves(self.views, count_choice)
        self._prefixes = PrefixBoards(directory.cells)
        self._waiting: set[Callable[[], None]] = set()
        self._wanted_changed = asyncio.Event()
        self.is_stopping = False

    @property
    def up(self) -> int:
        """Number of links that can submit requests."""
        return sum(link.is_up for link in self._links.values())

    @property
    def in_flight(self) -> int:
        """Number of requests at routers."""
        return sum(link.in_flight for link in self._links.values())

    def update(self) -> None:
        """Update the links after a change of the directory, which names the owners of cells."""
        self._prefixes.follow(self._directory.celled_pools())
        self._wanted_changed.set()
        self._announce()

    def stop(self) -> None:
        """End all waits for routers, because the process is about to exit."""
        self.is_stopping = True
        self._announce()

    async def run(self) -> None:
        """Open links to owners of cells, and close links that have neither cell nor request."""
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                wanted = self._directory.router_addresses()
                for address in sorted(wanted - self._links.keys()):
                    link = RouterLink(
                        address,
                        self._gateway_id,
                        self._announce,
                        self._pace,
                        self._emit,
                        self._on_lost,
                        self._prefixes.learn,
                        self.moves.look,
                    )
                    self._links[address] = link
                    tasks[address] = group.create_task(link.run())
                for address in sorted(self._links.keys() - wanted):
                    if not self._links[address].in_flight:
                        tasks.pop(address).cancel()
                        del self._links[address]
                self._wanted_changed.clear()
                try:
                    async with asyncio.timeout(_SWEEP_S):
                        await self._wanted_changed.wait()
                except TimeoutError:
                    continue

    def views(self, pool_id: str) -> list[CellView]:
        """Return the views of a pool's cells whose owners are connected."""
        return [view for view, _ in self._reachable(pool_id)]

    def serves(self, pool_id: str) -> bool:
        """Return whether a replica of the pool accepts requests."""
        views = self.views(pool_id)
        return any(view.replicas_ready and not view.is_refusing for view in views)

    def wait_ms(self, pool_id: str) -> float | None:
        """Return the least predicted wait in a pool's cells, or None if no replica serves."""
        views = self.views(pool_id)
        return min(
            [it.wait_ms for it in views if it.replicas_ready and not it.is_refusing], default=None
        )

    @property
    def is_gated(self) -> bool:
        """Whether any router refuses most requests of a tier."""
        return any(link.is_gated for link in self._links.values())

    def refused_for_s(self, pool_id: str, ask: GateAsk, now_s: float) -> float | None:
        """Return the seconds until a refused request may be retried, or None if it is not refused.

        Each refused request is reported to its router, which counts the request as demand.
        """
        reachable = self._reachable(pool_id)
        found = self._gate.refusal([view for view, _ in reachable], ask, now_s)
        if found is None:
            return None
        link = next(link for view, link in reachable if view.cell_id == found.cell_id)
        link.turned_away(found.cell_id, ask.priority)
        return found.retry_after_s

    def find(self, pool_id: str, of: Wishing) -> Found | None:
        """Return a connected router and its cell of the pool, or None if no router is connected.

        Args:
            pool_id: Id of the pool.
            of: The request. Its `wish` is computed only if several cells can be chosen.
        """
        reachable = self._reachable(pool_id)
        if not reachable:
            return None
        if len(reachable) == 1:  # the usual case
            only, link = reachable[0]
            return link, only.cell_id
        chosen = self._prefixes.choose(pool_id, [view for view, _ in reachable], of.wish)
        links = [link for view, link in reachable if view is chosen]
        return links[0], chosen.cell_id

    def _reachable(self, pool_id: str) -> list[tuple[CellView, RouterLink]]:
        links = self._links
        found: list[tuple[CellView, RouterLink]] = []
        for cell in self._directory.cells(pool_id):
            link = links.get(cell.router_address)
            if link is not None and link.is_up and (view := link.cells.get(cell.id)) is not None:
                view.is_draining = cell.is_draining
                found.append((view, link))
        return found

    def owner(self, pool_id: str, cell_id: str) -> Found | None:
        """Return the router that owns a cell, or None if this router is not connected."""
        reachable = self._reachable(pool_id)
        return next(((link, cell_id) for view, link in reachable if view.cell_id == cell_id), None)

    def watch(self, hear: Callable[[], None]) -> None:
        """Call `hear` at each change of the routers or their cells, and when this process stops."""
        self._waiting.add(hear)

    def unwatch(self, hear: Callable[[], None]) -> None:
        """Stop the calls of `hear`. An unknown `hear` is ignored."""
        self._waiting.discard(hear)

    def _announce(self) -> None:
        for hear in tuple(self._waiting):
            hear()
