"""Reports to the control plane which replicas were ejected for wrong answers, with the evidence.

The router has already ejected the replica, and does not wait for an answer. While the control plane
is unreachable, the latest report of each replica is stored for some minutes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

import grpc.aio
import structlog

from router.core.types.actions import EjectionNotice
from sluice.channels import channel_to
from sluice.detector.evidence import EvidenceKind
from sluice.identity import CertificateRole
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub

log = structlog.get_logger(__name__)

MESSAGE_MAX = 64  # most ejections per message
KEPT_MAX = 1024  # most replicas with unsent reports, above which the oldest report is dropped
KEPT_S = 600.0  # seconds until an unsent report is dropped, as the receiver ignores old evidence
_RETRY_S = 2.0
_DEADLINE_S = 2.0
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a refused earlier connection causes no back-off
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment must not be used within the fleet
)
# Final refusals, because the control plane is too old for this call or the message is invalid.
_REFUSED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT)

Tell = Callable[[wire.AccuseRequest], Awaitable[object]]


class Accusations:
    """The reports that the control plane has not received yet."""

    def __init__(
        self, state: ControlState, router_id: str, address: str, tell: Tell | None = None
    ) -> None:
        """Create an empty queue, whose `run` must run in a TaskGroup.

        Args:
            state: Control state, with the epochs of this router's cells.
            router_id: Id of this router.
            address: host:port of the control plane.
            tell: Sends a message, or raises AioRpcError or TimeoutError. If None, gRPC is used.
        """
        self._state = state
        self._router_id = router_id
        self._report = tell or partial(_send, address)
        self._waiting: dict[str, wire.Ejection] = {}
        self._is_new = asyncio.Event()
        self._is_unheard = False

    def put(self, accusation: EjectionNotice) -> None:
        """Queue a report of an ejection, which replaces an earlier report of the same replica."""
        cell = self._state.cells.get(accusation.cell_id)
        if cell is None:
            return
        self._waiting.pop(accusation.replica_id, None)
        self._waiting[accusation.replica_id] = wire.Ejection(
            replica_id=accusation.replica_id,
            cell_id=accusation.cell_id,
            epoch=cell.epoch,
            evidence=EvidenceKind.CANARY,
            wrong=accusation.wrong,
            asked=accusation.asked,
            ejected_at_unix_ms=time.time_ns() // 1_000_000,
        )
        while len(self._waiting) > KEPT_MAX:
            del self._waiting[next(iter(self._waiting))]
        self._is_new.set()

    async def run(self) -> None:
        """Send queued reports until cancelled."""
        while True:
            await self._is_new.wait()
            if not await self._is_delivered():
                await asyncio.sleep(_RETRY_S)
            if not self._waiting:
                self._is_new.clear()

    async def _is_delivered(self) -> bool:
        """Send the oldest reports, and return whether the control plane received them."""
        try:
            await self._deliver()
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSED:
                log.warning("accusations_refused", count=len(self._waiting), error=repr(error))
                self._waiting.clear()
            elif not self._is_unheard:
                log.warning("accusations_not_sent", count=len(self._waiting), error=repr(error))
            self._is_unheard = True
            return False
        self._is_unheard = False
        return True

    async def _deliver(self) -> None:
        """Send the oldest reports.

        Raises:
            AioRpcError: The control plane refused the reports, or is not reachable.
            TimeoutError: The control plane did not answer in time.
        """
        since_ms = time.time_ns() // 1_000_000 - int(KEPT_S * 1000)
        for name, one in list(self._waiting.items()):
            if one.ejected_at_unix_ms <= since_ms:
                del self._waiting[name]
        told = list(self._waiting.values())[:MESSAGE_MAX]
        if not told:
            return
        async with asyncio.timeout(_DEADLINE_S):
            await self._report(wire.AccuseRequest(router_id=self._router_id, ejections=told))
        for one in told:
            if self._waiting.get(one.replica_id) is one:
                del self._waiting[one.replica_id]


async def _send(address: str, request: wire.AccuseRequest) -> None:
    async with channel_to(
        address, CertificateRole.CONTROL_PLANE, options=_CHANNEL_OPTIONS
    ) as channel:
        await ControlServiceStub(channel).Accuse(request)
