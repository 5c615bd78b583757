"""Tests the choice of rollups or events, the retention of rows, and tables of a cluster."""

import asyncio
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import telemetry
from telemetry import retention, shards
from telemetry.costs.sums import COST_SUMS
from telemetry.day_sums import USAGE, USAGE_BY_HOUR
from telemetry.metrics import TelemetryMetrics
from telemetry.migrations import fill, load, migrations_folder
from telemetry.queries import TenantScope
from telemetry.retention import Table, changes, days_of, ttl_of
from telemetry.rollups import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    Deletion,
    Level,
    Range,
    RetainedSince,
    RollupState,
    plan,
)
from telemetry.rollups_worker import SETTLE_MS, Rollups
from telemetry.settings import StoreSettings
from telemetry.shards import sharding_key

URL = "http://127.0.0.1:1"
_MINUTE = st.integers(0, 12 * 60 - 1).map(lambda number: number * MINUTE_MS)
_MINUTES = st.lists(_MINUTE, max_size=40)
_HOURS = st.integers(0, 12).map(lambda number: number * HOUR_MS)


def _are_apart(ranges: tuple[Range, ...]) -> bool:
    edges = [edge for one in ranges for edge in one]
    return edges == sorted(set(edges))


@given(
    span=st.tuples(_MINUTE, _MINUTE).map(sorted).filter(lambda pair: pair[0] < pair[1]),
    minutes=_MINUTES,
    hours=_MINUTES,
    has=st.tuples(st.booleans(), st.booleans()),
    kept=st.tuples(_HOURS, _HOURS),
)
def test_every_moment_is_taken_from_where_it_is_right(
    span: list[int], minutes: list[int], hours: list[int], has: tuple[bool, bool], kept: Range
) -> None:
    state = RollupState(*has, minutes, hours, RetainedSince(*kept))
    found = plan((span[0], span[1]), state)
    assert _are_apart(found.minutes)
    assert _are_apart(found.events)
    assert all(edge % HOUR_MS == 0 for one in found.minutes for edge in one)
    assert all(edge % MINUTE_MS == 0 for one in found.events for edge in one)
    for at in range(span[0], span[1], MINUTE_MS):
        level = found.level_at(at)
        if not found.span[0] <= at < found.span[1]:
            assert level is None  # the time is in a partial hour
            continue
        is_marked = at in minutes or not has[0]
        hour_is_marked = not has[1] or any(one // HOUR_MS == at // HOUR_MS for one in hours)
        if level is None:
            assert at >= kept[0]  # all events of this time exist
        elif level is Level.MINUTES:
            assert at >= kept[1]  # all rollups of this time exist
            assert not is_marked or at < kept[0]
        else:
            assert not hour_is_marked or at < min(kept)
            assert not is_marked or at < kept[0]
        # Events are read only if no rollup is valid, unless there are too many ranges.
        if len(minutes) + len(hours) <= 30 and has == (True, True) and at >= kept[1]:
            assert (level is None) <= is_marked


class ProgressOnly:
    """A store without marks. It has the progress of the levels, but no start of marking."""

    local_database = "sluice"

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.noted: dict[str, int] = {}

    async def query(self, sql, parameters):
        if "GROUP BY name" in sql:
            told = [(str(level), self.now_ms - 1_000, "") for level in Level]
            told += [(table, 0, "CREATE TABLE x") for table in parameters["tables"]]
            return [
                {"name": name, "until_ms": ms, "made": made, "now_ms": self.now_ms}
                for name, ms, made in told
            ]
        if "DISTINCT" in sql:
            return []
        return [{"now_ms": self.now_ms, "marks": 0, "last_ms": 0}]

    async def write(self, sql, parameters):
        self.noted[parameters["name"]] = parameters["to_ms"]


def test_rounds_go_on_without_a_known_start_of_marking():
    """Versions before the marking of old rows left such progress. It must not end the service."""
    store = ProgressOnly(1_790_000_000_000)
    asyncio.run(Rollups(store, TelemetryMetrics(), settle_ms=0).step())
    # Sums of days have the same progress as the hours from which they are computed.
    levels = {str(level): store.now_ms for level in Level}
    sums = (it.name for it in (USAGE, USAGE_BY_HOUR, COST_SUMS))
    assert store.noted == levels | dict.fromkeys(sums, store.now_ms - 1_000)


def test_many_marks_do_not_make_a_long_statement() -> None:
    marks = range(0, 400 * DAY_MS, 7 * HOUR_MS)
    found = plan((0, 400 * DAY_MS), RollupState(True, True, marks, marks))
    assert found.events == found.minutes == ((0, 400 * DAY_MS),)


def test_kept_rows_begin_at_an_hour_with_room() -> None:
    now_ms = 1_000 * DAY_MS + 5
    kept = RetainedSince.of(now_ms, Deletion(30), Deletion())
    assert kept == RetainedSince(971 * DAY_MS + HOUR_MS, 0)
    # If the retention of a table becomes longer, its deleted rows stay missing.
    was_shorter = Deletion(400, gone_ms=970 * DAY_MS)
    assert RetainedSince.of(now_ms, was_shorter, Deletion(0, DAY_MS)) == RetainedSince(
        971 * DAY_MS, 2 * DAY_MS
    )
    assert (
        RetainedSince.of(now_ms + 400 * DAY_MS, was_shorter, Deletion()).events_ms > 1_000 * DAY_MS
    )


@pytest.mark.parametrize(
    ("ttl", "days"),
    [
        ("", 0),
        ("toDateTime(ingested_at) + toIntervalDay(30)", 30),
        ("start + toIntervalDay(7) TO VOLUME 'cold', start + toIntervalDay(400)", 400),
        ("start + toIntervalDay(7) TO VOLUME 'cold'", 0),
        # an unknown form, which counts as the shortest retention
        ("start + toIntervalMonth(13)", 7),
    ],
)
def test_the_retention_of_a_table_is_read_from_its_ttl(ttl: str, days: int) -> None:
    assert days_of(ttl) == days


def test_replicas_show_acknowledged_rows() -> None:
    assert shards.session(is_sharded=False, is_replicated=False) == {}
    alone = shards.session(is_sharded=False, is_replicated=True)
    assert alone["insert_quorum"] == "auto"
    assert (alone["insert_quorum_parallel"], alone["select_sequential_consistency"]) == (0, 1)
    both = shards.session(is_sharded=True, is_replicated=True)
    assert both.items() > (alone | dict(shards.SESSION)).items()
    assert int(both["max_replica_delay_for_distributed_queries"]) * 2_000 < SETTLE_MS


def test_a_setting_changes_a_table_once() -> None:
    # The statement in the form in which ClickHouse returns it.
    made = (
        "CREATE TABLE db.requests (`a` String DEFAULT ' TTL x') ENGINE = ReplacingMergeTree ORDER BY a"
        " TTL toDateTime(ingested_at) + toIntervalDay(7) TO VOLUME 'cold', "
        "toDateTime(ingested_at) + toIntervalDay(30) SETTINGS index_granularity = 8192"
    )
    tables = {"requests": Table(ttl_of(made.replace("DEFAULT ' TTL x'", "")), "tiered")}
    same = StoreSettings(
        clickhouse_url=URL,
        clickhouse_storage_policy="tiered",
        clickhouse_cold_volume="cold",
        cold_after_days=7,
        requests_days=30,
    )
    assert changes(same, tables) == {}
    [gone] = changes(
        same.model_copy(update={"requests_days": 0, "cold_after_days": 0}), tables
    ).values()
    assert gone == ["ALTER TABLE requests {{on_cluster}} REMOVE TTL"]
    fresh = {
        "requests": Table("", "default"),
        "poison": Table("", "default"),
        "other": Table("", ""),
    }
    assert changes(same, fresh) == {
        "requests": [
            "ALTER TABLE requests {{on_cluster}} MODIFY SETTING storage_policy = 'tiered'",
            "ALTER TABLE requests {{on_cluster}} MODIFY TTL "
            "toDateTime(ingested_at) + toIntervalDay(7) TO VOLUME 'cold', "
            "toDateTime(ingested_at) + toIntervalDay(30)",
        ],
        "poison": [
            "ALTER TABLE poison {{on_cluster}} MODIFY TTL toDateTime(parked_at) + toIntervalDay(90)"
        ],
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"cold_after_days": 3},
        {"clickhouse_is_sharded": True},
        {"requests_days": 1},
        {"poison_days": -1},
    ],
)
def test_settings_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        StoreSettings.model_validate({"clickhouse_url": URL, **wrong})


