"""Rollups on the real trace store: whatever happens, usage is the sum over the events."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sluice.wire.telemetry.v1.telemetry_pb2 import RequestEvent
from telemetry.metrics import TelemetryMetrics
from telemetry.queries import TenantScope
from telemetry.reconciliation import LedgerSums
from telemetry.retention import ttl_of
from telemetry.rollups import HOUR_MS, MINUTE_MS, Level, plan, planned_rows
from telemetry.rollups_worker import Rollups, rollup_state
from telemetry.rows import RowBatch
from telemetry.settings import StoreSettings
from telemetry.store import Store
from telemetry.usage import Granularity, UsageQuery, usage
from telemetry.usage_sums import UsageGroup, usage_sums
from tests.integration.trace_site import empty_store

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

DAY_MS = 24 * HOUR_MS
_IDS = itertools.count()
_SUMS = ("requests", "failed_requests", "prompt_tokens", "cached_tokens", "output_tokens")


class DyingStore(Store):
    """Dies at its n-th write, before or after it."""

    fuse = -1
    is_written = False

    async def write(self, sql: str, parameters: Any) -> int:
        self.fuse -= 1
        if self.fuse == 0 and not self.is_written:
            raise KilledError
        written = await super().write(sql, parameters)
        if self.fuse == 0:
            raise KilledError
        return written


class KilledError(Exception):
    pass


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def store(shared_tracestore: Any) -> AsyncIterator[Store]:
    async with empty_store(shared_tracestore.address) as found:
        yield found


async def rolled(store: Store) -> None:
    """Run a new process of rollups for one step."""
    await settled(store)
    await Rollups(store, TelemetryMetrics(), settle_ms=0).step()


async def settled(store: Store) -> None:
    """Wait until the store's clock is past all that is written: its milliseconds differ."""
    await store.query("SELECT sleep(0.002)", {})


def event(tenant: str, number: int, received_ms: int, flavour: int) -> RequestEvent:
    """Return an event; with another flavour, a correction of it."""
    return RequestEvent(
        schema_version=1,
        event_id=f"{tenant}-{number}",
        received_at_unix_ms=received_ms,
        tenant_id=tenant,
        key_id=f"key_{flavour % 2}",
        model=f"m{flavour % 3}",
        release=f"v{flavour % 2}",
        replica_id="r",
        prompt_tokens=10 + flavour,
        cached_tokens=flavour,
        output_tokens=100 * flavour + number,
        status=200 if flavour % 4 else 502,
        is_copy=flavour == 5,
    )


def expected(events: Iterable[RequestEvent]) -> dict[tuple[str, ...], Counter[str]]:
    found: dict[tuple[str, ...], Counter[str]] = {}
    for one in events:
        if not one.is_copy:
            start = str(one.received_at_unix_ms // HOUR_MS * HOUR_MS)
            total = found.setdefault((start, one.tenant_id, one.key_id, one.model), Counter())
            total["requests"] += 1
            total["failed_requests"] += one.status >= 400
            total["prompt_tokens"] += one.prompt_tokens
            total["cached_tokens"] += one.cached_tokens
            total["output_tokens"] += one.output_tokens
    return found


async def told(store: Store, begin_ms: int, end_ms: int, tenant: str = "") -> dict[Any, Any]:
    rows = await usage(store, UsageQuery(begin_ms, end_ms, tenant_id=tenant))
    return {
        (
            str(round(datetime.fromisoformat(row["start"]).timestamp() * 1000)),
            *(row[name] for name in ("tenant_id", "key_id", "model")),
        ): {name: row[name] for name in _SUMS}
        for row in rows
    }


_NUMBERS = st.integers(0, 11)
_STEPS = st.lists(
    st.one_of(
        # Events, duplicates, corrections, late ones: by number, flavour, and which of two inserts.
        st.lists(st.tuples(_NUMBERS, st.integers(0, 5)), min_size=1, max_size=5),
        st.just("roll"),
        st.just("two at once"),
        st.tuples(st.integers(1, 4), st.booleans()),
    ),
    min_size=3,
    max_size=7,
)


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=_STEPS)
async def test_usage_is_the_sum_of_the_events_under_any_fault(
    store: Store, steps: list[Any]
) -> None:
    tenant = f"ten_{next(_IDS)}"
    base_ms = (int(time.time() * 1000) - DAY_MS) // HOUR_MS * HOUR_MS
    there, wanted = dict[int, RequestEvent](), expected(())
    for step in steps:
        if isinstance(step, list):
            # Some share a minute, some an hour.
            found = {
                number: event(
                    tenant, number, base_ms + number % 4 * 20 * MINUTE_MS + number // 6, flavour
                )
                for number, flavour in step
            }
            there |= found
            await store.insert(RowBatch(list(found.values())))
            await settled(store)  # what replaces it must be ingested later
        elif step == "roll":
            await rolled(store)
        elif step == "two at once":
            await settled(store)
            both = (Rollups(store, TelemetryMetrics(), settle_ms=0) for _ in range(2))
            await asyncio.gather(*(one.step() for one in both))
        else:
            dying = DyingStore(store.settings)
            dying.fuse, dying.is_written = step
            try:
                await rolled(dying)
            except KilledError:
                pass
            finally:
                await dying.close()
        wanted = expected(there.values())
        assert await told(store, base_ms, base_ms + 3 * HOUR_MS, tenant) == wanted
    everybody = await told(store, base_ms, base_ms + 3 * HOUR_MS)
    assert {key: row for key, row in everybody.items() if key[1] == tenant} == wanted
    await rolled(store)
    assert await told(store, base_ms, base_ms + 3 * HOUR_MS, tenant) == wanted
    state = await rollup_state(store, (base_ms, base_ms + 3 * HOUR_MS), TenantScope.tenants(tenant))
    # Nothing of it was taken from events at last.
    assert (state.has_hours, list(state.hours_ms)) == (True, [])
    for granularity in Granularity:
        query = UsageQuery(base_ms, base_ms + 3 * HOUR_MS, granularity, tenant_id=tenant)
        await sums_are_those_of_hours(store, query, wanted)


