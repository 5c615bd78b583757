"""Reads and writes the table of responses, and its partitions."""

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta

from sqlalchemy import select, text, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.responses.tables import responses
from sluice.response_ids import created_unix_ms
from sluice.wire.state.v1 import state_pb2 as wire

# Advisory lock that serializes the creation and deletion of partitions. The number is arbitrary.
_LOCK = text("SELECT pg_advisory_xact_lock(7323021)")
_PARTITIONS = text(
    "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
    " WHERE i.inhparent = 'responses'::regclass"
)
_NAME = "responses_%Y%m%d"


def day_of(response_id: str) -> date:
    """Return the day on which a response was created, derived from its id."""
    return datetime.fromtimestamp(created_unix_ms(response_id) / 1000, UTC).date()


async def make_partitions(connection: AsyncConnection, days: Iterable[date]) -> None:
    """Create the missing partitions."""
    missing = {day.strftime(_NAME): day for day in days}
    names = set((await connection.execute(_PARTITIONS)).scalars())
    if missing.keys() <= names:
        return
    await connection.execute(_LOCK)
    names = set((await connection.execute(_PARTITIONS)).scalars())
    for name, day in missing.items():
        if name not in names:
            bounds = f"FOR VALUES FROM ('{day}') TO ('{day + timedelta(days=1)}')"
            await connection.execute(text(f"CREATE TABLE {name} PARTITION OF responses {bounds}"))


async def keep(connection: AsyncConnection, stored: Sequence[wire.StoredResponse]) -> None:
    """Store new responses. A response that exists or was deleted is not changed."""
    rows = [
        {
            "day": day_of(it.id),
            "id": it.id,
            "tenant_id": it.tenant_id,
            "created_at_unix_ms": it.created_at_unix_ms,
            "ancestors": list(it.ancestors),
            "input_items": it.input_items,
            "response": it.response,
            "prompt": it.prompt or None,
            "deltas": it.deltas or None,
        }
        for it in stored
    ]
    await make_partitions(connection, {day_of(it.id) for it in stored})
    await connection.execute(insert(responses).values(rows).on_conflict_do_nothing())


async def read(
    connection: AsyncConnection, tenant_id: str, ids: Collection[str]
) -> dict[str, wire.StoredResponse]:
    """Return a tenant's stored responses with the given ids, by id."""
    t = responses.c
    wanted = tuple_(t.day, t.id).in_([(day_of(it), it) for it in ids])
    found = await connection.execute(
        select(responses).where(wanted, t.tenant_id == tenant_id, t.response.is_not(None))
    )
    return {
        row.id: wire.StoredResponse(
            id=row.id,
            tenant_id=row.tenant_id,
            created_at_unix_ms=row.created_at_unix_ms,
            ancestors=row.ancestors,
            input_items=row.input_items,
            response=row.response,
            prompt=row.prompt or b"",
            deltas=row.deltas or b"",
        )
        for row in found
    }


async def forget(connection: AsyncConnection, tenant_id: str, response_id: str) -> bool:
    """Delete a response permanently, and return whether the response existed.

    A row without content remains, so that a later write of the response has no effect.
    """
    day = day_of(response_id)
    await make_partitions(connection, [day])
    t = responses.c
    existed = await connection.execute(
        select(t.id)
        .where(t.day == day, t.id == response_id, t.response.is_not(None))
        .with_for_update()
    )
    was_there = existed.first() is not None
    gone = insert(responses).values(
        day=day,
        id=response_id,
        tenant_id=tenant_id,
        created_at_unix_ms=created_unix_ms(response_id),
    )
    await connection.execute(
        gone.on_conflict_do_update(
            index_elements=[t.day, t.id],
            set_={
                **dict.fromkeys(("input_items", "response", "prompt", "deltas")),
                "ancestors": [],
            },
        )
    )
    return was_there


async def drop_partitions(connection: AsyncConnection, *, kept_days: int) -> None:
    """Drop the partitions of days that have expired."""
    first = (datetime.now(UTC).date() - timedelta(days=kept_days)).strftime(_NAME)
    if not any(name < first for name in (await connection.execute(_PARTITIONS)).scalars()):
        return
    await connection.execute(_LOCK)
    for name in (await connection.execute(_PARTITIONS)).scalars().all():
        if name < first:
            await connection.execute(text(f"DROP TABLE {name}"))