def test_replacing_rows_and_the_rows_of_a_tenant_share_a_shard() -> None:
    variables = {"on_cluster": "ON CLUSTER 'main'", "engine_prefix": "Replicated"}
    tables: dict[str, str] = {}
    for migration in load(migrations_folder()):
        for text in migration.statements:
            statement = fill(text, variables)
            if made := re.search(r"CREATE TABLE IF NOT EXISTS (\w+)", statement):
                order = re.search(r"ORDER BY \(?([\w, ]+)", statement)
                assert order is not None
                tables[made[1]] = order[1]
            # Statements name tables without a database, because each shard has its own database.
            assert not re.search(r"(FROM|TO|TABLE) \w+\.\w+", statement)
            if "MATERIALIZED VIEW" in statement:
                assert " TO " in statement
    keys = {table: sharding_key(order) for table, order in tables.items()}
    assert keys["requests"] == keys["closings"] == keys["rollup_marks"] == "cityHash64(tenant_id)"
    assert keys["usage_minutes"] == keys["usage_hours"] == "cityHash64(tenant_id)"
    assert keys["poison"] == "cityHash64(topic, partition, offset, payload_hash)"
    assert shards.statement("main", "sluice", "requests", tables["requests"]) == (
        "CREATE OR REPLACE TABLE sluice.requests ON CLUSTER 'main' AS sluice_shard.requests "
        "ENGINE = Distributed('main', 'sluice_shard', 'requests', cityHash64(tenant_id))"
    )


