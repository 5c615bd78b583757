"""Checks whether routers with an open watch live, since a frozen router keeps connections open.

Each router streams signs of life from the address that gateways dial. Silence is counted in naps of
this process, so that a pause of this process is not mistaken for silence of all routers. Routers of
the last release know no such stream, and are pinged.
"""

import asyncio

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
_LOOK_NAPS = 3  # number of naps between two checks of routers that are not silent
# Naps without a sign of life after which a router is silent. Gateways wait for the same time. With
# a shorter time, a router would lose its cells in cases that interrupt no client's stream.
SILENT_NAPS_MAX = 9
# Seconds after which a silent stream, or an unanswered ping, is replaced by a new one.
_SILENCE_S = 2.0
_PING_EVERY_S = 0.3
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


class Liveness:
    """Reports silent routers to a `Presence`. `run` must be started in a TaskGroup."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._watched: dict[tuple[str, str], tuple[_HeardRouter, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Listen to all watched routers until cancelled."""
        naps = 1
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._follow(tasks)
                for (router_id, _), (router, _) in self._watched.items():
                    if router.was_heard(naps):
                        self._presence.answered(router_id)
                    elif router.is_silent:
                        self._presence.silent(router_id)
                naps = min((it.rest_naps for it, _ in self._watched.values()), default=1)
                await asyncio.sleep(naps * NAP_S)

    def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Listen to the routers that have a watch now, at their present addresses."""
        wanted = set(self._presence.watched().items())
        for key in wanted - self._watched.keys():
            router = _HeardRouter(key[1])
            self._watched[key] = router, tasks.create_task(router.listen())
        for key in self._watched.keys() - wanted:
            self._watched.pop(key)[1].cancel()


class _HeardRouter:
    """The connection to a router, with the length of the router's silence.

    Attributes:
        is_silent: Whether the router was heard before, and is no longer heard. A router that was
            never heard is not silent, because it may serve and be unreachable only for this
            process.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._signs = self._signs_seen = 0
        self._knows_pings_only = False
        self._naps = 0

    @property
    def is_silent(self) -> bool:
        return self._signs > 0 and self._naps >= SILENT_NAPS_MAX

    @property
    def rest_naps(self) -> int:
        """Number of naps until the next check is due."""
        return 1 if self._naps else _LOOK_NAPS

    def was_heard(self, naps: int) -> bool:
        """Return whether the router was heard since the last check, which was `naps` naps ago."""
        was_heard = self._signs != self._signs_seen
        self._signs_seen = self._signs
        self._naps = 0 if was_heard else self._naps + naps
        return was_heard

    async def listen(self) -> None:
        """Count signs of life until cancelled."""
        link = RenewedChannel(self._address, CertificateRole.ROUTER, options=_CHANNEL_OPTIONS)
        try:
            while True:
                hear = self._ping if self._knows_pings_only else self._read
                try:
                    async with asyncio.timeout(_SILENCE_S) as silence:
                        await hear(RouterServiceStub(await link.current()), silence)
                except TimeoutError:
                    continue
                except grpc.aio.AioRpcError as error:
                    self._note(error.code())
                await asyncio.sleep(NAP_S)
        finally:
            await link.aclose()

    async def _read(self, router: RouterServiceStub, silence: asyncio.Timeout) -> None:
        """Read a stream of signs of life until it ends. Each moves the end of `silence`."""
        loop = asyncio.get_running_loop()
        call = router.Live(wire.LiveRequest())
        try:
            async for _ in call:
                self._signs += 1
                silence.reschedule(loop.time() + _SILENCE_S)
        finally:
            call.cancel()

    async def _ping(self, router: RouterServiceStub, _silence: asyncio.Timeout) -> None:
        await router.Ping(wire.PingRequest())
        self._signs += 1
        await asyncio.sleep(_PING_EVERY_S - NAP_S)

    def _note(self, status: grpc.StatusCode) -> None:
        if status is grpc.StatusCode.UNIMPLEMENTED and not self._knows_pings_only:
            self._knows_pings_only = True
        elif status not in _SILENCE:
            self._signs += 1