async def sums_are_those_of_hours(
    store: Store, query: UsageQuery, wanted: dict[Any, Counter[str]]
) -> None:
    """Compare sums for pages with those of the ledger's hours, which all lie in the query's span."""
    for group, place in ((UsageGroup.TENANT, 1), (UsageGroup.KEY, 2), (UsageGroup.MODEL, 3)):
        parts: dict[str, Counter[str]] = {}
        for key, row in wanted.items():
            parts.setdefault(key[place], Counter()).update(row)
        found = await usage_sums(store, query, group)
        shown = {it["name"]: {name: it[name] for name in _SUMS} for it in found["data"]}
        assert shown == {name: {it: part[it] for it in _SUMS} for name, part in parts.items()}
        whole = sum(parts.values(), Counter[str]())
        assert found["total"] == {name: whole[name] for name in _SUMS}


async def test_the_sums_of_the_ledger_do_not_depend_on_kept_parts(shared_tracestore: Any) -> None:
    """Random events, late ones, duplicates and corrections; some hours are never touched again."""
    chance = random.Random(7)
    async with empty_store(shared_tracestore.address) as store:
        end_ms = int(time.time() * 1000) // HOUR_MS * HOUR_MS
        span = (end_ms - 24 * HOUR_MS, end_ms)
        sums = LedgerSums(store, settle_ms=0)
        times: dict[int, int] = {}
        for _ in range(4):
            numbers = [chance.randrange(60) for _ in range(12)]
            events = [
                event(
                    "ten",
                    number,
                    times.setdefault(number, span[0] + chance.randrange(24 * HOUR_MS)),
                    chance.randrange(6),
                )
                for number in numbers
            ]
            for one in events:
                if chance.random() < 0.3:
                    one.lost_model, one.lost_prompt_tokens, one.lost_output_tokens = "lost", 5, 3
            await store.insert(RowBatch(events))
            await settled(store)
            kept = await sums.of(span)
            whole = await LedgerSums(store).of(span)
            assert sorted(map(str, kept)) == sorted(map(str, whole))
            assert sum(row["ledger"] for row in whole) > 0
            await settled(store)


