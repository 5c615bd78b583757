"""Reports the demand of this router's cells to the control plane, for autoscaling.

A report contains totals, so a lost or repeated report does no harm. While the control plane is
unreachable, no reports are queued, because the next report includes everything. While nothing
changes, only every third report is sent, which keeps the control plane's record recent.

Work that waits for a sleeping replica is reported soon, since the report wakes the replica. If all
replicas of a cell sleep, or if it has none, the first request is reported at once.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

import grpc.aio
import structlog

from router.core.types.work import WorkReport
from router.hub import Hub
from sluice.channels import RenewedChannel
from sluice.identity import CertificateRole
from sluice.wire.control.v1 import control_pb2 as wire
from sluice.wire.control.v1.control_pb2_grpc import ControlServiceStub

log = structlog.get_logger(__name__)

_FIRST_S = 1.0
_INTERVAL_MIN_S, _INTERVAL_MAX_S = 0.2, 60.0
_RETRY_S = 5.0
_TIMEOUT_S = 2.0
_REPEAT_EVERY = 3  # number of intervals after which an unchanged report is sent again
_GAP_S = 0.2  # least seconds between two reports, which bounds those on waiting work
_CELLS_MAX = 10_000  # most cells per report
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class DemandReports:
    """Reports one router's demand to the control plane while `run` runs in a TaskGroup."""

    def __init__(self, hub: Hub, address: str, router_id: str) -> None:
        """Create a reporter to the control plane at `address`, a `host:port`."""
        self._hub = hub
        self._address = address
        self._router_id = router_id
        self._is_lost = False
        self._pace = ReportPace()

    async def run(self) -> None:
        """Send reports at the interval that the control plane requests, until cancelled."""
        link = RenewedChannel(
            self._address, CertificateRole.CONTROL_PLANE, options=_CHANNEL_OPTIONS
        )
        pause_s = _FIRST_S

        async def report() -> float:
            nonlocal pause_s
            request = packed(self._router_id, self._hub.work_reports()[:_CELLS_MAX])
            if self._pace.is_due(request):
                pause_s = await self._report(await link.current(), request)
            return pause_s

        async with aclosing(link):
            await report_for_ever(self._hub.work_waits, report)

    async def _report(self, channel: grpc.aio.Channel, request: wire.ReportDemandRequest) -> float:
        """Send one report, and return the seconds until the next report is due."""
        try:
            answer = await ControlServiceStub(channel).ReportDemand(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # An older control plane lacks this call, but may be replaced by a newer version.
            if not self._is_lost and error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                reason = error.details() or error.code().name
                log.warning("demand_not_reported", address=self._address, reason=reason)
            self._is_lost = True
            self._pace.failed()
            return _RETRY_S
        self._is_lost = False
        return min(_INTERVAL_MAX_S, max(_INTERVAL_MIN_S, answer.interval_ms / 1000))


class ReportPace:
    """Decides which reports are sent. Pure."""

    def __init__(self) -> None:
        self._sent: bytes | None = None
        self._skipped = 0

    def is_due(self, report: wire.ReportDemandRequest) -> bool:
        """Return whether a report is sent, because it has news or the last one becomes old."""
        content = wire.ReportDemandRequest()
        content.CopyFrom(report)
        for cell in content.cells:
            cell.number = 0  # the number differs in every report
        serialized = content.SerializeToString(deterministic=True)
        self._skipped += 1
        if serialized == self._sent and self._skipped < _REPEAT_EVERY:
            return False
        self._sent, self._skipped = serialized, 0
        return True

    def failed(self) -> None:
        """Record that the last report was lost, so that the next one is sent."""
        self._sent = None


async def report_for_ever(
    work_waits: asyncio.Event, report: Callable[[], Awaitable[float]]
) -> None:
    """Report at intervals, and earlier while work waits for sleeping replicas, until cancelled.

    Args:
        work_waits: Set when work waits for a sleeping or a first replica.
        report: Sends a report, and returns the seconds until the next report is due.
    """
    pause_s = _FIRST_S
    while True:
        pause_s *= random.uniform(0.9, 1.0)  # noqa: S311 - spreads
        await asyncio.sleep(min(pause_s, _GAP_S))
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, pause_s - _GAP_S)):
                await work_waits.wait()
        work_waits.clear()
        pause_s = await report()


def packed(router_id: str, reports: list[WorkReport]) -> wire.ReportDemandRequest:
    """Return one message that contains the reports."""
    message = wire.ReportDemandRequest(router_id=router_id)
    for report in reports:
        cell = message.cells.add(
            cell_id=report.cell_id,
            epoch=report.epoch,
            number=report.number,
            running=report.running,
            replicas_ready=report.replicas_ready,
            first_token_us=_us(report.first_token_s),
        )
        for priority in sorted(report.tiers.keys() | report.queued.keys()):
            work, queued = report.tiers.get(priority), report.queued.get(priority, (0, 0))
            tier = cell.tiers.add(
                priority=priority, queued=queued[0], queued_prompt_tokens=queued[1]
            )
            if work is not None:
                tier.requests, tier.refused = work.requests, work.refused
                tier.prompt_tokens, tier.output_tokens = work.prompt_tokens, work.output_tokens
        if report.speed is not None:
            cell.speed.prompt_token_us = report.speed.prompt_token_s * 1e6
            cell.speed.output_token_us = report.speed.output_token_s * 1e6
            cell.speed.sequences = report.speed.sequences
            cell.speed.steps = report.speed.steps
    return message


def _us(seconds: float) -> int:
    return round(seconds * 1e6) if math.isfinite(seconds) else 0
