"""Makes rollups of what was marked, and says to questions how far they are.

Any number of processes may do so, and die at any point: a round sums all events of what was marked
and only then notes its progress, so what is repeated gives the same rows. A row carries the store's
time from before its events were read, and the newest counts. So what wins has seen all that had
been marked long enough before: nothing that is written, here or to `requests`, may take as long as
`SETTLE_MS`.
"""

from collections.abc import Iterable
from typing import Any

from sluice.lifecycle import run_every
from telemetry.metrics import Metrics
from telemetry.queries import Scope
from telemetry.rollups import (
    BEHIND_MAX_MS,
    HOUR_MS,
    KEYS,
    MEASURES,
    SUMS,
    Kept,
    Level,
    Range,
    State,
    event_rows,
    late_after_ms,
    plan,
    planned_rows,
)
from telemetry.store import STORE_ERRORS, Store

SETTLE_MS = 120_000  # inserts take up to 60 s, and servers' clocks differ
_EVERY_S = 30.0
_STEP_S = 600.0
# A minute that goes on is summed again in each round, an hour need not be: questions take its
# minutes meanwhile.
_HOURS_EVERY_MS = 600_000
_MARKS_MAX, _MARKS_MIN = 100_000, 100
_ROUNDS_MAX = 100
_DIRTY_MAX = 100_000
# Marks of what was there before there were marks: spread, so that rounds stay small, but for each
# tenant's month at once, because its events lie together.
_SPREAD_MS = 600_000

_NOW = "SELECT toUnixTimestamp64Milli(now64(3)) AS now_ms"
_PROGRESS = """
SELECT name, toUnixTimestamp64Milli(max(until)) AS until_ms FROM rollup_progress GROUP BY name
"""
_NOTE = """
INSERT INTO rollup_progress (name, until)
SELECT {level:String}, fromUnixTimestamp64Milli({to_ms:Int64}, 'UTC')
"""
_DAYS = "SELECT DISTINCT intDiv(toUnixTimestamp(received_at), 86400) AS day FROM requests"
_SEED = """
INSERT INTO rollup_marks (marked_at, tenant_id, minute)
SELECT DISTINCT
    fromUnixTimestamp64Milli(
        {to_ms:Int64} - toInt64(cityHash64(tenant_id, toYYYYMM(received_at)) % {spread:UInt32}),
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
"""  # noqa: S608 - constants of the code; values are parameters
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
    """Return the statement that sums anew whatever was marked in a span of time.

    What was there and is no more becomes a row of zeros. Of a time whose events may be deleted,
    only those rows are touched that are single, late events.
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
"""  # noqa: S608 - constants of the code; values are parameters


_ROLL = {level: _roll(level) for level in Level}


async def summed(store: Store, span: Range, scope: Scope) -> str:
    """Return SQL of rows that add up to the events of a span: `at`, `KEYS` and `MEASURES`.

    They are right for now: whoever waits with the statement asks anew. Raises what `rollup_state`
    does.
    """
    state = await rollup_state(store, span, scope)
    return planned_rows(plan(span, state), scope.sql)


async def rollup_state(store: Store, span: Range, scope: Scope) -> State:
    """Return how far rollups are for a span, of what a scope holds.

    To be asked before rows are read: what is marked after that has not been acknowledged yet.

    Raises:
        STORE_ERRORS: ClickHouse is away.
    """
    [row] = await store.query(_NOW, {})
    now_ms: int = row["now_ms"]
    settings = store.settings
    kept = Kept.of(now_ms, settings.requests_days, settings.usage_minutes_days)
    until = await _progress(store, now_ms)
    if not until:
        return State(kept=kept)
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
        return State(kept=kept)
    return State(
        has_minutes=Level.MINUTES in until,
        has_hours=Level.HOURS in until,
        minutes_ms=_where(rows, "no_minute"),
        hours_ms=_where(rows, "no_hour"),
        kept=kept,
    )


def _where(rows: Iterable[dict[str, Any]], name: str) -> list[int]:
    return [row["minute_ms"] for row in rows if row[name]]


async def _progress(store: Store, now_ms: int) -> dict[Level, int]:
    """Return up to which mark each level is made, without those that are too far behind."""
    found = {Level(row["name"]): row["until_ms"] for row in await store.query(_PROGRESS, {})}
    return {level: ms for level, ms in found.items() if ms > now_ms - BEHIND_MAX_MS}


class Rollups:
    """Makes rollups; `run` belongs into a TaskGroup."""

    def __init__(self, store: Store, metrics: Metrics, *, settle_ms: int = SETTLE_MS) -> None:
        self._store = store
        self._metrics = metrics
        self._settle_ms = settle_ms
        self._marks_max = _MARKS_MAX
        self._hours_at_ms = 0

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        await run_every(
            _EVERY_S, self.step, name="rollups", expected=STORE_ERRORS, step_timeout_s=_STEP_S
        )

    async def step(self) -> None:
        """Make what has been marked until now; STORE_ERRORS: do it again later."""
        now_ms = await self._now_ms()
        await self._level(Level.MINUTES)
        if now_ms >= self._hours_at_ms:
            await self._level(Level.HOURS)
            self._hours_at_ms = now_ms + _HOURS_EVERY_MS

    async def _level(self, level: Level) -> None:
        for _ in range(_ROUNDS_MAX):
            if await self._round(level):
                return

    async def _round(self, level: Level) -> bool:
        """Make a bounded part of what is marked; return whether that was all."""
        now_ms = await self._now_ms()
        settled_ms = now_ms - self._settle_ms
        from_ms = (await _progress(self._store, now_ms)).get(level)
        if from_ms is None:
            from_ms = await self._seed(settled_ms)
        limit = self._marks_max
        span = {"from_ms": from_ms, "to_ms": settled_ms}
        [found] = await self._store.query(_NEXT, span | {"marks": limit})
        is_all = found["marks"] < limit
        to_ms = settled_ms if is_all else found["last_ms"] + 1
        if found["marks"]:
            await self._roll(level, now_ms, (from_ms, to_ms))
            self._metrics.rollup_marks.labels(level=level).inc(found["marks"])
        if to_ms > from_ms:
            await self._store.write(_NOTE, {"level": str(level), "to_ms": to_ms})
            self._metrics.rolled_up.labels(level=level).set(to_ms / 1000)
        return is_all

    async def _roll(self, level: Level, now_ms: int, marked: Range) -> None:
        days = self._store.settings.requests_days
        parameters = {
            "now_ms": now_ms,
            "from_ms": marked[0],
            "to_ms": marked[1],
            "late_after_ms": late_after_ms(days),
            "whole_ms": Kept.of(now_ms, days, 0).events_ms,
        }
        try:
            await self._store.write(_ROLL[level], parameters)
        except STORE_ERRORS:
            # Too much at once, perhaps.
            self._marks_max = max(_MARKS_MIN, self._marks_max // 2)
            raise
        self._marks_max = min(_MARKS_MAX, self._marks_max * 2)

    async def _seed(self, settled_ms: int) -> int:
        """Mark all that there is, and return the time of the first mark."""
        for row in await self._store.query(_DAYS, {}):
            parameters = {"to_ms": settled_ms - 1, "spread": _SPREAD_MS, "day": row["day"]}
            await self._store.write(_SEED, parameters)
        return settled_ms - _SPREAD_MS - 1

    async def _now_ms(self) -> int:
        [row] = await self._store.query(_NOW, {})  # times are those of the store
        return row["now_ms"]
