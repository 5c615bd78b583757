"""Closings become rows where no gateway's own event is, in the real trace store."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent, TokenCount
from telemetry.closings import OUTCOME, Closer
from telemetry.metrics import TelemetryMetrics
from telemetry.reconciliation import ReconciliationState, reconciled
from telemetry.rows import CLOSING_COLUMNS, CLOSING_VERSION, COUNT_VERSION, RowBatch
from telemetry.store import Store
from tests.integration.trace_site import emptied_store

pytestmark = pytest.mark.real

NOW_MS = int(time.time() * 1000)
HOUR_MS = NOW_MS // 3_600_000 * 3_600_000 - 5 * 3_600_000


@pytest_asyncio.fixture
async def store(shared_tracestore: Any) -> AsyncIterator[Store]:
    async with emptied_store(shared_tracestore.address) as found:
        yield found


def event(number: int, **fields: Any) -> RequestEvent:
    values = {"schema_version": 1, "outcome": "stop", "status": 200, "model": "m"} | fields
    return RequestEvent(
        event_id=f"evt_{number}",
        received_at_unix_ms=NOW_MS + number,
        tenant_id="ten_a",
        **values,  # type: ignore[arg-type]
    )


def closing(number: int, **fields: Any) -> RequestEvent:
    told = {"outcome": OUTCOME, "status": 500, "router_id": "r1"} | fields
    return event(number, schema_version=CLOSING_VERSION, **told)


def closer(store: Store, settle_s: float = -1.0) -> Closer:
    """Return one that takes what was written up to now."""
    return Closer(store, TelemetryMetrics(), settle_s=settle_s)


async def rows(store: Store) -> dict[str, tuple[str, int, int]]:
    found = await store.query(
        "SELECT event_id, outcome, prompt_tokens, output_tokens FROM requests FINAL", {}
    )
    assert len({row["event_id"] for row in found}) == len(found)
    return {
        row["event_id"]: (row["outcome"], row["prompt_tokens"], row["output_tokens"])
        for row in found
    }


async def test_the_gateways_own_event_wins_whenever_it_comes(store: Store) -> None:
    await store.insert(RowBatch([event(1, output_tokens=5)]))
    closings = [closing(number, output_tokens=3) for number in (1, 2, 3)]
    await store.insert(RowBatch(closings=closings))
    await store.insert(RowBatch([event(2, output_tokens=6)]))
    await closer(store).step()
    told = {"evt_1": ("stop", 0, 5), "evt_2": ("stop", 0, 6)}
    assert await rows(store) == told | {"evt_3": (OUTCOME, 0, 3)}
    await store.insert(RowBatch([event(3, output_tokens=7)]))  # it had spooled it to its disk
    await closer(store).step()
    assert await rows(store) == told | {"evt_3": ("stop", 0, 7)}


async def test_a_request_is_the_sum_of_its_answers_wherever_they_ran(store: Store) -> None:
    first = closing(1, prompt_tokens=9, cached_tokens=4, output_tokens=10, choices=2)
    again = closing(1, prompt_tokens=9, output_tokens=25, router_id="r2", choices=2)
    other = closing(1, part=1, output_tokens=7, choices=2)
    await store.insert(RowBatch(closings=[first, other]))
    once = closer(store)
    await once.step()
    assert await rows(store) == {"evt_1": (OUTCOME, 9, 17)}
    await store.insert(RowBatch(closings=[again, first, other]))  # told twice, as brokers do
    await once.step()
    await once.step()
    await closer(store).step()
    assert await rows(store) == {"evt_1": (OUTCOME, 9, 32)}


async def test_unplaced_prompts_are_not_billed_beside_placed_ones(
    store: Store,
) -> None:
    queued = closing(1, prompt_tokens=100)  # of a completion with two prompts
    placed = closing(1, part=1, prompt_tokens=30, output_tokens=7, replica_id="a", queue_us=5)
    alone = [closing(2, part=part, prompt_tokens=10) for part in (0, 1)]
    lost = closing(3, prompt_tokens=40, cached_tokens=8, output_tokens=3, replica_id="b")
    resumed = closing(3, prompt_tokens=40, output_tokens=3, router_id="r2")  # queued there
    later = closing(4, prompt_tokens=50, output_tokens=3, router_id="r2")  # the first is forgotten
    await store.insert(RowBatch(closings=[queued, placed, *alone, lost, later]))
    await store.insert(RowBatch(closings=[resumed]))
    await closer(store).step()
    assert await rows(store) == {
        "evt_1": (OUTCOME, 30, 7),
        "evt_2": (OUTCOME, 20, 0),
        "evt_3": (OUTCOME, 40, 3),
        "evt_4": (OUTCOME, 50, 3),
    }
    found = await store.query(
        "SELECT event_id, replica_id, queue_us, cached_tokens FROM requests FINAL", {}
    )
    told = {row["event_id"]: (row["replica_id"], row["queue_us"]) for row in found}
    assert told == {"evt_1": ("a", 5), "evt_2": ("", 0), "evt_3": ("b", 0), "evt_4": ("", 0)}
    assert sum(row["cached_tokens"] for row in found) == 8
    await store.insert(RowBatch(counts=counts(1, {"m": 13})))
    hour_ms = NOW_MS // 3_600_000 * 3_600_000
    ledger = await reconciled(store, hour_ms, hour_ms + 7_200_000, hour_ms)
    assert sum(it.ledger_prompt_tokens for it in ledger) == 30 + 40 + 50


async def test_a_mark_that_was_lost_with_the_server_is_made_again(store: Store) -> None:
    await store.insert(RowBatch(closings=[closing(1, output_tokens=3)]))
    await closer(store).step()
    # It died after it had written the row, before the view had marked it.
    await store.write("TRUNCATE TABLE rollup_marks", {})
    await closer(store).step()
    assert await store.query("SELECT tenant_id FROM rollup_marks FINAL", {}) == [
        {"tenant_id": "ten_a"}
    ]


async def test_a_closing_waits_until_its_gateway_had_its_time(store: Store) -> None:
    await store.insert(RowBatch(closings=[closing(1, output_tokens=3)]))
    late = closer(store, settle_s=3600.0)
    await late.step()
    assert await rows(store) == {}
    assert 0 < late.until_ms < time.time() * 1000 - 3_000_000  # NOW_MS may be long ago
    await closer(store).step()
    assert await rows(store) == {"evt_1": (OUTCOME, 0, 3)}


async def test_columns_equal_the_columns_of_requests(store: Store) -> None:
    found = await store.query(
        "SELECT name, type FROM system.columns"
        " WHERE database = currentDatabase() AND table = 'closings' AND name != 'ingested_at'",
        {},
    )
    assert {row["name"]: row["type"] for row in found} == CLOSING_COLUMNS


def counts(number: int, tokens: dict[str, int], *, is_last: bool = False) -> list[RequestEvent]:
    """Return a router's report."""
    rows = {**tokens, "": 0}
    return [
        RequestEvent(
            schema_version=COUNT_VERSION,
            event_id=f"count_{model}",
            received_at_unix_ms=HOUR_MS,
            router_id="r1",
            model=model,
            count=TokenCount(
                epoch=1, number=number, output_tokens=made, is_last=is_last and not model
            ),
        )
        for model, made in rows.items()
    ]


async def test_the_ledger_is_compared_with_the_last_report_of_each_router(store: Store) -> None:
    events = [event(number, output_tokens=5, model="m") for number in range(4)]
    for number, it in enumerate(events):
        it.received_at_unix_ms = HOUR_MS + number
    events[3].is_copy = True
    await store.insert(RowBatch(events))
    await store.insert(RowBatch(events[:2], counts=counts(2, {"m": 20, "n": 3}, is_last=True)))
    await store.insert(RowBatch(counts=counts(1, {"m": 10})))  # an older one, told again
    closed_ms = HOUR_MS + 3_600_000
    found = await reconciled(store, HOUR_MS, closed_ms, closed_ms)
    assert [(it.model, it.ledger_tokens, it.engine_tokens, it.state) for it in found] == [
        ("m", 20, 20, ReconciliationState.EQUAL),
        ("n", 0, 3, ReconciliationState.DIFFERS),
    ]
    assert await reconciled(store, closed_ms, closed_ms + 3_600_000, closed_ms) == []
