"""Rollups: sums of requests per minute and hour, and the rules for their use.

The pipeline is at least once, and a gateway's event replaces what its router told, so rows of
rollups are never added to: a stretch of time of a tenant that got events is summed anew from all of
them. Each insert marks what it touched (a view in the migration); `rollup_progress` says up to
which mark rollups are made. A question takes rollups for what was not marked since, and events for
the rest: its answer is the sum over the events, neither stale nor double.

Here is what is decided, and the SQL; `telemetry.rollups_worker` makes the rows.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from telemetry.settings import REQUESTS_DAYS_MIN

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
DAYS = "days"  # the progress of `telemetry.day_sums`; no level, because bills never read days
# An hour is closed this long after its end. Rows that are written later are late: spooled by a
# gateway
# while the broker was away, or of a request that ran for that long.
CLOSED_AFTER_MS = HOUR_MS
# Marks are kept for 30 days. Rollups that are further behind are not believed, and made anew.
BEHIND_MAX_MS = 29 * DAY_MS
# Events are kept for whole days, and deleted when parts are merged: not before their time, but
# clocks and rounds of rollups need some room.
_ROOM_MS = DAY_MS
# An event that comes this long after its time gets a row of its own, which is added to others. Half
# of the least time that events are kept: all that came before are surely there for as long again,
# to be summed. The same for ever and whatever the settings: otherwise rows of both kinds would hold
# the same event.
LATE_AFTER_MS = REQUESTS_DAYS_MIN * DAY_MS // 2
_RANGES_MAX = 40

Range = tuple[int, int]


class Level(StrEnum):
    """The length of a row's interval; progress is stored under these names."""

    MINUTES = "minutes"
    HOURS = "hours"

    @property
    def table(self) -> str:
        """The table of its rows."""
        return f"usage_{self}"

    @property
    def start_of(self) -> str:
        """The function that returns the start of an interval."""
        return "toStartOfMinute" if self is Level.MINUTES else "toStartOfHour"


