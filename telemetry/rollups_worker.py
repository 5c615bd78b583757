"""Computes rollups for marked intervals, and returns their progress for queries.

Several processes may compute rollups at once, and may crash at any point. A round first sums all
events of the marked intervals and then stores its progress. So if a round is repeated, it writes
the same rows. The version of a row is the store's time before its events were read. Queries use the
newest version, which includes all events that were marked before that time. For this, every write
of rollups and `requests` must end within `SETTLE_MS`.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from sluice.lifecycle import run_every
from telemetry.costs.sums import COST_SUMS
from telemetry.day_sums import USAGE, USAGE_BY_HOUR, DaySums
from telemetry.metrics import TelemetryMetrics
from telemetry.queries import TenantScope
from telemetry.rollup_progress import RollupProgress, note_progress, progress
from telemetry.rollups import (
    BEHIND_MAX_MS,
    DAY_MS,
    HOUR_MS,
    KEYS,
    LATE_AFTER_MS,
    MEASURES,
    SUMS,
    Level,
    Range,
    RollupState,
    event_rows,
    plan,
    planned_rows,
)
from telemetry.store import STORE_ERRORS, Store

# milliseconds, more than an insert's 60 s and the difference of servers' clocks
SETTLE_MS = 120_000
_EVERY_S = 30.0
_STEP_S = 600.0
_LEVEL_S = 200.0  # longest time per level in one step, in seconds, so that each level advances
# Milliseconds between rounds of hours. The current hour changes all the time, so rounds are rare.
# Meanwhile queries use the minutes of a changed hour.
_HOURS_EVERY_MS = 600_000
_MARKS_MAX, _MARKS_MIN = 100_000, 10
_DIRTY_MAX = 100_000
# Rows that are older than the table of marks are marked afterwards. Their marks are spread over
# this time in milliseconds, so that a round can process a few of them. The hours of one tenant and
# day have consecutive marks, because their events are stored together.
_SPREAD_MS = HOUR_MS

_NOW = "SELECT toUnixTimestamp64Milli(now64(3)) AS now_ms"
# Names of stored progress for such old rows. The first is the time at which their marking began.
# The second is the day up to which they are marked.
_SEED_BASE, _SEED_DAY = "seed", "seed_{base_ms}"
# ClickHouse answers this query from the metadata of its parts, without reading rows.
_MONTHS = """
SELECT toUnixTimestamp64Milli(min(received_at)) AS first_ms,
    toUnixTimestamp64Milli(max(received_at)) AS last_ms
FROM requests GROUP BY toYYYYMM(received_at)
"""
_SEED = """
INSERT INTO rollup_marks (marked_at, tenant_id, minute)
SELECT DISTINCT
    fromUnixTimestamp64Milli(
        {base_ms:Int64} - {spread:Int64}
            + toInt64(cityHash64(tenant_id, {day:Int64}) % intDiv({spread:UInt32}, 24)) * 24
            + toHour(received_at),
        'UTC'
    ) AS marked_at,
    tenant_id,
    toStartOfMinute(received_at, 'UTC') AS minute
FROM requests
WHERE received_at >= fromUnixTimestamp64Milli({day:Int64} * 86400000, 'UTC')
    AND received_at < fromUnixTimestamp64Milli({day:Int64} * 86400000 + 86400000, 'UTC')
SETTINGS max_execution_time = 60
"""
_SPAN = """marked_at >= fromUnixTimestamp64Milli({from_ms:Int64}, 'UTC')
        AND marked_at < fromUnixTimestamp64Milli({to_ms:Int64}, 'UTC')"""
_NEXT = f"""
SELECT count() AS marks, toUnixTimestamp64Milli(max(marked_at)) AS last_ms
FROM (
    SELECT marked_at FROM rollup_marks WHERE {_SPAN}
    ORDER BY marked_at LIMIT {{marks:UInt32}} WITH TIES
)
"""  # noqa: S608 - constants of the code, with values as parameters
_DIRTY = """
SELECT
    toUnixTimestamp(minute) * 1000 AS minute_ms,
    max(marked_at) >= fromUnixTimestamp64Milli({minutes_ms:Int64}, 'UTC') AS no_minute,
    max(marked_at) >= fromUnixTimestamp64Milli({hours_ms:Int64}, 'UTC') AS no_hour
FROM rollup_marks
WHERE (__scope__)
    AND marked_at >= fromUnixTimestamp64Milli({least_ms:Int64}, 'UTC')
    AND minute >= toDateTime(intDiv({from_ms:Int64}, 1000), 'UTC')
    AND minute <= toDateTime(intDiv({to_ms:Int64}, 1000), 'UTC')
