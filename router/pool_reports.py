"""Reports the tokens that tenants received in this router's cells to the pools' other routers.

A report is created once for all readers, and only while there are readers. With more readers,
reports are less frequent and smaller, which bounds the messages and accounts per second that each
router sends and receives.
"""

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from router.core.types.service import ServiceReport, TenantService
from router.hub import Hub
from sluice.wire.router.v1 import router_pb2 as wire

INTERVAL_S = 0.1
_INTERVAL_PER_READER_S = 0.005  # seconds per reader, so 80 routers each send a report every 0.4 s
ACCOUNTS_MAX = 1024  # accounts in one round of reports by all cells of a pool
_ACCOUNTS_MIN = 32
_SIGN_OF_LIFE_S = 1.0
_BACKLOG_MAX = 16  # most unsent messages per reader, above which the reader must reconnect


class ServiceReader:
    """Another router that reads this router's reports of one pool.

    Attributes:
        is_cut: Whether the stream must end, because the reader is too slow or this router stops.
    """

    def __init__(self, first: bytes) -> None:
        self._messages = deque([first])
        self._ready = asyncio.Event()
        self._ready.set()
        self.is_cut = False

    def put(self, message: bytes) -> None:
        """Add a message, or cut a reader that is too far behind."""
        if len(self._messages) >= _BACKLOG_MAX:
            self.cut()
        self._messages.append(message)
        self._ready.set()

    def cut(self) -> None:
        """End the reader's stream."""
        self.is_cut = True
        self._ready.set()

    async def next(self) -> bytes | None:
        """Wait for the next message, and return None if the stream must end."""
        await self._ready.wait()
        if self.is_cut:
            return None
        message = self._messages.popleft()
        if not self._messages:
            self._ready.clear()
        return message


class PoolReports:
    """The reports of this router's cells, by pool, and the readers of the reports."""

    def __init__(self, hub: Hub, router_id: str) -> None:
        self._hub = hub
        self._router_id = router_id
        self._cells: dict[str, tuple[str, ...]] = {}
        self._readers: dict[str, list[ServiceReader]] = {}
        self._wanted = asyncio.Event()
        self._told_at: dict[str, float] = {}

    def follow(self, cells: Mapping[str, Sequence[str]]) -> None:
        """Set this router's present cells, by pool."""
        self._cells = {pool_id: tuple(ids) for pool_id, ids in cells.items()}
        self._look()

    def _look(self) -> None:
        pools = self._cells
        if any(self._readers.values()) or any(len(cells) > 1 for cells in pools.values()):
            self._wanted.set()
        else:
            self._wanted.clear()

    def open(self, pool_id: str) -> ServiceReader:
        """Add a reader, whose first message contains the accounts with recent changes."""
        reports = [
            report
            for cell_id in self._cells.get(pool_id, ())
            if (report := self._hub.service_now(cell_id, self._router_id, ACCOUNTS_MAX))
        ]
        reader = ServiceReader(packed(self._router_id, reports))
        self._readers.setdefault(pool_id, []).append(reader)
        self._look()
        return reader

    def close(self, pool_id: str, reader: ServiceReader) -> None:
        """Remove a reader."""
        readers = self._readers[pool_id]
        readers.remove(reader)
        if not readers:
            del self._readers[pool_id]
        self._look()

    def stop(self) -> None:
        """End all streams."""
        for readers in self._readers.values():
            for reader in readers:
                reader.cut()

    async def run(self) -> None:
        """Send reports at intervals until cancelled."""
        while True:
            await self._wanted.wait()
            readers = max(map(len, self._readers.values()), default=0)
            self._send_report()
            await asyncio.sleep(max(INTERVAL_S, _INTERVAL_PER_READER_S * readers))

    def _send_report(self) -> None:
        now = asyncio.get_running_loop().time()
        for pool_id, cells in self._cells.items():
            readers = self._readers.get(pool_id, [])
            if not readers and len(cells) < 2:
                continue
            accounts_max = max(_ACCOUNTS_MIN, ACCOUNTS_MAX // (len(readers) + len(cells)))
            reports = [
                report
                for cell_id in cells
                if (report := self._hub.service_report(cell_id, self._router_id, accounts_max))
            ]
            for report in reports:
                self._hub.service_elsewhere(cells, report)
            has_news = any(report.accounts for report in reports)
            last_at = self._told_at.get(pool_id, float("-inf"))
            if readers and (has_news or now - last_at >= _SIGN_OF_LIFE_S):
                self._told_at[pool_id] = now
                message = packed(self._router_id, reports)
                for reader in readers:
                    reader.put(message)


def packed(router_id: str, reports: Sequence[ServiceReport]) -> bytes:
    """Return one serialized message that contains the reports."""
    message = wire.FollowServiceResponse(router_id=router_id)
    for report in reports:
        cell = message.cells.add(cell_id=report.cell_id, epoch=report.epoch, number=report.number)
        for account in report.accounts:
            cell.tenant_ids.append(account.tenant_id)
            cell.priorities.append(account.priority)
            cell.since.append(account.since)
            cell.service.append(account.service)
    return message.SerializeToString()


def unpacked(message: wire.FollowServiceResponse) -> Iterator[ServiceReport]:
    """Yield the reports of a message.

    Raises:
        ValueError: The columns differ in length, or a sum is not finite.
    """
    for cell in message.cells:
        yield ServiceReport(
            cell.cell_id, message.router_id, cell.epoch, cell.number, accounts_of(cell)
        )


def accounts_of(cell: wire.CellService) -> list[TenantService]:
    """Return the accounts of a cell from the columns of its message.

    Raises:
        ValueError: The columns differ in length, or a sum is not finite.
    """
    rows = len(cell.tenant_ids)
    columns = (cell.priorities, cell.since, cell.service)
    if any(len(column) != rows for column in columns) or not math.isfinite(math.fsum(cell.service)):
        raise ValueError(f"the columns of cell {cell.cell_id} do not agree, or are no numbers")
    return list(map(TenantService, cell.priorities, cell.tenant_ids, cell.since, cell.service))
