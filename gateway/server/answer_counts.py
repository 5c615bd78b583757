"""Counts all ended requests, and logs all failed requests and a sample of the successful ones."""

import time
from collections.abc import Callable

import structlog

from gateway.metrics import GatewayMetrics
from sluice.errors import policy_of

log = structlog.get_logger(__name__)

_Count = Callable[[], None]


class AnswerCounts:
    """The counters of one worker for requests over HTTP and over WebSockets."""

    def __init__(self, metrics: GatewayMetrics, *, log_every: int) -> None:
        """Failed requests are all logged.

        Args:
            metrics: Metrics of this worker.
            log_every: Number of successful requests of which one is logged.
        """
        self._metrics, self._log_every = metrics, log_every
        self._until_log = 1
        self._counters: dict[tuple[str, int, str], tuple[_Count, bool]] = {}

    def note(
        self, endpoint: str, status: int, outcome: str, request_id: str, started_at_s: float
    ) -> None:
        """Count a request that has ended and that began at the monotonic time `started_at_s`."""
        key = (endpoint, status, outcome)
        counter = self._counters.get(key)
        if counter is None:
            count = self._metrics.requests.labels(endpoint, str(status), outcome).inc
            is_error = status >= 400 or policy_of(outcome) is not None
            counter = self._counters[key] = (count, is_error)
        count, is_error = counter
        count()
        self._until_log -= 1
        if is_error or not self._until_log:
            self._until_log = self._until_log or self._log_every
            log.info(
                "request_ended",
                request_id=request_id,
                endpoint=endpoint,
                status=status,
                outcome=outcome,
                total_ms=round((time.monotonic() - started_at_s) * 1000, 1),
            )
