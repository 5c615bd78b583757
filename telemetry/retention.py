"""How long rows are kept and where: settings, brought onto the tables at each start.

Tables say themselves what they have, so it is changed where it differs, and only there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from telemetry.migrations import Database
from telemetry.settings import StoreSettings

log = structlog.get_logger(__name__)

# From when on the days of a row are counted. Events by when they came: a late one is then kept as
# long as any other, and all of a minute are there for as long as the setting says.
AGE = {
    "requests": "toDateTime(ingested_at)",
    "closings": "toDateTime(ingested_at)",
    "token_counts": "toDateTime(hour)",
    "poison": "toDateTime(parked_at)",
    "usage_minutes": "start",
    "usage_hours": "start",
}
# Those that grow with requests.
TIERED = ("requests", "usage_minutes", "usage_hours")
_TTL = re.compile(r" TTL (.+?)(?: SETTINGS .*)?$", re.DOTALL)
_TABLES = """
SELECT name, create_table_query, storage_policy FROM system.tables
WHERE database = currentDatabase() AND engine LIKE '%MergeTree'
"""
_UNSAFE = """
SELECT count() FROM requests
WHERE ingested_at < now64(3) - toIntervalDay({days})
    AND (SELECT max(until) FROM rollup_progress WHERE name = 'hours') < now64(3) - toIntervalDay(1)
"""


@dataclass(frozen=True, slots=True)
class Table:
    """What a table has; `ttl` is empty when it keeps everything."""

    ttl: str
    storage_policy: str


def wanted_ttl(settings: StoreSettings, table: str) -> str:
    """Return a table's TTL as ClickHouse writes it, empty for none."""
    age = AGE[table]
    days = int(getattr(settings, f"{table}_days"))
    parts: list[str] = []
    cold = settings.cold_after_days
    if table in TIERED and cold and (not days or cold < days):
        parts.append(f"{age} + toIntervalDay({cold}) TO VOLUME '{settings.clickhouse_cold_volume}'")
    if days:
        parts.append(f"{age} + toIntervalDay({days})")
    return ", ".join(parts)


def changes(settings: StoreSettings, tables: Mapping[str, Table]) -> dict[str, list[str]]:
    """Return the ALTERs that tables need, by table; `{{on_cluster}}` is still to be filled in."""
    found: dict[str, list[str]] = {}
    for name in AGE.keys() & tables.keys():
        alter = f"ALTER TABLE {name} {{{{on_cluster}}}} "
        policy, ttl = settings.clickhouse_storage_policy, wanted_ttl(settings, name)
        steps: list[str] = []
        # The policy first: its volumes are named by the TTL.
        if policy and name in TIERED and tables[name].storage_policy != policy:
            steps.append(f"{alter}MODIFY SETTING storage_policy = '{policy}'")
        if tables[name].ttl != ttl:
            steps.append(alter + (f"MODIFY TTL {ttl}" if ttl else "REMOVE TTL"))
        if steps:
            found[name] = steps
    return found


def ttl_of(create_table_query: str) -> str:
    """Return the TTL of a table from how ClickHouse says that it was made, empty for none."""
    found = _TTL.search(create_table_query)
    return found[1] if found else ""


async def needed(database: Database, settings: StoreSettings) -> list[str]:
    """Return the statements that bring settings onto the tables.

    Events go only after they were summed: when old ones are not, theirs wait for the next start.
    """
    tables = {
        str(name): Table(ttl_of(str(query)), str(policy))
        for name, query, policy in await database.rows(_TABLES)
    }
    todo = changes(settings, tables)
    if "requests" in todo and settings.requests_days:
        [[unsafe]] = await database.rows(_UNSAFE.format(days=settings.requests_days))
        if unsafe:
            log.warning("retention_waits_for_rollups", table="requests", events=unsafe)
            del todo["requests"]
    return [statement for name in sorted(todo) for statement in todo[name]]
