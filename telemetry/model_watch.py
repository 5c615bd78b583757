"""Updates the metrics of the busiest models and of judged answers, which alert rules use.

Each update reads a few rollup rows per minute and model, independently of the number of requests.
There are few judgements, so they are read only every five minutes.
"""

import asyncio

from sluice.lifecycle import run_every
from telemetry import slo
from telemetry.judged_quality import judged_releases
from telemetry.metrics import TelemetryMetrics
from telemetry.store import STORE_ERRORS, Store

_EVERY_S = 15.0
_STEP_S = 10.0
_JUDGED_EVERY_S = 300.0


class ModelWatch:
    """Updates the metrics of models at intervals."""

    def __init__(self, store: Store, metrics: TelemetryMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._judged_at_s = float("-inf")

    async def run(self) -> None:
        """Update the metrics every 15 s until cancelled. A failed update leaves them unchanged."""
        await run_every(
            _EVERY_S, self.step, name="models", expected=STORE_ERRORS, step_timeout_s=_STEP_S
        )

    async def step(self) -> None:
        """Set the service levels of the last five minutes, and at times the judged quality."""
        self._metrics.show_models(await slo.busiest(self._store))
        now_s = asyncio.get_running_loop().time()
        if now_s - self._judged_at_s >= _JUDGED_EVERY_S:
            self._metrics.show_judged(await judged_releases(self._store))
            self._judged_at_s = now_s
