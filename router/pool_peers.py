"""Receives other routers' reports of the tokens that tenants received in shared pools.

Peers are read from the last snapshot of the control plane, so reports are received even while the
control plane is unreachable. While a peer is silent, a cell uses only its own counts.
"""

import asyncio
import random
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple

import grpc.aio
import structlog

from router.hub import Hub
from router.pool_reports import PoolReports, unpacked
from sluice.channels import RenewedChannel
from sluice.identity import CertificateRole
from sluice.lifecycle import backoff_s
from sluice.watch import ControlState
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = structlog.get_logger(__name__)

_SILENCE_S = 3.0  # seconds until a silent stream is renewed, as peers send every second
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment must not be used within the fleet
)


class RouterPeer(NamedTuple):
    """Another router that owns cells of a pool in which this router owns cells."""

    pool_id: str
    router_id: str
    address: str


def cells_by_pool(state: ControlState, router_id: str) -> dict[str, list[str]]:
    """Return the cells that a router owns, by pool."""
    found: dict[str, list[str]] = {}
    for cell in state.cells.values():
        if cell.router_id == router_id:
            found.setdefault(cell.pool_id, []).append(cell.id)
    return found


def peers_of(state: ControlState, router_id: str) -> set[RouterPeer]:
    """Return the other routers that own cells in the same pools as a router."""
    pools = cells_by_pool(state, router_id)
    return {
        RouterPeer(cell.pool_id, cell.router_id, cell.router_address)
        for cell in state.cells.values()
        if cell.pool_id in pools and cell.router_address and cell.router_id not in ("", router_id)
    }


class PoolPeers:
    """The streams from all peers."""

    def __init__(
        self, hub: Hub, tasks: asyncio.TaskGroup, reports: PoolReports, *, router_id: str
    ) -> None:
        """Create a set without streams, which will run in `tasks`."""
        self._hub = hub
        self._tasks = tasks
        self._reports = reports
        self._router_id = router_id
        self._cells: Mapping[str, Sequence[str]] = {}
        self._streams: dict[RouterPeer, asyncio.Task[None]] = {}
        self._received_at: dict[RouterPeer, float] = {}
        self._is_stopping = False

    def follow(self, state: ControlState) -> None:
        """Start and end streams so that they match the present owners of cells."""
        if self._is_stopping:
            return
        self._cells = cells_by_pool(state, self._router_id)
        self._reports.follow(self._cells)
        wanted = peers_of(state, self._router_id)
        for peer in self._streams.keys() - wanted:
            self._streams.pop(peer).cancel()
            del self._received_at[peer]
        for peer in wanted - self._streams.keys():
            self._received_at[peer] = asyncio.get_running_loop().time()
            self._streams[peer] = self._tasks.create_task(self._receive(peer))

    def stop(self) -> None:
        """End all streams."""
        self._is_stopping = True
        for stream in self._streams.values():
            stream.cancel()

    def age_s(self) -> float:
        """Return the longest time since a peer's last report, in seconds, or 0 without peers."""
        now = asyncio.get_running_loop().time()
        return max((now - heard_at for heard_at in self._received_at.values()), default=0.0)

    async def _receive(self, peer: RouterPeer) -> None:
        attempt = 0
        link = RenewedChannel(peer.address, CertificateRole.ROUTER, options=_CHANNEL_OPTIONS)
        async with aclosing(link):
            while True:
                heard_at, reason = self._received_at.get(peer), "the stream ended"
                try:
                    await self._read(peer, await link.current())
                except grpc.aio.AioRpcError as error:
                    reason = error.details() or error.code().name
                except ValueError as error:
                    reason = str(error)
                except TimeoutError:
                    reason = f"silent for {_SILENCE_S:g} s"
                if self._received_at.get(peer) != heard_at:
                    attempt = 0
                if attempt in (0, 10):  # logged at the first failure, and again at the eleventh
                    log.warning("pool_peer_lost", router_id=peer.router_id, reason=reason)
                pause_s = backoff_s(attempt, first_s=0.1, max_s=2.0)
                attempt += 1
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads

    async def _read(self, peer: RouterPeer, channel: grpc.aio.Channel) -> None:
        """Read one stream to its end.

        Raises:
            TimeoutError: The peer sent no message for `_SILENCE_S`.
        """
        request = wire.FollowServiceRequest(router_id=self._router_id, pool_id=peer.pool_id)
        call = RouterServiceStub(channel).FollowService(request)
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    message = await call.read()
                if not isinstance(message, wire.FollowServiceResponse):  # the end is grpc.aio.EOF
                    return
                for report in unpacked(message):
                    self._hub.service_elsewhere(self._cells.get(peer.pool_id, ()), report)
                self._received_at[peer] = asyncio.get_running_loop().time()
        finally:
            call.cancel()
