"""When ledger and engines were compared."""

import time

import pytest
from clickhouse_connect.driver.exceptions import OperationalError

from telemetry.closings import Closer
from telemetry.metrics import Metrics
from telemetry.progress import Progress
from telemetry.reconciliation import Reconciler
from telemetry.store import STORE_ERRORS


class Ledger:
    """A store that has nothing, or is away."""

    is_away = False

    async def query(self, *_: object) -> list[dict[str, object]]:
        if self.is_away:
            raise OperationalError
        return []


async def test_it_is_told_when_was_compared_not_when_it_was_tried() -> None:
    store, progress, metrics = Ledger(), Progress(), Metrics()
    closer = Closer(store, metrics, settle_s=0.0)  # type: ignore[arg-type]
    reconciler = Reconciler(store, progress, closer, metrics)  # type: ignore[arg-type]

    def told() -> float | None:
        return metrics.registry.get_sample_value("telemetry_ledger_compared_seconds")

    await reconciler.step()
    assert told() == 0  # it is not known what is closed
    progress.until_ms = closer.until_ms = int(time.time() * 1000)
    store.is_away = True
    with pytest.raises(STORE_ERRORS):
        await reconciler.step()
    assert told() == 0
    store.is_away = False
    before = time.time()
    await reconciler.step()
    assert before <= (told() or 0) <= time.time()
