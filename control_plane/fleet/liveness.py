"""Checks whether routers with an open watch answer, since a frozen router keeps connections open.

Each router is pinged at the address that gateways dial. Silence is counted in naps of this
process, so that a pause of this process is not mistaken for silence of all routers.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import structlog

from control_plane.fleet.presence import Presence
from sluice.channels import RenewedChannel
from sluice.identity import CertificateRole
from sluice.wire.router.v1 import router_pb2 as wire
from sluice.wire.router.v1.router_pb2_grpc import RouterServiceStub

log = structlog.get_logger(__name__)

NAP_S = 0.1
_PING_NAPS = 3  # number of naps between an answer and the next ping, which are one sleep
# Naps without an answer after which a router is silent. Gateways wait for the same time. With a
# shorter time, a router would lose its cells in cases that interrupt no client's stream.
SILENT_NAPS_MAX = 9
# Deadline of a ping in seconds. Only one ping is pending. A router that continues after a pause
# answers this ping or the next one.
_PING_TIMEOUT_S = 2.0
# Statuses that count as silence, because the call was not accepted or timed out. Any other status
# is an answer.
_SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

if TYPE_CHECKING:  # the class is not generic at run time
    _Call = grpc.aio.UnaryUnaryCall[wire.PingRequest, wire.PingResponse]


class Liveness:
    """Reports silent routers to a `Presence`. `run` must be started in a TaskGroup."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._watched: dict[tuple[str, str], _PingedLink] = {}

    async def run(self) -> None:
        """Ping all watched routers until cancelled."""
        naps = 1
        async with self._closing():
            while True:
                await self._follow()
                for (router_id, _), pinged in self._watched.items():
                    if await pinged.has_answered(naps):
                        self._presence.answered(router_id)
                    elif pinged.is_silent:
                        self._presence.silent(router_id)
                naps = min((it.rest_naps for it in self._watched.values()), default=1)
                await asyncio.sleep(naps * NAP_S)

    async def _follow(self) -> None:
        """Ping the routers that have a watch now, at their present addresses."""
        wanted = set(self._presence.watched().items())
        for key in wanted - self._watched.keys():
            self._watched[key] = _PingedLink(key[1])
        for key in self._watched.keys() - wanted:
            await self._watched.pop(key).close()

    @asynccontextmanager
    async def _closing(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            for pinged in self._watched.values():
                await pinged.close()


class _PingedLink:
    """The connection to a router that is pinged, with the length of the router's silence.

    Attributes:
        is_silent: Whether the router has answered before, and no longer answers. A router that
            never answered is not silent, because it may serve and be unreachable only for this
            process.
    """

    def __init__(self, address: str) -> None:
        self._link = RenewedChannel(address, CertificateRole.ROUTER, options=_CHANNEL_OPTIONS)
        self._call: _Call | None = None
        self._was_alive = False
        self._naps = 0

    @property
    def is_silent(self) -> bool:
        return self._was_alive and self._naps >= SILENT_NAPS_MAX

    @property
    def rest_naps(self) -> int:
        """Number of naps until the next check is due."""
        return 1 if self._call is not None else max(1, _PING_NAPS - self._naps)

    async def has_answered(self, naps: int) -> bool:
        """Check whether the pending ping was answered, and send the next ping if it is due.

        `naps` is the number of naps since the last check.
        """
        self._naps += naps
        call = self._call
        if call is None:
            if self._naps >= _PING_NAPS:
                router = RouterServiceStub(await self._link.current())
                self._call = router.Ping(wire.PingRequest(), timeout=_PING_TIMEOUT_S)
            return False
        if not call.done():
            return False
        self._call = None
        if await call.code() in _SILENCE:
            return False
        self._was_alive = True
        self._naps = 0
        return True

    async def close(self) -> None:
        """Cancel a pending ping, and close the connection."""
        if self._call is not None:
            self._call.cancel()
        await self._link.aclose()