GROUP BY minute
LIMIT {limit:UInt32}
SETTINGS max_execution_time = 20
"""


def _roll(level: Level) -> str:
    """Return the statement that recomputes the sums of intervals marked in a time range.

    If a rollup row has no requests any more, its new version has zeros. For times whose events may
    have been deleted, only the separate rows of late events are recomputed.
    """
    groups = ("start", "late_id", *KEYS)
    units = f"SELECT tenant_id, {level.start_of}(minute, 'UTC') FROM rollup_marks WHERE {_SPAN}"  # noqa: S608
    of_event = f"(tenant_id, {level.start_of}(received_at, 'UTC')) IN ({units})"
    is_whole = "start >= fromUnixTimestamp64Milli({whole_ms:Int64}, 'UTC')"
    return f"""
INSERT INTO {level.table} ({", ".join((*groups, *MEASURES))}, version)
SELECT {", ".join(groups)}, {", ".join(f"sum(m_{name})" for name in SUMS)}, max(m_late_at),
    fromUnixTimestamp64Milli({{now_ms:Int64}}, 'UTC')
FROM (
    SELECT {level.start_of}(at, 'UTC') AS start,
        if(ingested_at >= start + toIntervalMillisecond({{late_after_ms:Int64}}), event_id, '')
            AS late_id,
        {", ".join(KEYS)}, {", ".join(f"{name} AS m_{name}" for name in MEASURES)}
    FROM ({event_rows(of_event)})
    WHERE {is_whole} OR late_id != ''
    UNION ALL
    SELECT {", ".join(groups)}, {", ".join(f"toUInt64(0) AS m_{name}" for name in SUMS)},
        fromUnixTimestamp64Milli(0, 'UTC') AS m_late_at
    FROM {level.table}
    WHERE (tenant_id, start) IN ({units}) AND ({is_whole} OR late_id IN (
        SELECT event_id FROM requests
        WHERE received_at < fromUnixTimestamp64Milli({{whole_ms:Int64}}, 'UTC') AND {of_event}
    ))
)
GROUP BY {", ".join(groups)}
SETTINGS max_execution_time = 30, do_not_merge_across_partitions_select_final = 1
"""  # noqa: S608 - constants of the code, with values as parameters


_ROLL = {level: _roll(level) for level in Level}


async def summed(store: Store, span: Range, scope: TenantScope) -> str:
    """Return SQL for rows of `at`, `KEYS` and `MEASURES` whose sum is that of a time range.

    The statement depends on the present progress, so it must be run at once and not be cached. This
    function raises the errors of `rollup_state`.
    """
    state = await rollup_state(store, span, scope)
    return planned_rows(plan(span, state), scope.sql)


async def rollup_state(store: Store, span: Range, scope: TenantScope) -> RollupState:
    """Return the progress of rollups for a time range and tenants.

    The caller must read rows after this call. Rows whose marks are written later were not yet
    acknowledged at the time of the call, so the result may omit them.

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    known = await progress(store)
    kept, now_ms = known.kept, known.now_ms
    until = known.levels
    if not until:
        return RollupState(kept=kept)
    minutes_ms, hours_ms = until.get(Level.MINUTES, now_ms), until.get(Level.HOURS, now_ms)
    rows = await store.query(
        _DIRTY.replace("__scope__", scope.sql),
        {
            "minutes_ms": minutes_ms,
            "hours_ms": hours_ms,
            "least_ms": min(minutes_ms, hours_ms),
            "from_ms": span[0] // HOUR_MS * HOUR_MS,
            "to_ms": span[1],
            "limit": _DIRTY_MAX,
        }
        | scope.parameters,
    )
    if len(rows) == _DIRTY_MAX:
        return RollupState(kept=kept)
    return RollupState(
        has_minutes=Level.MINUTES in until,
        has_hours=Level.HOURS in until,
        minutes_ms=_where(rows, "no_minute"),
        hours_ms=_where(rows, "no_hour"),
        kept=kept,
    )


def _where(rows: Iterable[dict[str, Any]], name: str) -> list[int]:
    return [row["minute_ms"] for row in rows if row[name]]


