"""Computes sums of whole days, which `usage_sums` and `costs.sums` read for web pages."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from telemetry.metrics import TelemetryMetrics
from telemetry.rollup_progress import note_progress, progress
from telemetry.rollups import DAYS, Level
from telemetry.store import Store

_STEP_S = 100.0
_SUMS = ("requests", "failed", "prompt", "cached", "output")
_IN_DAY = """start >= fromUnixTimestamp64Milli({day_ms:Int64}, 'UTC')
    AND start < fromUnixTimestamp64Milli({day_ms:Int64} + 86400000, 'UTC')"""
_ROLL = f"""
INSERT INTO {{table}} (start, tenant_id, key_id, model, {", ".join(_SUMS)}, version)
SELECT {{start}} AS since, tenant_id, key_id, model,
    {", ".join(f"sum({name})" for name in _SUMS)},
    fromUnixTimestamp64Milli({{{{now_ms:Int64}}}}, 'UTC')
FROM usage_hours FINAL
WHERE NOT is_copy AND {_IN_DAY.replace("{", "{{").replace("}", "}}")}
GROUP BY since, tenant_id, key_id, model
SETTINGS max_execution_time = 60, do_not_merge_across_partitions_select_final = 1
"""  # noqa: S608 - constants of the code, with values as parameters
_ROLL_DAY = _ROLL.format(table="usage_days", start="toStartOfDay(start, 'UTC')")
_ROLL_HOURS = _ROLL.format(table="usage_hour_sums", start="start")
_MARKED = """
SELECT DISTINCT toInt64(toUnixTimestamp(toStartOfDay(
    arrayJoin([minute, minute + toIntervalMinute({reach_minutes:UInt32})]), 'UTC'
))) * 1000 AS day_ms
FROM rollup_marks
WHERE marked_at >= fromUnixTimestamp64Milli({from_ms:Int64}, 'UTC')
    AND marked_at < fromUnixTimestamp64Milli({to_ms:Int64}, 'UTC')
"""
_ALL = """
SELECT DISTINCT toInt64(toUnixTimestamp(toStartOfDay(start, 'UTC'))) * 1000 AS day_ms
FROM usage_hours
"""


@dataclass(frozen=True, slots=True)
class DayStatements:
    """The statements that compute one kind of sum for a day.

    Attributes:
        name: Name of the sums in the stored progress and in metrics.
        statements: INSERT statements for the day that begins at `day_ms`, with the version
            `now_ms`.
        reach_minutes: Minutes after its arrival in which a request may still count in further
            hours. 0 means that it counts only in the hour of its arrival.
    """

    name: str
    statements: Sequence[str]
    reach_minutes: int = 0


HOUR_SUMS = "hour_sums"
USAGE = DayStatements(DAYS, (_ROLL_DAY,))
USAGE_BY_HOUR = DayStatements(HOUR_SUMS, (_ROLL_HOURS,))


class DaySums:
    """Recomputes the sums of days whose hourly rollups have changed."""

    def __init__(
        self, store: Store, metrics: TelemetryMetrics, statements: DayStatements = USAGE
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._statements = statements
        self._todo: list[int] = []
        self._until_ms = 0

    async def step(self) -> bool:
        """Recompute all days with changed hours. Returns False if the time ran out before the end.

        After False, the next call continues with the remaining days. Progress is stored only after
        the last day. So if the process is killed, the next one repeats the step.
        """
        clock = asyncio.get_running_loop().time
        end_s = clock() + _STEP_S
        known = await progress(self._store)
        hours_ms = known.levels.get(Level.HOURS)
        if hours_ms is None:
            return True
        name = self._statements.name
        if not self._todo:
            self._until_ms = hours_ms
            made_ms = known.made_ms(name)
            span = {
                "from_ms": made_ms or 0,
                "to_ms": hours_ms,
                "reach_minutes": self._statements.reach_minutes,
            }
            is_known = made_ms is not None
            days = await self._store.query(_MARKED if is_known else _ALL, span if is_known else {})
            # The newest day is last, and thus computed first, because pages mostly show this day.
            self._todo = sorted(row["day_ms"] for row in days)
        while self._todo:
            if clock() >= end_s:
                return False
            # The version of the row is the store's time before the hours are read. A later round
            # has a greater version, so its row replaces this one.
            known = await progress(self._store)
            for statement in self._statements.statements:
                await self._store.write(
                    statement, {"day_ms": self._todo[-1], "now_ms": known.now_ms}
                )
            self._todo.pop()
        await note_progress(self._store, name, self._until_ms)
        self._metrics.rolled_up.labels(level=name).set(self._until_ms / 1000)
        return True
