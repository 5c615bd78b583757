"""Decides which parts of a time range are read from rollups, and which from single events.

A rollup row has the sums of a tenant's requests in a minute or an hour. Events are delivered at
least once, and a gateway's event replaces its router's report. So rollup rows are never
incremented. When an interval of a tenant receives events, its sums are recomputed from all its
events. A view in the migrations marks the intervals that each insert has changed. `rollup_progress`
stores the time of the last mark whose interval was recomputed. A query reads rollups for intervals
without a later mark, and events for all others. So its result always equals the sum over the
events.

This module has the decisions and the SQL, and `telemetry.rollups_worker` writes the rows.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from telemetry.settings import REQUESTS_DAYS_MIN

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
# Name of the progress of `telemetry.day_sums`. It is not a `Level`, because bills never read sums
# of days.
DAYS = "days"
# An hour is closed this long after its end. Rows that are written later count as late. The reason
# is a gateway that spooled them while the broker was down, or a request that ran for so long.
CLOSED_AFTER_MS = HOUR_MS
# Marks are stored for 30 days. So rollups that are further behind are invalid and are recomputed.
BEHIND_MAX_MS = 29 * DAY_MS
# Margin for differing clocks and for the duration of a round of rollups. Events are stored for
# whole days, and deleted some time after that, when parts are merged.
_ROOM_MS = DAY_MS
# An event that arrives this long after its time has a separate rollup row, which is added to the
# other rows. The limit is half of the minimum retention of events. So an event that arrives before
# the limit can be summed for at least the other half. The limit is independent of the settings.
# Otherwise, after a change of them, both kinds of rows could contain the same event.
LATE_AFTER_MS = REQUESTS_DAYS_MIN * DAY_MS // 2
_RANGES_MAX = 40

Range = tuple[int, int]


class Level(StrEnum):
    """The length of a rollup row's interval. The value is also the name of its progress."""

    MINUTES = "minutes"
    HOURS = "hours"

    @property
    def table(self) -> str:
        """The table with the rollup rows of this level."""
        return f"usage_{self}"

    @property
    def start_of(self) -> str:
        """The SQL function that returns the start of an interval."""
        return "toStartOfMinute" if self is Level.MINUTES else "toStartOfHour"