class Rollups:
    """Computes rollups periodically in the loop `run`, which runs in a TaskGroup."""

    def __init__(
        self, store: Store, metrics: TelemetryMetrics, *, settle_ms: int = SETTLE_MS
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._settle_ms = settle_ms
        self._sums = [DaySums(store, metrics, it) for it in (USAGE, USAGE_BY_HOUR, COST_SUMS)]
        self._marks_max = _MARKS_MAX
        self._hours_at_ms = 0

    async def run(self) -> None:
        """Compute rollups at intervals until cancelled."""
        await run_every(
            _EVERY_S, self.step, name="rollups", expected=STORE_ERRORS, step_timeout_s=_STEP_S
        )

    async def step(self) -> None:
        """Process all present marks. Raises STORE_ERRORS. A repetition of the step is harmless."""
        [row] = await self._store.query(_NOW, {})
        await self._level(Level.MINUTES)
        is_time = row["now_ms"] >= self._hours_at_ms
        if not is_time or not await self._level(Level.HOURS):
            return
        if all([await it.step() for it in self._sums]):
            self._hours_at_ms = row["now_ms"] + _HOURS_EVERY_MS

    async def _level(self, level: Level) -> bool:
        """Process the marks of a level. Returns False if the time ran out before the last one."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + _LEVEL_S
        known = await progress(self._store)
        if level not in known.levels and not await self._seeded(known, until_s):
            return False
        while clock() < until_s:
            if await self._round(level):
                return True
        return False

    async def _round(self, level: Level) -> bool:
        """Process a limited number of marks, and return whether none are left."""
        known = await progress(self._store)
        settled_ms = known.now_ms - self._settle_ms
        if level in known.levels:
            from_ms = known.levels[level]
        else:  # `_seeded` has stored the base
            from_ms = known.until_ms[_SEED_BASE] - _SPREAD_MS
        self._metrics.rolled_up.labels(level=level).set(from_ms / 1000)
        limit = self._marks_max
        span = {"from_ms": from_ms, "to_ms": settled_ms}
        [found] = await self._store.query(_NEXT, span | {"marks": limit})
        is_all = found["marks"] < limit
        to_ms = settled_ms if is_all else found["last_ms"] + 1
        if found["marks"]:
            if not await self._roll(level, known, (from_ms, to_ms)):
                return False
            self._metrics.rollup_marks.labels(level=level).inc(found["marks"])
        if to_ms > from_ms:
            await self._note(level, to_ms)
            self._metrics.rolled_up.labels(level=level).set(to_ms / 1000)
        return is_all

    async def _roll(self, level: Level, known: RollupProgress, marked: Range) -> bool:
        """Recompute the sums of marked intervals. Returns False if they were too many at once."""
        parameters = {
            "now_ms": known.now_ms,
            "from_ms": marked[0],
            "to_ms": marked[1],
            "late_after_ms": LATE_AFTER_MS,
            "whole_ms": known.kept.events_ms,
        }
        try:
            await self._store.write(_ROLL[level], parameters)
        except STORE_ERRORS:
            # The failure may have been caused by too many marks, so the next attempt has fewer.
            # With the minimum number of marks, it has another cause.
            if self._marks_max == _MARKS_MIN:
                raise
            self._marks_max = max(_MARKS_MIN, self._marks_max // 2)
            return False
        self._marks_max = min(_MARKS_MAX, self._marks_max * 9 // 8 + 1)
        return True

    async def _note(self, name: str, to_ms: int) -> None:
        await note_progress(self._store, str(name), to_ms)

    async def _seeded(self, known: RollupProgress, until_s: float) -> bool:
        """Mark the intervals of rows that have no marks, and return whether all rows have marks.

        One statement writes all marks of one day, and its repetition is harmless. Later calls mark
        the remaining days. Rows lack marks if they are older than the table of marks, or if their
        marks have expired.
        """
        base_ms = known.until_ms.get(_SEED_BASE, 0)
        if base_ms <= known.now_ms - BEHIND_MAX_MS:
            base_ms = known.now_ms
            await self._note(_SEED_BASE, base_ms)
        for level in Level:
            if level not in known.levels:
                self._metrics.rolled_up.labels(level=level).set((base_ms - _SPREAD_MS) / 1000)
        # Inserts that began before marking did write no marks, so all of them must have ended.
        if base_ms > known.now_ms - self._settle_ms:
            return False
        name = _SEED_DAY.format(base_ms=base_ms)
        done_ms = known.until_ms.get(name, 0)
        months = await self._store.query(_MONTHS, {})
        spans = [(row["first_ms"] // DAY_MS, row["last_ms"] // DAY_MS) for row in months]
        for day in sorted(day for first, last in spans for day in range(first, last + 1)):
            if (day + 1) * DAY_MS <= done_ms:
                continue
            if asyncio.get_running_loop().time() >= until_s:
                return False
            parameters = {"base_ms": base_ms, "spread": _SPREAD_MS, "day": day}
            await self._store.write(_SEED, parameters)
            await self._note(name, (day + 1) * DAY_MS)
        return True
