"""Reads and writes alerts, silences, incidents and notices in PostgreSQL."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, and_, delete, func, or_, select, update
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.alerts.bodies import AlertReport, matchers_of
from control_plane.alerts.model import (
    NAME,
    AlertMatcher,
    GroupAlert,
    GroupStatus,
    ToldGroup,
    fingerprint,
    group_of,
    is_silenced,
    opens_incident,
    rank,
)
from control_plane.alerts.notices import Notice, NoticeAlert, rfc3339
from control_plane.alerts.tables import (
    alerts,
    incident_events,
    incidents,
    notifications,
    silences,
)
from control_plane.rollouts.state import Phase
from control_plane.rollouts.tables import rollouts
from sluice.ids import new_id

FIRING_MAX = 2000
# An alert ends if it is not reported again within this number of seconds. Prometheus repeats an
# alert at least every minute.
LASTS_S = 300
_OVER_SHOWN_MAX = 50

Values = dict[str, Any]


async def report(connection: AsyncConnection, found: Sequence[AlertReport]) -> int:
    """Store firing and ended alerts, and return the number of new alerts.

    At most `FIRING_MAX` alerts are stored at the same time. Further alerts are not stored, because
    the oldest alerts show the cause.
    """
    now = await connection.scalar(select(func.clock_timestamp()))
    assert now is not None
    query = select(func.count()).select_from(alerts).where(alerts.c.is_firing)
    room = FIRING_MAX - (await connection.scalar(query) or 0)
    new = 0
    for one in {fingerprint(it.labels): it for it in found}.values():
        new += await _report(connection, one, now, may_begin=new < room)
    return new


async def _report(
    connection: AsyncConnection, one: AlertReport, now: datetime, *, may_begin: bool
) -> bool:
    name = fingerprint(one.labels)
    is_it = and_(alerts.c.fingerprint == name, alerts.c.is_firing)
    if one.endsAt is not None and one.endsAt <= now:
        await _end(connection, is_it, min(one.endsAt, now))
        return False
    ends_at = one.endsAt or now + func.make_interval(0, 0, 0, 0, 0, 0, LASTS_S)
    again = {"ends_at": ends_at, "annotations": one.annotations}
    if (await connection.execute(update(alerts).where(is_it).values(again))).rowcount:
        return False
    if not may_begin:
        return False
    made = insert(alerts).values(
        id=new_id("alert"),
        fingerprint=name,
        name=one.labels[NAME],
        rank=rank(one.labels),
        group_key=group_of(one.labels),
        labels=one.labels,
        is_firing=True,
        starts_at=min(one.startsAt or now, now),
        **again,
    )
    return bool((await connection.execute(made.on_conflict_do_nothing())).rowcount)


async def _end(connection: AsyncConnection, which: Any, at: Any) -> None:
    """End alerts, and add an event about each alert to the alert's incident."""
    ended = update(alerts).where(which).values(is_firing=False, ends_at=at)
    rows = (await connection.execute(ended.returning(alerts.c.incident_id, alerts.c.name))).all()
    for incident_id, name in rows:
        if incident_id:
            await add_event(connection, incident_id, "over", f"{name} is over")


async def add_event(
    connection: AsyncConnection, incident_id: str, kind: str, text: str, actor: str = ""
) -> None:
    """Add an event to an incident."""
    values = {"incident_id": incident_id, "kind": kind, "text": text, "actor": actor}
    await connection.execute(insert(incident_events).values(id=new_id("event"), **values))


async def has_work(connection: AsyncConnection) -> bool:
    """Return whether `step` may change anything, or a notice may be due."""
    return bool(await connection.scalar(select(work_condition())))


@cache  # cached, because building the statement costs more than its execution
def work_condition() -> ColumnElement[bool]:
    """Return the condition under which `step` may change anything, or a notice may be due."""
    fires = select(alerts.c.id).where(alerts.c.is_firing).exists()
    is_told = select(notifications.c.id).exists()
    return or_(fires, is_told, _unknown_rollouts().exists())


async def step(connection: AsyncConnection) -> None:
    """End alerts that were not reported again, apply silences, and open incidents."""
    await _end(connection, and_(alerts.c.is_firing, alerts.c.ends_at < func.now()), func.now())
    await _silence(connection)
    await _open_incidents(connection)
    await _open_for_rollouts(connection)


async def active_silences(connection: AsyncConnection) -> list[tuple[AlertMatcher, ...]]:
    """Return the matchers of each silence in effect."""
    query = select(silences.c.matchers).where(silences.c.ends_at > func.now())
    return [matchers_of(row) for row in (await connection.scalars(query)).all()]


async def _silence(connection: AsyncConnection) -> None:
    active = await active_silences(connection)
    query = select(alerts.c.id, alerts.c.labels, alerts.c.is_silenced).where(alerts.c.is_firing)
    for row in (await connection.execute(query)).all():
        wanted = is_silenced(row.labels, active)
        if wanted != row.is_silenced:
            change = update(alerts).where(alerts.c.id == row.id).values(is_silenced=wanted)
            await connection.execute(change)