async def test_usage_outlives_its_events_and_late_ones_add_to_it(shared_tracestore: Any) -> None:
    async with empty_store(shared_tracestore.address) as first:
        now_ms = int(time.time() * 1000)
        old_ms = (now_ms - 300 * DAY_MS) // HOUR_MS * HOUR_MS
        # Ten requests of long ago, told at once.
        await first.write(
            "INSERT INTO requests (event_id, received_at, ingested_at, tenant_id, key_id, model,"
            " status, output_tokens) SELECT toString(number),"
            " fromUnixTimestamp64Milli({at:Int64}, 'UTC') AS at, at, 'a', 'k', 'm', 200, 7"
            " FROM numbers(10)",
            {"at": old_ms},
        )
        await rolled(first)
        before = await told(first, old_ms, old_ms + HOUR_MS, "a")
        assert before[str(old_ms), "a", "k", "m"]["output_tokens"] == 70
        # Events and minutes are deleted by the setting of a new process.
        chosen = {"requests_days": 30, "usage_minutes_days": 30, "poison_days": 0}
        second = Store(first.settings.model_copy(update=chosen))
        try:
            for table in ("requests", "usage_minutes"):
                await second.write(f"OPTIMIZE TABLE {table} FINAL", {})
                [row] = await second.query(f"SELECT count() AS rows FROM {table}", {})
                assert row["rows"] == 0
            ttls = {
                row["name"]: ttl_of(row["create_table_query"])
                for row in await second.query(
                    "SELECT name, create_table_query FROM system.tables"
                    " WHERE database = currentDatabase()",
                    {},
                )
            }
            assert ttls["requests"] == "toDateTime(ingested_at) + toIntervalDay(30)"
            assert ttls["poison"] == ""
            await rolled(second)
            assert await told(second, old_ms, old_ms + HOUR_MS, "a") == before
            # Events of that hour come now, twice, and are corrected; two at another time of it.
            for flavour in (1, 1, 2):
                late = [
                    event("a", number, old_ms + number * MINUTE_MS, flavour) for number in (0, 1)
                ]
                await second.insert(RowBatch(late))
                await rolled(second)
                after = await told(second, old_ms, old_ms + HOUR_MS, "a")
                assert after == before | expected(late)
            rows = await usage(second, UsageQuery(old_ms, old_ms + HOUR_MS, tenant_id="a"))
            assert [row["late_requests"] for row in rows] == [0, 2]
        finally:
            await second.close()


async def as_before_rollups(store: Store) -> None:
    """Make the tables what a version without retention and rollups left."""
    await store.write("ALTER TABLE requests REMOVE TTL", {})
    for table in ("rollup_marks", "rollup_progress"):
        await store.write(f"TRUNCATE TABLE {table}", {})


async def ttl_of_requests(store: Store) -> str:
    [row] = await store.query(
        "SELECT create_table_query AS made FROM system.tables"
        " WHERE database = currentDatabase() AND name = 'requests'",
        {},
    )
    return ttl_of(row["made"])


async def test_events_are_deleted_only_after_they_were_summed(shared_tracestore: Any) -> None:
    async with empty_store(shared_tracestore.address) as first:
        chosen = first.settings.model_copy(update={"requests_days": 30})
        old_ms = (int(time.time() * 1000) - 50 * DAY_MS) // HOUR_MS * HOUR_MS
        store = Store(chosen)
        try:
            await store.prepare()
            await as_before_rollups(store)
            for day in range(3):
                await store.write(
                    "INSERT INTO requests (event_id, received_at, ingested_at, tenant_id, key_id,"
                    " model, status, output_tokens) SELECT 'e',"
                    " fromUnixTimestamp64Milli({at:Int64}, 'UTC') AS at, at, 'a', 'k', 'm', 200, 7",
                    {"at": old_ms + day * DAY_MS},
                )
            await store.write("TRUNCATE TABLE rollup_marks", {})
        finally:
            await store.close()
        span = (old_ms, old_ms + 3 * DAY_MS, "a")
        # Nothing is marked; marked in part; marked and not summed; summed in part.
        for killed_at in (None, 3, 7, 3):
            store = Store(chosen)
            try:
                assert await ttl_of_requests(store) == ""
                before = await told(store, *span)
                assert sum(row["output_tokens"] for row in before.values()) == 21
            finally:
                await store.close()
            if killed_at:
                dying = DyingStore(chosen)
                dying.fuse = killed_at
                try:
                    with pytest.raises(KilledError):
                        await rolled(dying)
                finally:
                    await dying.close()
        store = Store(chosen)
        try:
            await store.write(
                "INSERT INTO rollup_progress (name, until)"
                " SELECT arrayJoin(['minutes', 'hours']), now64(3) - 4000",
                {},
            )
        finally:
            await store.close()
        store = Store(chosen)  # first rounds were made, not all of them
        try:
            assert await ttl_of_requests(store) == ""
            await rolled(store)
        finally:
            await store.close()
        store = Store(chosen)
        try:
            assert "toIntervalDay(30)" in await ttl_of_requests(store)
            await store.write("OPTIMIZE TABLE requests FINAL", {})
            assert await store.query("SELECT event_id FROM requests", {}) == []
            assert await told(store, *span) == before
        finally:
            await store.close()