@dataclass(frozen=True, slots=True)
class RetainedSince:
    """The times from which rows surely exist, in Unix time of whole hours.

    Attributes:
        events_ms: Time from which all events of requests, by their arrival, exist.
        minutes_ms: Time from which all rollups of minutes exist.
    """

    events_ms: int = 0
    minutes_ms: int = 0

    @classmethod
    def of(cls, now_ms: int, events: "Deletion", minutes: "Deletion") -> "RetainedSince":
        """Return the times for tables that delete rows."""

        def since(found: Deletion) -> int:
            days_ms = now_ms - found.days * DAY_MS if found.days else 0
            gone_ms = max(found.gone_ms, days_ms)
            return -(-(gone_ms + _ROOM_MS) // HOUR_MS) * HOUR_MS if gone_ms > 0 else 0

        return cls(since(events), since(minutes))


@dataclass(frozen=True, slots=True)
class Deletion:
    """The deletion of rows by a table's own TTL, which may differ from the settings.

    Attributes:
        days: Days for which rows are kept; 0: for ever.
        gone_ms: Unix time before which rows may be missing because of an earlier, shorter
            retention; 0: none.
    """

    days: int = 0
    gone_ms: int = 0


@dataclass(frozen=True, slots=True)
class RollupState:
    """The progress of rollups, for one query; Unix time.

    Attributes:
        has_minutes: Whether rollups of minutes are valid, marked minutes excepted.
        has_hours: Whether rollups of hours are valid, marked hours excepted.
        minutes_ms: Starts of minutes that were marked since minutes were rolled up.
        hours_ms: Starts of minutes that were marked since hours were rolled up.
        kept: Times from which events and rollups of minutes are still stored.
    """

    has_minutes: bool = False
    has_hours: bool = False
    minutes_ms: Collection[int] = ()
    hours_ms: Collection[int] = ()
    kept: RetainedSince = field(default_factory=RetainedSince)


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """The sources of a span's sums: rollups and events; ranges are sorted and do not touch.

    Attributes:
        span: Whole hours; the rest of the queried span is among the events.
        minutes: Hours that rollups of hours do not cover; inside the span.
        events: Ranges that are summed from events. The rest of `minutes` comes from rollups of
            minutes.
    """

    span: Range
    minutes: tuple[Range, ...]
    events: tuple[Range, ...]

    def level_at(self, moment_ms: int) -> Level | None:
        """Return the rollup that covers a time of the span; None: events do."""
        if _holds(self.events, moment_ms):
            return None
        return Level.MINUTES if _holds(self.minutes, moment_ms) else Level.HOURS


def plan(span: Range, state: RollupState) -> SpanPlan:
    """Return the sources for a span.

    Events that may be deleted are not summed: late events of such a time are in the rollups after
    the next round.
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
    # Rollups of these minutes may be gone, their events not.
    bare = _clipped(inside, (kept.events_ms, kept.minutes_ms))
    minutes = _merged([*_clipped(inside, (kept.minutes_ms, span[1])), *bare])
    edges = _clipped([(asked[0], span[0]), (span[1], asked[1])], asked)
    return SpanPlan(span, tuple(minutes), tuple(_merged([*events, *bare, *edges])))


def condition(ranges: Sequence[Range], moment: str) -> str:
    """Return SQL that tests whether a time lies in one of the ranges."""
    return " OR ".join(f"({_between(moment, one)})" for one in ranges) or "0"


def rows(level: Level, where: Range, ranges: str, scope: str) -> str:
    """Return SQL of the sums of a rollup; `ranges` and `scope` are conditions."""
    return f"""
SELECT toDateTime64(start, 3, 'UTC') AS at, {", ".join(KEYS)}, {", ".join(MEASURES)}
FROM {level.table} FINAL
WHERE ({scope}) AND {_between("start", where)} AND ({ranges})"""  # noqa: S608 - our own words


def event_rows(where: str) -> str:
    """Return SQL of the same columns for single events, one row per event.

    FINAL, although duplicates may not be merged yet: they are always in the same partition, because
    they have the same time.

    Prompt tokens count when they were computed, as in the gateway's limits and metrics: requests
    that were refused, or left the queue, before a placement have none. Events of embeddings hold
    only computed ones.
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
WHERE {where}"""  # noqa: S608 - our own words; values are parameters


# Columns that the requests of one row share, and columns that are summed; of the last, the latest.
KEYS = ("tenant_id", "key_id", "model", "release", "pool_id", "is_copy")
MEASURES = (
    *("requests", "failed", "prompt", "cached", "output", "withheld", "unbilled", "late"),
    "late_at",
)
SUMS = MEASURES[:-1]


def planned_rows(found: SpanPlan, scope: str) -> str:
    """Return SQL of the rows that add up to a span: `at`, `KEYS` and `MEASURES`."""
    columns = f"at, {', '.join(KEYS)}, {', '.join(MEASURES)}"
    parts = [rows(Level.HOURS, found.span, f"NOT ({condition(found.minutes, 'start')})", scope)]
    if found.minutes:
        inside = condition(found.minutes, "start")
        outside = condition(found.events, "start")
        parts.append(rows(Level.MINUTES, found.span, f"({inside}) AND NOT ({outside})", scope))
    if found.events:
        # The primary key is of use only with one stretch of time beside all the ranges.
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
    """Return the hours that a range is in."""
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
    """Return few ranges that cover the given ones, to bound the length of the statement."""
    found = _merged(ranges)
    for length_ms in (HOUR_MS, DAY_MS):
        if len(found) <= _RANGES_MAX:
            return found
        found = _merged((_floor(a, length_ms), -_floor(-b, length_ms)) for a, b in found)
    return found if len(found) <= _RANGES_MAX else [(found[0][0], found[-1][1])]