async def _open_incidents(connection: AsyncConnection) -> None:
    query = select(alerts).where(
        alerts.c.is_firing, ~alerts.c.is_silenced, alerts.c.incident_id == ""
    )
    for row in (await connection.execute(query.order_by(alerts.c.id))).mappings().all():
        if not opens_incident(row["labels"]):
            continue
        title = row["annotations"].get("summary") or row["name"]
        incident_id = await open_incident(connection, row["group_key"], title)
        labels = ", ".join(f"{k}={v}" for k, v in sorted(row["labels"].items()) if k != NAME)
        await add_event(connection, incident_id, "alert", f"{row['name']} fires ({labels})")
        joined = update(alerts).where(alerts.c.id == row["id"])
        await connection.execute(joined.values(incident_id=incident_id))


async def open_incident(connection: AsyncConnection, key: str, title: str) -> str:
    """Return the open incident of a key. Without an open incident, a new one is opened."""
    is_it = and_(incidents.c.key == key, incidents.c.is_open)
    known = await connection.scalar(select(incidents.c.id).where(is_it))
    if known:
        return known
    made = new_id("incident")
    values = {"id": made, "key": key, "title": title[:500], "is_open": True}
    await connection.execute(insert(incidents).values(**values))
    await add_event(connection, made, "opened", title[:4000])
    return made


def _unknown_rollouts() -> Select[Any, Any, Any]:
    """Return the query of rollouts of the last day that were rolled back and have no incident."""
    known = select(incidents.c.id).where(incidents.c.key == "rollout/" + rollouts.c.id)
    return select(rollouts.c.id, rollouts.c.model_id, rollouts.c.canary).where(
        rollouts.c.phase == str(Phase.ROLLED_BACK),
        rollouts.c.ended_at > func.now() - func.make_interval(0, 0, 0, 1),
        ~known.exists(),
    )


async def _open_for_rollouts(connection: AsyncConnection) -> None:
    """Open an incident for each rollout of the last day that the platform rolled back."""
    for row in (await connection.execute(_unknown_rollouts())).all():
        title = f"Release {row.canary} of {row.model_id} was sent back"
        await open_incident(connection, f"rollout/{row.id}", title)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertGroup:
    """A group of alerts, with its firing alerts that no silence matches, and its last notices."""

    key: str
    rank: int
    firing: Sequence[Values]
    told: Mapping[str, ToldGroup]  # last notice about the group, by receiver

    @property
    def members(self) -> list[GroupAlert]:
        """The firing alerts of the group, in the form for `telling`."""
        return [
            GroupAlert(
                fingerprint=row["fingerprint"],
                since_ms=_ms(row["starts_at"]),
                is_acknowledged=bool(row["acknowledged_by"]),
            )
            for row in self.firing
        ]


async def groups(connection: AsyncConnection) -> list[AlertGroup]:
    """Return the groups with an alert that fires now or was in their last notice."""
    fires = select(alerts).where(alerts.c.is_firing, ~alerts.c.is_silenced)
    rows = (await connection.execute(fires.order_by(alerts.c.id))).mappings().all()
    told = (await connection.execute(select(notifications))).mappings().all()
    keys = {row["group_key"] for row in rows} | {row["group_key"] for row in told}
    return [
        AlertGroup(
            key=key,
            rank=int(key.rpartition("/P")[2]),
            firing=[dict(row) for row in rows if row["group_key"] == key],
            told={it["receiver"]: _told_group(it) for it in told if it["group_key"] == key},
        )
        for key in sorted(keys)
    ]


def _told_group(row: RowMapping) -> ToldGroup:
    return ToldGroup(fingerprints=frozenset(row["fingerprints"]), told_ms=_ms(row["told_at"]))


async def ended_of(connection: AsyncConnection, fingerprints: Iterable[str]) -> list[Values]:
    """Return the latest rows of ended or silenced alerts, for the last notice of a group."""
    query = (
        select(alerts)
        .where(alerts.c.fingerprint.in_(list(fingerprints)))
        .ext(distinct_on(alerts.c.fingerprint))
        .order_by(alerts.c.fingerprint, alerts.c.id.desc())
        .limit(_OVER_SHOWN_MAX)
    )
    return [dict(row) for row in (await connection.execute(query)).mappings().all()]


def notice_of(key: str, status: GroupStatus, rows: Iterable[Mapping[str, Any]]) -> Notice:
    """Return the notice about the alerts in rows."""
    is_over = status is GroupStatus.RESOLVED
    return Notice(
        group=key,
        status=status,
        alerts=[
            NoticeAlert(
                labels=row["labels"],
                annotations=row["annotations"],
                starts_at=rfc3339(_ms(row["starts_at"])),
                ends_at=rfc3339(_ms(row["ends_at"])) if is_over else "",
            )
            for row in rows
        ],
    )


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


async def prune(connection: AsyncConnection, *, kept_days: int) -> None:
    """Delete alerts, silences and closed incidents that are older than `kept_days`."""
    old = func.now() - func.make_interval(0, 0, 0, kept_days)
    gone = (
        (alerts, and_(~alerts.c.is_firing, alerts.c.ends_at < old)),
        (silences, silences.c.ends_at < old),
        (incidents, and_(~incidents.c.is_open, incidents.c.closed_at < old)),
        (notifications, and_(notifications.c.state != "pending", notifications.c.told_at < old)),
    )
    for table, which in gone:
        await connection.execute(delete(table).where(which))
