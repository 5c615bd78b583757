"""Reads and writes budgets, their states, and the tenants whose requests gateways reject.

A change of a budget or its state locks all rows of the tenant's budgets, in the order of ids. It
then rewrites the tenant's row of `budget_stops` from all budgets. A reading (`Reading`) is the
result of one query of the ledger for one budget.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    DateTime,
    Float,
    Select,
    Text,
    bindparam,
    case,
    cast,
    column,
    delete,
    exists,
    func,
    or_,
    select,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.dml import ReturningInsert

from control_plane.budgets import model
from control_plane.budgets.model import (
    Budget,
    BudgetSpan,
    BudgetStanding,
    OnExhausted,
    Period,
    State,
    Usage,
)
from control_plane.budgets.tables import budget_states, budgets, leases
from control_plane.rollouts.repository import clock_ms
from control_plane.tables import budget_stops

Values = dict[str, Any]
_RECENT = timedelta(hours=1)
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
_HAS_STATE = budgets.c.id == budget_states.c.budget_id


@dataclass(frozen=True, slots=True)
class Due:
    """A budget whose usage must be read from the ledger.

    If the budget changes before its usage (`Reading`) is stored, this usage is discarded.
    """

    id: str
    tenant_id: str
    model_id: str
    period: Period


@dataclass(frozen=True, slots=True)
class Reading:
    """The ledger's usage for one budget at the time of a query.

    Attributes:
        due: Budget of the reading.
        span: Period of the usage.
        usage: Usage of the tenant, restricted to the budget's model if the budget has one.
        looked_at_ms: Time of the query in Unix milliseconds. An older reading never replaces a
            newer reading.
        ingested_until_ms: Unix time in milliseconds up to which the ledger was complete. Zero means
            unknown.
    """

    due: Due
    span: BudgetSpan
    usage: Usage
    looked_at_ms: int
    ingested_until_ms: int


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """A budget with a new state, or with a newly reached soft percent.

    A soft percent or an exhaustion that occurs again in the next period is reported again.
    """

    tenant_id: str
    name: str
    state: State
    reached_percent: int
    used: int
    amount: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The counts of all budgets for metrics.

    Attributes:
        states: Number of budgets by state.
        recent: Number of budgets by state, counting only budgets whose state or soft percent rose
            within the last hour.
        age_s: Age of the oldest reading, in seconds.
    """

    states: Mapping[str, int]
    recent: Mapping[str, int]
    age_s: float


NOTHING = Summary({}, {}, 0.0)
HAS_WORK = exists(select(budgets.c.id))
_HAS_ANY = select(HAS_WORK)


def with_states() -> Select[Any]:
    """Return the query of all budgets with their states. A budget without a state has NULLs."""
    return select(budgets, budget_states).outerjoin(budget_states, _HAS_STATE)


def shown_state(now_ms: int) -> ColumnElement[str]:
    """Return the SQL expression of a budget's state.

    A state of an earlier period counts as unknown.
    """
    is_present = func.coalesce(budget_states.c.ends_at_unix_ms, 0) > now_ms
    return case((is_present, budget_states.c.state), else_=model.UNKNOWN)


async def has_any(connection: AsyncConnection) -> bool:
    """Return whether there is any budget."""
    return bool(await connection.scalar(_HAS_ANY))


async def hold_lease(connection: AsyncConnection, name: str, holder: str, lease_s: float) -> bool:
    """Acquire a free lease, or renew the holder's lease.

    Returns:
        Whether the holder has the lease now.
    """
    values = {"name": name, "holder": holder, "lease_s": lease_s}
    return await connection.scalar(_taken_lease(), values) == holder


async def lock_lease(connection: AsyncConnection, name: str) -> None:
    """Lock the row of a lease until the transaction ends, whoever holds the lease."""
    await connection.execute(select(leases.c.name).where(leases.c.name == name).with_for_update())


@cache  # cached, because building the statement every second costs more than its execution
def _taken_lease() -> ReturningInsert[Any]:
    """Return the statement that acquires or renews a lease.

    Its parameters are `name`, `holder` and `lease_s`.
    """
    now = func.clock_timestamp()
    lease_s = bindparam("lease_s", type_=Float)
    expires_at = now + func.make_interval(0, 0, 0, 0, 0, 0, lease_s)
    taken = insert(leases).values(
        name=bindparam("name"), holder=bindparam("holder"), expires_at=expires_at
    )
    new = taken.excluded
    is_free = or_(leases.c.holder == new.holder, leases.c.expires_at < now)
    changed = {"holder": new.holder, "expires_at": new.expires_at}
    query = taken.on_conflict_do_update(index_elements=["name"], set_=changed, where=is_free)
    return query.returning(leases.c.holder)