async def test_keeping_events_longer_brings_none_back(shared_tracestore: Any) -> None:
    """A late event adds to a sum whose events were deleted under a shorter setting."""
    async with empty_store(shared_tracestore.address) as first:
        short = Store(first.settings.model_copy(update={"requests_days": 7}))
        long = Store(first.settings.model_copy(update={"requests_days": 400}))
        old_ms = (int(time.time() * 1000) - 20 * DAY_MS) // HOUR_MS * HOUR_MS
        try:
            await short.prepare()
            await short.write("ALTER TABLE requests REMOVE TTL", {})
            await short.insert(RowBatch([event("a", number, old_ms, 1) for number in range(3)]))
            await rolled(short)
            before = await told(short, old_ms, old_ms + HOUR_MS, "a")
            await short.write("TRUNCATE TABLE requests", {})  # as its TTL would have
            await short.write(
                "ALTER TABLE requests MODIFY TTL toDateTime(ingested_at) + toIntervalDay(7)", {}
            )
            await long.prepare()
            assert "toIntervalDay(400)" in await ttl_of_requests(long)
            late = event("a", 9, old_ms, 1)
            await long.insert(RowBatch([late]))
            await rolled(long)
            after = await told(long, old_ms, old_ms + HOUR_MS, "a")
            [key] = before
            assert after[key]["requests"] == before[key]["requests"] + 1
        finally:
            await short.close()
            await long.close()


async def test_migrating_leaves_retention_alone(shared_tracestore: Any) -> None:
    async with empty_store(shared_tracestore.address) as first:
        chosen = {"requests_days": 0, "usage_hours_days": 3_000}
        service = Store(first.settings.model_copy(update=chosen))
        job = Store(first.settings, has_retention=False)
        made = (
            "SELECT name, create_table_query FROM system.tables WHERE database = currentDatabase()"
        )
        try:
            before = await service.query(made, {})
            assert await job.query(made, {}) == before
        finally:
            await service.close()
            await job.close()


async def test_a_question_for_a_tenant_seeks_that_tenant_alone(store: Store) -> None:
    now_ms = int(time.time() * 1000)
    span = (now_ms // HOUR_MS * HOUR_MS - DAY_MS, now_ms // HOUR_MS * HOUR_MS + HOUR_MS)
    await store.insert(RowBatch([event("ten_a", 1, now_ms, 1), event("ten_b", 2, now_ms, 1)]))
    await rolled(store)
    await store.insert(RowBatch([event("ten_a", 3, now_ms, 1)]))
    for name in (
        "ten_a",
        "' OR 1 = 1 --",
        "x') OR ('' = '",
        "\\' OR 1=1",
        "%",
        "{tenants:Array(String)}",
    ):
        scope = TenantScope.tenants(name)
        state = await rollup_state(store, span, scope)
        rows = planned_rows(plan(span, state), scope.sql)
        found = await store.query(f"SELECT DISTINCT tenant_id FROM ({rows})", scope.parameters)
        assert [row["tenant_id"] for row in found] == [name] * (name == "ten_a")
    state = await rollup_state(store, span, TenantScope.tenants("ten_a"))
    sql = planned_rows(plan(span, state), TenantScope.tenants("ten_a").sql)
    assert all(level.table in sql for level in Level)
    plain = await store.query(f"EXPLAIN indexes = 1 {sql}", {"tenants": ["ten_a"]})
    reads = "\n".join(row["explain"] for row in plain).split("ReadFromMergeTree")[1:]
    assert reads
    for read in reads:
        assert "(tenant_id in " in read.partition("PrimaryKey")[2], read


async def test_migrations_can_be_run_again(store: Store) -> None:
    """A kill between two statements repeats the first ones."""
    again = Store(StoreSettings.model_validate(store.settings.model_dump()))
    await store.prepare()
    await store.write("TRUNCATE TABLE schema_migrations", {})
    await again.prepare()
    await again.close()
