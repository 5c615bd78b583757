"""The routers that this worker is connected to, and which of them gets a request."""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress

from gateway.directory import Directory
from gateway.router_link import RouterLink
from sluice.wire.control.v1 import control_pb2 as control

_SWEEP_S = 1.0


class RouterLinks:
    """One link per router that owns a cell; `run` belongs into the service's TaskGroup."""

    def __init__(self, directory: Directory, gateway_id: str) -> None:
        """Prepare; nothing is opened yet."""
        self._directory = directory
        self._gateway_id = gateway_id
        self._links: dict[str, RouterLink] = {}
        self._changed = asyncio.Event()
        self._wanted_changed = asyncio.Event()

    @property
    def up(self) -> int:
        """How many links can take requests."""
        return sum(link.is_up for link in self._links.values())

    @property
    def in_flight(self) -> int:
        """How many requests are with routers."""
        return sum(link.in_flight for link in self._links.values())

    def update(self) -> None:
        """Look again at who owns cells; call after each change of the directory."""
        self._wanted_changed.set()
        self._announce()

    async def run(self) -> None:
        """Open links to new owners; close those that own nothing and have nothing of ours left."""
        tasks: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                wanted = self._directory.router_addresses()
                for address in sorted(wanted - self._links.keys()):
                    link = RouterLink(address, self._gateway_id, self._announce)
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

    def find(self, pool_id: str, session_hash: int) -> tuple[RouterLink, str] | None:
        """Return a connected owner of a cell of the pool, with the cell's id; None without any."""
        owners = [
            (link, cell)
            for cell in self._directory.cells(pool_id)
            if (link := self._links.get(cell.router_address)) is not None and link.is_up
        ]
        if not owners:
            return None
        link, cell = _pick(owners, session_hash)
        return link, cell.id

    async def acquire(
        self, pool_id: str, session_hash: int, until_s: float
    ) -> tuple[RouterLink, str] | None:
        """Return what `find` finds by the loop time `until_s`, or None."""
        found = self.find(pool_id, session_hash)
        if found is None:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    while found is None:
                        self._changed.clear()
                        await self._changed.wait()
                        found = self.find(pool_id, session_hash)
        return found

    def _announce(self) -> None:
        self._changed.set()


def _pick(
    owners: Sequence[tuple[RouterLink, control.Cell]], session_hash: int
) -> tuple[RouterLink, control.Cell]:
    """Return the session's cell by rendezvous hashing, or the one that owes the fewest tokens."""
    if len(owners) == 1:
        return owners[0]
    if session_hash:
        return max(owners, key=lambda owner: _weight(owner[1].id, session_hash))
    return min(owners, key=lambda owner: _load(*owner))


def _weight(cell_id: str, session_hash: int) -> bytes:
    key = session_hash.to_bytes(8, "little")
    return hashlib.blake2b(cell_id.encode(), key=key, digest_size=8).digest()


def _load(link: RouterLink, cell: control.Cell) -> tuple[bool, int, int, str]:
    """Cells without replicas last; then by tokens owed, our own requests in flight, and name."""
    state = link.cells.get(cell.id)
    if state is None:
        return (False, 0, link.in_flight, cell.id)
    return (state.replicas_ready == 0, state.tokens_owed, link.in_flight, cell.id)
