"""Reads and writes the stored progress of rollups, which is the time up to which sums exist."""

from collections.abc import Mapping
from dataclasses import dataclass

from telemetry.retention import GONE, days_of, ttl_of
from telemetry.rollups import BEHIND_MAX_MS, Deletion, Level, RetainedSince
from telemetry.store import Store

# The progress by name, and the definition of each table in `tables`. The result always has rows,
# because the tables exist.
_KNOWN = """
SELECT name, toUnixTimestamp64Milli(max(until)) AS until_ms, '' AS made,
    toUnixTimestamp64Milli(now64(3)) AS now_ms
FROM rollup_progress GROUP BY name
UNION ALL
SELECT name, toInt64(0), create_table_query, toUnixTimestamp64Milli(now64(3))
FROM system.tables WHERE database = {local:String} AND name IN {tables:Array(String)}
"""
_NOTE = """
INSERT INTO rollup_progress (name, until)
SELECT {name:String}, fromUnixTimestamp64Milli({to_ms:Int64}, 'UTC')
"""


@dataclass(frozen=True, slots=True)
class RollupProgress:
    """The progress of all rollups. All times are those of the store's clock, in Unix milliseconds.

    Attributes:
        now_ms: The store's time.
        until_ms: Name of a kind of sums -> time up to which they are computed.
        levels: Level -> time of the marks up to which it is computed. A level that is too far
            behind is missing.
        kept: Times from which events and rollups of minutes still exist.
    """

    now_ms: int
    until_ms: Mapping[str, int]
    levels: Mapping[Level, int]
    kept: RetainedSince

    def made_ms(self, name: str) -> int | None:
        """Return the time up to which sums are computed. None if it is unknown or too long ago."""
        until_ms = self.until_ms.get(name, 0)
        return until_ms if until_ms > self.now_ms - BEHIND_MAX_MS else None


async def progress(store: Store) -> RollupProgress:
    """Return the stored progress. Raises STORE_ERRORS if ClickHouse cannot be reached."""
    rows = await store.query(_KNOWN, {"local": store.local_database, "tables": list(GONE)})
    now_ms = rows[0]["now_ms"]
    until_ms = {row["name"]: row["until_ms"] for row in rows if not row["made"]}
    days = {row["name"]: days_of(ttl_of(row["made"])) for row in rows if row["made"]}
    events, minutes = (
        Deletion(days[table], max(0, until_ms.get(GONE[table], 0)))
        for table in ("requests", "usage_minutes")
    )
    levels = {
        level: until_ms[level] for level in Level if until_ms.get(level, 0) > now_ms - BEHIND_MAX_MS
    }
    return RollupProgress(now_ms, until_ms, levels, RetainedSince.of(now_ms, events, minutes))


async def note_progress(store: Store, name: str, to_ms: int) -> None:
    """Store the time up to which sums of this name are computed. Raises STORE_ERRORS."""
    await store.write(_NOTE, {"name": name, "to_ms": to_ms})