@dataclass(frozen=True, slots=True)
class RetainedSince:
    """The times from which no row has been deleted, in Unix milliseconds of whole hours.

    Attributes:
        events_ms: Arrival time from which all request events exist.
        minutes_ms: Time from which all rollups of minutes exist.
    """

    events_ms: int = 0
    minutes_ms: int = 0

    @classmethod
    def of(cls, now_ms: int, events: "Deletion", minutes: "Deletion") -> "RetainedSince":
        """Return the times from which all rows exist, for two tables that delete old rows."""

        def since(found: Deletion) -> int:
            days_ms = now_ms - found.days * DAY_MS if found.days else 0
            gone_ms = max(found.gone_ms, days_ms)
            return -(-(gone_ms + _ROOM_MS) // HOUR_MS) * HOUR_MS if gone_ms > 0 else 0

        return cls(since(events), since(minutes))


@dataclass(frozen=True, slots=True)
class Deletion:
    """The deletion of rows by a table's TTL. The TTL may differ from the settings.

    Attributes:
        days: Days after which rows are deleted, or 0 if they are never deleted.
        gone_ms: Unix time in ms before which rows may be missing, because the retention was shorter
            in the past. 0 means that none are missing.
    """

    days: int = 0
    gone_ms: int = 0


@dataclass(frozen=True, slots=True)
class RollupState:
    """The progress of rollups at the time of one query. Times are Unix milliseconds.

    Attributes:
        has_minutes: Whether rollups of minutes are valid, except for minutes in `minutes_ms`.
        has_hours: Whether rollups of hours are valid, except for hours that contain `hours_ms`.
        minutes_ms: Starts of minutes that were marked after the last rollup of minutes.
        hours_ms: Starts of minutes that were marked after the last rollup of hours.
        kept: Times from which events and rollups of minutes still exist.
    """

    has_minutes: bool = False
    has_hours: bool = False
    minutes_ms: Collection[int] = ()
    hours_ms: Collection[int] = ()
    kept: RetainedSince = field(default_factory=RetainedSince)


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """The parts of a time range, by the table they are read from. Ranges are sorted and disjoint.

    Attributes:
        span: The whole hours within the queried time range. The partial hours at the ends of that
            range are in `events`.
        minutes: Hours within `span` for which rollups of hours are not valid.
        events: Ranges to sum from events. All other times in `minutes` are summed from rollups of
            minutes.
    """

    span: Range
    minutes: tuple[Range, ...]
    events: tuple[Range, ...]

    def level_at(self, moment_ms: int) -> Level | None:
        """Return the rollup level that covers a time, or None if events cover it."""
        if _holds(self.events, moment_ms):
            return None
        return Level.MINUTES if _holds(self.minutes, moment_ms) else Level.HOURS


def plan(span: Range, state: RollupState) -> SpanPlan:
    """Return the tables from which the parts of a time range are summed.

    Times whose events may have been deleted are not summed from events. If such a time receives
    late events, the next round of rollups includes them.
    """
    asked, span = span, (-_floor(-span[0], HOUR_MS), _floor(span[1], HOUR_MS))
    if span[0] >= span[1]:
        return SpanPlan((0, 0), (), (asked,))
    kept = state.kept
    events, marked = [span], [span]
    if state.has_minutes:
        events = _coarse((at, at + MINUTE_MS) for at in state.minutes_ms)
    if state.has_hours:
        marked = _coarse(_hours((at, at + 1)) for at in state.hours_ms)
    events = _clipped(events, (max(span[0], kept.events_ms), span[1]))
    inside = _clipped(_merged([*marked, *map(_hours, events)]), span)
    # For these minutes events still exist, but their rollups may have been deleted.
    bare = _clipped(inside, (kept.events_ms, kept.minutes_ms))
    minutes = _merged([*_clipped(inside, (kept.minutes_ms, span[1])), *bare])
    edges = _clipped([(asked[0], span[0]), (span[1], asked[1])], asked)
    return SpanPlan(span, tuple(minutes), tuple(_merged([*events, *bare, *edges])))


def condition(ranges: Sequence[Range], moment: str) -> str:
    """Return an SQL condition that a time is in one of the ranges."""
    return " OR ".join(f"({_between(moment, one)})" for one in ranges) or "0"


def rows(level: Level, where: Range, ranges: str, scope: str) -> str:
    """Return SQL for the rows of a rollup. `ranges` and `scope` are SQL conditions."""
    return f"""
SELECT toDateTime64(start, 3, 'UTC') AS at, {", ".join(KEYS)}, {", ".join(MEASURES)}
FROM {level.table} FINAL
WHERE ({scope}) AND {_between("start", where)} AND ({ranges})"""  # noqa: S608 - our own words


def event_rows(where: str) -> str:
    """Return SQL for one row per event that meets the condition, with the columns of `rows`.

    FINAL removes duplicates that are not merged yet. Duplicates have the same time, so they are
    always in the same partition.

    Prompt tokens count only if they were computed, as in the gateway's limits and metrics. A
    request that was refused, or that left the queue before a placement, has none. All prompt tokens
    of an embedding's event were computed.
    """
    return f"""
SELECT received_at AS at, {", ".join(KEYS)}, event_id, ingested_at,
    toUInt64(1) AS requests,
    toUInt64(status >= 400) AS failed,
    toUInt64(if(
        status < 400 OR output_tokens > 0 OR replica_id != ''
            OR endpoint IN ('/v1/embeddings', '/v1/rerank', '/v1/classify'),
        prompt_tokens, 0
    )) AS prompt,
    toUInt64(cached_tokens) AS cached,
    toUInt64(output_tokens) AS output,
    toUInt64(withheld_tokens) AS withheld,
    toUInt64(unbilled_tokens) AS unbilled,
    toUInt64(ingested_at >= toStartOfHour(received_at) + toIntervalHour(1)
        + toIntervalMillisecond({CLOSED_AFTER_MS})) AS late,
    if(late > 0, ingested_at, fromUnixTimestamp64Milli(0, 'UTC')) AS late_at
FROM requests FINAL
WHERE {where}"""  # noqa: S608 - our own words, with values as parameters


# A rollup row has one value of each key, and the sum of each measure. The exception is `late_at`,
# whose maximum is stored.
KEYS = ("tenant_id", "key_id", "model", "release", "pool_id", "is_copy")
MEASURES = (
    *("requests", "failed", "prompt", "cached", "output", "withheld", "unbilled", "late"),
    "late_at",
)
SUMS = MEASURES[:-1]


def planned_rows(found: SpanPlan, scope: str) -> str:
    """Return SQL for rows whose sum is that of a time range, with `at`, `KEYS` and `MEASURES`."""
    columns = f"at, {', '.join(KEYS)}, {', '.join(MEASURES)}"
    parts = [rows(Level.HOURS, found.span, f"NOT ({condition(found.minutes, 'start')})", scope)]
    if found.minutes:
        inside = condition(found.minutes, "start")
        outside = condition(found.events, "start")
        parts.append(rows(Level.MINUTES, found.span, f"({inside}) AND NOT ({outside})", scope))
    if found.events:
        # ClickHouse only uses the primary key if the condition also has one range around all
        # ranges.
        hull = (found.events[0][0], found.events[-1][1])
        where = (
            f"({scope}) AND {_between('received_at', hull)}"
            f" AND ({condition(found.events, 'received_at')})"
        )
        parts.append(f"SELECT {columns} FROM ({event_rows(where)})")  # noqa: S608 - as above
    return "\nUNION ALL\n".join(parts)


def _between(moment: str, one: Range) -> str:
    begin, end = (f"fromUnixTimestamp64Milli({ms:d}, 'UTC')" for ms in one)
    return f"{moment} >= {begin} AND {moment} < {end}"


def _floor(moment_ms: int, length_ms: int) -> int:
    return moment_ms // length_ms * length_ms


def _hours(one: Range) -> Range:
    """Return the whole hours that contain a range."""
    return _floor(one[0], HOUR_MS), -_floor(-one[1], HOUR_MS)


def _holds(ranges: Iterable[Range], moment_ms: int) -> bool:
    return any(begin <= moment_ms < end for begin, end in ranges)


def _merged(ranges: Iterable[Range]) -> list[Range]:
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _clipped(ranges: Iterable[Range], span: Range) -> list[Range]:
    cut = ((max(begin, span[0]), min(end, span[1])) for begin, end in ranges)
    return [(begin, end) for begin, end in cut if begin < end]


def _coarse(ranges: Iterable[Range]) -> list[Range]:
    """Return a few ranges that contain the given ranges, so that the statement stays short."""
    found = _merged(ranges)
    for length_ms in (HOUR_MS, DAY_MS):
        if len(found) <= _RANGES_MAX:
            return found
        found = _merged((_floor(a, length_ms), -_floor(-b, length_ms)) for a, b in found)
    return found if len(found) <= _RANGES_MAX else [(found[0][0], found[-1][1])]
