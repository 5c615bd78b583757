"""Reports this worker's progress in rollouts to the control plane.

The report has the version of the traffic splits that this worker follows, and the arrival time of
its oldest open request. A rollout waits until all gateways have reported the version of its split.
Then no new request follows an older split. The requests of the older split have ended once every
open request arrived after that.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import aclosing, suppress

import grpc.aio
import structlog

from gateway.rollouts.open_requests import OpenRequests
from sluice.base_files import MISSING_BASES_MAX
from sluice.channels import RenewedChannel
from sluice.identity import CertificateRole
from sluice.lifecycle import backoff_s
from sluice.watch import ControlState
from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub

log = structlog.get_logger(__name__)

# Seconds between reports during rollouts. The control plane ignores a gateway without a report for
# 15 s.
_EVERY_S = 5.0
_DEADLINE_S = 2.0
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class ConfirmationSender:
    """Sends the confirmations of one worker to the control plane.

    `run` has to run in a TaskGroup. `follow` must be called after each change of the state.
    """

    def __init__(
        self,
        address: str,
        gateway_id: str,
        state: ControlState,
        open_requests: OpenRequests,
        missing: Callable[[], Collection[str]],
    ) -> None:
        """The connection is opened by `run`.

        Args:
            address: `host:port` of the control plane.
            gateway_id: Id of this worker.
            state: State of the control plane, as received by this worker.
            open_requests: Open requests whose release a split has chosen.
            missing: Returns the bases in rollout that cannot be served here yet.
        """
        self._address = address
        self._gateway_id = gateway_id
        self._state = state
        self._open = open_requests
        self._missing = missing
        self._sent_missing: list[str] = []
        self._has_splits = False
        self._changed = asyncio.Event()

    def follow(self, response: wire.WatchResponse) -> None:
        """Confirm the state soon if the change may concern splits."""
        if response.is_snapshot or response.upserts.splits or response.removals.splits:
            had_splits, self._has_splits = self._has_splits, bool(self._state.splits)
            if had_splits or self._has_splits:
                self._changed.set()

    def refresh(self) -> None:
        """Confirm soon if the set of missing bases differs from the last confirmation."""
        if self._has_splits and self._find_missing() != self._sent_missing:
            self._changed.set()

    async def run(self) -> None:
        """Confirm each change, with retries until success, and every 5 s while there are splits."""
        attempt = 0
        link = RenewedChannel(
            self._address, CertificateRole.CONTROL_PLANE, options=_CHANNEL_OPTIONS
        )
        async with aclosing(link):
            while True:
                if attempt:
                    await self._pause(backoff_s(attempt - 1, first_s=0.1, max_s=2.0))
                else:
                    await self._pause(_EVERY_S if self._has_splits else None)
                self._changed.clear()
                request = self._request()
                try:
                    stub = ControlServiceStub(await link.current())
                    await stub.Confirm(request, timeout=_DEADLINE_S)
                    attempt = 0
                    self._sent_missing = list(request.missing_bases)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # an older control plane
                        attempt = 0
                        continue
                    if not attempt:
                        reason = error.details() or error.code().name
                        log.warning("confirmation_failed", address=self._address, reason=reason)
                    attempt += 1

    async def _pause(self, seconds: float | None) -> None:
        """Wait for a change, for at most `seconds`. None means without a bound."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _request(self) -> wire.ConfirmRequest:
        return wire.ConfirmRequest(
            gateway_id=self._gateway_id,
            version=self._state.version,
            oldest_open_unix_ms=self._open.oldest_unix_ms,
            missing_bases=self._find_missing(),
        )

    def _find_missing(self) -> list[str]:
        return sorted(self._missing())[:MISSING_BASES_MAX]