def test_every_table_with_a_time_has_a_setting_for_it() -> None:
    names = map(retention.days_setting, retention.AGE)
    assert all(name in StoreSettings.model_fields for name in names)


def test_a_tenants_scope_needs_a_tenant() -> None:
    with pytest.raises(ValueError, match="needs a tenant"):
        TenantScope.tenants("")
    assert TenantScope.tenants("a").sql == "tenant_id IN {tenants:Array(String)}"


# Module -> largest number of statements that read the rows of all tenants.
_FLEET = {
    "closings.py": 7,  # rows from routers' reports
    "day_sums.py": 0,  # sums of all tenants
    "rollups_worker.py": 3,  # marks of all tenants, and late events
    "retention.py": 1,
    "evidence.py": 1,  # rows of one rollout
    "scores.py": 1,  # rows of one rollout
    "pool_demand.py": 1,  # sums over the requests of one pool, for operators of the platform
    "reconciliation.py": 1,  # engines have no tenants
    "costs/query.py": 1,  # a replica's hour is divided among all tenants
}


def test_every_statement_names_the_tenant_of_its_rows() -> None:
    root = Path(telemetry.__file__).parent
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        for found in re.split(r'"""', path.read_text())[1::2]:
            reads = len(
                re.findall(r"FROM (?:requests|closings|usage_\w+|\{level\.table\})\b", found)
            )
            if name not in _FLEET and reads:
                asks = re.findall(
                    r"__scope__|\(\{scope\}\)|\{where\}|tenant_id = \{tenant:String\}", found
                )
                assert len(asks) >= reads, f"{name}: a statement without a scope"
    for name, most in _FLEET.items():
        text = (root / name).read_text()
        assert len(re.findall(r"FROM (?:requests|closings)\b", text)) <= most, name