async def due(
    connection: AsyncConnection,
    period: Period,
    interval_s: float,
    count_max: int,
    failed: Mapping[str, int],
) -> list[Due]:
    """Return the budgets of a period whose usage was never read or was read too long ago.

    Budgets that were never tried come first, then the budgets that were tried longest ago.

    Args:
        connection: Connection of a transaction.
        period: Period of the budgets.
        interval_s: Age in seconds from which a reading is old.
        count_max: Largest number of returned budgets.
        failed: Times of failed readings in Unix milliseconds, by budget id. In the order, a failed
            reading counts as an attempt, so that other budgets are read first.
    """
    states, now_ms = budget_states.c, await clock_ms(connection)
    moments = cast([moment(it) for it in failed.values()], ARRAY(DateTime(timezone=True)))
    asked = func.unnest(cast(list(failed), ARRAY(Text)), moments)
    tried = asked.table_valued(column("id", Text), column("at", DateTime(timezone=True)))
    tried = tried.render_derived(name="tried")
    # the later of the time of the stored usage and the time of the failed reading, if both exist
    tried_at = func.greatest(states.looked_at, tried.c.at)
    is_due = or_(
        states.budget_id.is_(None),
        states.ends_at_unix_ms <= now_ms,
        states.looked_at <= moment(now_ms - round(interval_s * 1000)),
    )
    query = (
        select(budgets.c.id, budgets.c.tenant_id, budgets.c.model_id, budgets.c.period)
        .outerjoin(budget_states, _HAS_STATE)
        .outerjoin(tried, tried.c.id == budgets.c.id)
        .where(budgets.c.period == str(period), is_due)
        .order_by(tried_at.nulls_first(), budgets.c.id)
        .limit(count_max)
    )
    found = (await connection.execute(query)).all()
    return [Due(one, tenant, model_id, Period(period)) for one, tenant, model_id, period in found]


async def lock(connection: AsyncConnection, tenant_ids: Iterable[str]) -> list[Values]:
    """Return the budgets of tenants with their states, locked until the transaction ends.

    The states are read by a second statement, because the statement that waits for the locks would
    read the states from before the wait.
    """
    held = select(budgets.c.id).where(budgets.c.tenant_id.in_(sorted(set(tenant_ids))))
    held = held.order_by(budgets.c.id).with_for_update()
    ids = (await connection.scalars(held)).all()
    query = with_states().where(budgets.c.id.in_(ids)).order_by(budgets.c.id)
    rows = (await connection.execute(query)).mappings()
    return [{str(name): value for name, value in row.items()} for row in rows]


async def write_readings(
    connection: AsyncConnection, readings: Sequence[Reading]
) -> list[BudgetChange]:
    """Store readings of budgets and the resulting stops, and return the changes of state.

    A reading of a budget that was changed or deleted after `due` is ignored.
    """
    by_id = {reading.due.id: reading for reading in readings}
    tenants = {reading.due.tenant_id for reading in readings}
    rows = await lock(connection, tenants)
    changes: list[BudgetChange] = []
    written: list[Values] = []
    for row in rows:
        reading = by_id.get(row["id"])
        if reading is None or not _fits(row, reading):
            continue
        change = take(row, reading)
        written.append({column.name: row[column.name] for column in budget_states.c})
        changes += [] if change is None else [change]
    if written:
        made = insert(budget_states).values(written)
        new = {c.name: made.excluded[c.name] for c in budget_states.c if not c.primary_key}
        await connection.execute(made.on_conflict_do_update(index_elements=["budget_id"], set_=new))
    await write_stops(connection, tenants, rows)
    return changes


def _fits(row: Values, reading: Reading) -> bool:
    """Return whether the budget is unchanged, and the reading is newer than the stored reading."""
    asked = (reading.due.model_id, str(reading.due.period))
    if asked != (row["model_id"], row["period"]):
        return False
    looked_at = row["looked_at"]
    return looked_at is None or looked_at <= moment(reading.looked_at_ms)


def take(row: Values, reading: Reading) -> BudgetChange | None:
    """Apply a reading to a row of `with_states`, and return the change of state, if any."""
    usage, span, kept = reading.usage, reading.span, budget_of(row)
    state, before = kept.state(usage), row["state"]
    is_new_period = row["starts_at_unix_ms"] != span.start_ms
    reached = 0 if before is None or is_new_period else reached_percent(row)
    is_other = str(state) != before or _is_more(kept, usage, reached)
    looked_at = moment(reading.looked_at_ms)
    row |= {name: getattr(usage, name) for name in _SUMS}
    row |= {
        "budget_id": row["id"],
        "starts_at_unix_ms": span.start_ms,
        "ends_at_unix_ms": span.end_ms,
        "state": str(state),
        "since": looked_at if is_other or is_new_period else row["since"],
        "looked_at": looked_at,
        "ingested_until_unix_ms": reading.ingested_until_ms,
    }
    if not (is_other or (is_new_period and state is not State.OK)):
        return None
    told = (state, kept.reached_percent(usage), kept.used(usage))
    return BudgetChange(row["tenant_id"], row["name"], *told, row["amount"])


