"""Tests when the reconciler compares ledger and engines, and which hours it reads."""

import time

import pytest
from clickhouse_connect.driver.exceptions import OperationalError

from telemetry.closings import Closer
from telemetry.metrics import TelemetryMetrics
from telemetry.progress import IngestProgress
from telemetry.reconciliation import LedgerSums, Reconciler, stretches
from telemetry.rollups import HOUR_MS
from telemetry.store import STORE_ERRORS


class Ledger:
    """A store that has no rows, or cannot be reached."""

    is_away = False

    async def query(self, sql: str, _: object) -> list[dict[str, object]]:
        if self.is_away:
            raise OperationalError
        return [{"now_ms": int(time.time() * 1000)}] if "AS now_ms" in sql else []


async def test_it_is_told_when_was_compared_not_when_it_was_tried() -> None:
    store, progress, metrics = Ledger(), IngestProgress(), TelemetryMetrics()
    closer = Closer(store, metrics, settle_s=0.0)  # type: ignore[arg-type]
    reconciler = Reconciler(store, progress, closer, metrics)  # type: ignore[arg-type]

    def told() -> float | None:
        return metrics.registry.get_sample_value("telemetry_ledger_compared_seconds")

    await reconciler.step()
    assert told() == 0  # the end of the last closed hour is unknown
    progress.until_ms = closer.until_ms = int(time.time() * 1000)
    store.is_away = True
    with pytest.raises(STORE_ERRORS):
        await reconciler.step()
    assert told() == 0
    store.is_away = False
    before = time.time()
    await reconciler.step()
    assert before <= (told() or 0) <= time.time()


class Hours:
    """A store with a row for each hour, which records the hours that were read."""

    def __init__(self) -> None:
        self.now_ms = 1_790_000_000_000
        self.touched: list[int] = []
        self.reads: list[tuple[int, int]] = []
        self.is_away = False

    async def query(self, sql: str, parameters: dict[str, int]) -> list[dict[str, int]]:
        if "AS now_ms" in sql:
            return [{"now_ms": self.now_ms}]
        if "rollup_marks" in sql:
            return [{"hour_ms": at} for at in self.touched]
        if self.is_away:
            raise OperationalError
        span = (parameters["from_ms"], parameters["to_ms"])
        self.reads.append(span)
        return [{"hour_ms": at, "ledger": self.now_ms} for at in range(*span, HOUR_MS)]


async def test_hours_are_summed_again_when_rows_came_and_once_an_hour() -> None:
    store = Hours()
    sums = LedgerSums(store)  # type: ignore[arg-type]

    async def read(begin: int, end: int) -> list[tuple[int, int]]:
        store.reads.clear()
        rows = await sums.of((begin * HOUR_MS, end * HOUR_MS))
        assert [row["hour_ms"] // HOUR_MS for row in rows] == list(range(begin, end))
        store.now_ms += 1_000
        return [(a // HOUR_MS, b // HOUR_MS) for a, b in store.reads]

    assert await read(0, 48) == [(0, 48)]
    assert await read(0, 48) == []
    assert await read(1, 49) == [(48, 49)]
    store.touched = [5 * HOUR_MS, 6 * HOUR_MS, 40 * HOUR_MS]
    store.is_away = True
    with pytest.raises(STORE_ERRORS):
        await read(1, 49)
    store.is_away = False
    assert await read(1, 49) == [(5, 7), (40, 41)]
    store.touched = []
    store.now_ms += HOUR_MS
    assert await read(1, 49) == [(1, 49)]


def test_hours_that_follow_one_another_are_read_at_once() -> None:
    assert stretches([]) == []
    assert stretches(at * HOUR_MS for at in (1, 2, 3, 7)) == [
        (HOUR_MS, 4 * HOUR_MS),
        (7 * HOUR_MS, 8 * HOUR_MS),
    ]
