"""Applies the settings of retention and storage tiers to ClickHouse's tables at each start.

Only tables whose present state differs from the settings are changed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from telemetry.migrations import TraceDatabase
from telemetry.settings import REQUESTS_DAYS_MIN, StoreSettings

log = structlog.get_logger(__name__)

# SQL for the time from which the age of a row is counted. For events it is the ingestion, so a late
# event is stored as long as any other event. For sums it is the start of the interval.
AGE = {
    "requests": "toDateTime(ingested_at)",
    "request_ids": "toDateTime(ingested_at)",
    "closings": "toDateTime(ingested_at)",
    "token_counts": "toDateTime(hour)",
    "attempts": "toDateTime(ingested_at)",
    "tool_calls": "toDateTime(ingested_at)",
    "poison": "toDateTime(parked_at)",
    "usage_minutes": "start",
    "usage_hours": "start",
}
# Table -> the table to which its rows refer. Both have the same retention.
_AS_LONG_AS = {"request_ids": "requests"}
# Tables that grow with the number of requests. Only these tables use the cold volume.
TIERED = ("requests", "usage_minutes", "usage_hours")
_TTL = re.compile(r" TTL (.+?)(?: SETTINGS .*)?$", re.DOTALL)
_DELETES = re.compile(r"\+ toIntervalDay\((\d+)\)$")
# Tables whose deletions affect other modules -> name of a time in `rollup_progress`. Rows from
# before this time may have been deleted.
GONE = {"requests": "gone_requests", "usage_minutes": "gone_usage_minutes"}
_TABLES = """
SELECT name, create_table_query, storage_policy FROM system.tables
WHERE database = '{local}' AND engine LIKE '%MergeTree'
"""
_NOTE_REMOVED = """
INSERT INTO {database}.rollup_progress (name, until)
SELECT '{name}', now64(3) - toIntervalDay({days})
"""
# Whether the retention would delete rows that are not in the rollups. It assumes two days for
# unfinished rollups, one more than `telemetry.rollups`. ClickHouse answers the first condition
# without reading rows. It is false if no row becomes too old within the next five days. Rollups are
# then computed in time.
_UNSAFE = """
SELECT (SELECT min(received_at) FROM {database}.requests) < now64(3) - toIntervalDay({days} - 5)
    AND (SELECT count() FROM {database}.requests) > 0
    AND (
        (
            SELECT uniqExact(name) FROM {database}.rollup_progress
            WHERE name IN ('minutes', 'hours') AND until > now64(3) - toIntervalDay(1)
        ) < 2
        OR (
            SELECT count() FROM {database}.rollup_marks
            WHERE minute < now() - toIntervalDay({days} - 2) AND marked_at >= (
                SELECT min(until) FROM (
                    SELECT max(until) AS until FROM {database}.rollup_progress
                    WHERE name IN ('minutes', 'hours') GROUP BY name
                )
            )
        ) > 0
    )
"""


@dataclass(frozen=True, slots=True)
class Table:
    """The TTL and storage policy of a table. The `ttl` is empty if no rows are deleted."""

    ttl: str
    storage_policy: str


def days_setting(table: str) -> str:
    """Return the name of the setting that has the retention of a table in days."""
    return f"{_AS_LONG_AS.get(table, table)}_days"


def wanted_ttl(settings: StoreSettings, table: str) -> str:
    """Return the TTL that the settings require for a table, or empty if no row is deleted."""
    age = AGE[table]
    days = int(getattr(settings, days_setting(table)))
    parts: list[str] = []
    cold = settings.cold_after_days
    if table in TIERED and cold and (not days or cold < days):
        parts.append(f"{age} + toIntervalDay({cold}) TO VOLUME '{settings.clickhouse_cold_volume}'")
    if days:
        parts.append(f"{age} + toIntervalDay({days})")
    return ", ".join(parts)


def changes(settings: StoreSettings, tables: Mapping[str, Table]) -> dict[str, list[str]]:
    """Return table -> ALTER statements. Their `{{on_cluster}}` is not replaced yet."""
    found: dict[str, list[str]] = {}
    for name in AGE.keys() & tables.keys():
        alter = f"ALTER TABLE {name} {{{{on_cluster}}}} "
        policy, ttl = settings.clickhouse_storage_policy, wanted_ttl(settings, name)
        steps: list[str] = []
        # The storage policy is set before the TTL, because the TTL names volumes of the policy.
        if policy and name in TIERED and tables[name].storage_policy != policy:
            steps.append(f"{alter}MODIFY SETTING storage_policy = '{policy}'")
        if tables[name].ttl != ttl:
            steps.append(alter + (f"MODIFY TTL {ttl}" if ttl else "REMOVE TTL"))
        if steps:
            found[name] = steps
    return found


def ttl_of(create_table_query: str) -> str:
    """Return the TTL in a table's CREATE statement, or empty if the table has none."""
    found = _TTL.search(create_table_query)
    return found[1] if found else ""


def days_of(ttl: str) -> int:
    """Return the days after which a TTL deletes rows, or 0 if it deletes none.

    A TTL in an unknown form counts as the shortest permitted one. So no query relies on rows that
    may be missing.
    """
    found = [0]
    for part in ttl.split(", ") if ttl else ():
        if " TO VOLUME " not in part:
            days = _DELETES.search(part)
            found.append(int(days[1]) if days else REQUESTS_DAYS_MIN)
    return min(filter(None, found), default=0)


async def needed(database: TraceDatabase, settings: StoreSettings, local: str) -> list[str]:
    """Return the statements that apply the settings to the tables in the database `local`.

    Events must be in the rollups before they are deleted. Until then, the change of their table is
    postponed to the next start. The time before which rows may be missing is stored before the
    change, so that sums over earlier times are not recomputed.
    """
    where = settings.clickhouse_database
    tables = {
        str(name): Table(ttl_of(str(query)), str(policy))
        for name, query, policy in await database.rows(_TABLES.format(local=local))
    }
    todo = changes(settings, tables)
    days = settings.requests_days
    if "requests" in todo and is_shorter(days, days_of(tables["requests"].ttl)):
        [[unsafe]] = await database.rows(_UNSAFE.format(database=where, days=days))
        if unsafe:
            log.warning("retention_postponed", table="requests")
            del todo["requests"]
    found: list[str] = []
    for name in sorted(todo):
        if name in GONE:
            both = (days_of(tables[name].ttl), int(getattr(settings, f"{name}_days")))
            if least := min(filter(None, both), default=0):
                found.append(_NOTE_REMOVED.format(database=where, name=GONE[name], days=least))
        found += todo[name]
    return found


def is_shorter(days: int, than: int) -> bool:
    """Return whether a retention in days is shorter than another. 0 days mean unlimited."""
    return days > 0 and (not than or days < than)