def reached_percent(row: Mapping[str, Any]) -> int:
    """Return the soft percent that a row of `with_states` has reached.

    The row must have a state.
    """
    return budget_of(row).reached_percent(usage_of(row))


def _is_more(budget: Budget, usage: Usage, reached: int) -> bool:
    """Return whether a budget that is not exhausted has reached a higher soft percent."""
    is_soft = budget.state(usage) is State.SOFT
    return is_soft and budget.reached_percent(usage) > reached


async def apply_usage(connection: AsyncConnection, row: Values, reached: int) -> None:
    """Apply the stored usage to a budget that was just written.

    Args:
        connection: Connection whose transaction holds the budget's lock.
        row: Row of `with_states` in its new form, which must have a state.
        reached: Soft percent that the budget had reached before the write.
    """
    budget, usage = budget_of(row), usage_of(row)
    state = str(budget.state(usage))
    if state == row["state"] and not _is_more(budget, usage, reached):
        return
    row |= {"state": state, "since": moment(await clock_ms(connection))}
    query = budget_states.update().where(budget_states.c.budget_id == row["id"])
    await connection.execute(query.values(state=state, since=row["since"]))


async def write_stops(
    connection: AsyncConnection, tenant_ids: Iterable[str], rows: Iterable[Values]
) -> None:
    """Store the stops of tenants for gateways.

    Args:
        connection: Connection whose transaction holds the locks of all budgets of these tenants.
        tenant_ids: Tenants whose stops are written.
        rows: All budgets of these tenants, in the present state.
    """
    now_ms = await clock_ms(connection)
    of_tenant: dict[str, list[BudgetStanding]] = {tenant_id: [] for tenant_id in tenant_ids}
    for row in rows:
        if row["state"] is not None:
            of_tenant[row["tenant_id"]].append(_standing(row))
    told = {tenant_id: model.stops(known, now_ms) for tenant_id, known in of_tenant.items()}
    if stopped := [{"id": key, "stops": stops} for key, stops in sorted(told.items()) if stops]:
        made = insert(budget_stops).values(stopped)
        stops = made.excluded.stops
        is_news = budget_stops.c.stops != stops
        await connection.execute(
            made.on_conflict_do_update(index_elements=["id"], set_={"stops": stops}, where=is_news)
        )
    free = sorted(key for key, stops in told.items() if not stops)
    await connection.execute(delete(budget_stops).where(budget_stops.c.id.in_(free)))


async def summary(connection: AsyncConnection) -> Summary:
    """Return the summary of all budgets for metrics."""
    now_ms = await clock_ms(connection)
    looked_at = func.coalesce(budget_states.c.looked_at, budgets.c.created_at)
    every = (
        select(
            shown_state(now_ms).label("state"),
            looked_at.label("looked_at"),
            (budget_states.c.since > moment(now_ms) - _RECENT).label("is_recent"),
        )
        .select_from(budgets.outerjoin(budget_states, _HAS_STATE))
        .subquery()
    )
    recent = func.count().filter(every.c.is_recent)
    query = select(every.c.state, func.count(), recent, func.min(every.c.looked_at))
    found = (await connection.execute(query.group_by(every.c.state))).all()
    oldest = min((looked_at.timestamp() for *_, looked_at in found), default=now_ms / 1000)
    return Summary(
        {state: count for state, count, _, _ in found},
        {state: count for state, _, count, _ in found},
        max(0.0, now_ms / 1000 - oldest),
    )


def budget_of(row: Mapping[str, Any]) -> Budget:
    """Return the budget in a row."""
    return Budget(
        model.Unit(row["unit"]),
        row["amount"],
        Period(row["period"]),
        row["cached_percent"],
        tuple(row["soft_percents"]),
    )


def usage_of(row: Mapping[str, Any]) -> Usage:
    """Return the usage in a row of `with_states`. The row must have a state."""
    return Usage(*(row[name] for name in _SUMS))


def moment(unix_ms: int) -> datetime:
    """Return a Unix time in milliseconds as a datetime for PostgreSQL."""
    return datetime.fromtimestamp(unix_ms / 1000, UTC)


def _standing(row: Values) -> BudgetStanding:
    return BudgetStanding(
        row["name"],
        row["model_id"],
        budget_of(row),
        OnExhausted(row["on_exhausted"]),
        State(row["state"]),
        BudgetSpan(row["starts_at_unix_ms"], row["ends_at_unix_ms"]),
    )
