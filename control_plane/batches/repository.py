"""Reads and writes batches and their lines."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, and_, delete, exists, func, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.batches.lines import ParsedLine
from control_plane.batches.tables import batch_lines, batches
from control_plane.records.repository import NoRecordError
from sluice.wire.state.v1 import state_pb2 as wire

LEASE_MS = 30_000
_AT_ONCE = 500  # largest number of lines per statement
ENDING = ("finalizing", "cancelling", "expiring")
_OPEN = ("validating", "in_progress")
HAS_WORK = exists().where(batches.c.status.in_((*_OPEN, *ENDING)))
_ANY_LIVE = select(HAS_WORK)


class BatchEndedError(Exception):
    """A batch has ended, or is about to end."""


async def begin(connection: AsyncConnection, batch: wire.Batch) -> wire.Batch:
    """Store a batch unless it exists, and return the stored batch."""
    row = {
        "id": batch.id,
        "tenant_id": batch.tenant_id,
        "key_id": batch.key_id,
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "status": "validating",
        "created_at_unix_ms": batch.created_at_unix_ms,
        "expires_at_unix_ms": batch.expires_at_unix_ms,
        "taken_at_unix_ms": 0,
        "metadata": dict(batch.metadata),
        "reached_at_unix_ms": {},
        "total": 0,
        "completed": 0,
        "failed": 0,
        "output_file_id": "",
        "error_file_id": "",
        "errors": b"",
    }
    await connection.execute(insert(batches).values(row).on_conflict_do_nothing())
    return await show(connection, batch.tenant_id, batch.id)


async def show(connection: AsyncConnection, tenant_id: str, batch_id: str) -> wire.Batch:
    """Return a batch. Raises NoRecordError if the batch does not exist."""
    t = batches.c
    found = await connection.execute(
        select(batches).where(t.id == batch_id, t.tenant_id == tenant_id)
    )
    return _batch(_one(found.first()))


async def listed(
    connection: AsyncConnection, wanted: wire.ListRecordsRequest
) -> Sequence[wire.Batch]:
    """Return batches, the newest first. Raises NoRecordError if batch `after` does not exist."""
    t = batches.c
    query = select(batches).where(t.tenant_id == wanted.tenant_id)
    if wanted.after:
        mark = select(t.number).where(t.id == wanted.after, t.tenant_id == wanted.tenant_id)
        query = query.where(t.number < _one((await connection.execute(mark)).first()).number)
    found = await connection.execute(query.order_by(t.number.desc()).limit(wanted.limit))
    return [_batch(row) for row in found]


async def cancel(connection: AsyncConnection, tenant_id: str, batch_id: str) -> wire.Batch:
    """Begin to cancel a batch. The call can be repeated.

    Raises:
        NoRecordError: The batch does not exist.
        BatchEndedError: The batch has ended, or is about to end.
    """
    batch = await show(connection, tenant_id, batch_id)
    if batch.status in _OPEN:
        await move(connection, batch_id, _OPEN, "cancelling")
    elif batch.status not in {"cancelling", "cancelled"}:
        raise BatchEndedError
    return await show(connection, tenant_id, batch_id)


async def move(
    connection: AsyncConnection, batch_id: str, before: Sequence[str], status: str, **values: Any
) -> bool:
    """Set a batch's status if its present status is in `before`, and return whether it was set."""
    t = batches.c
    reached = func.jsonb_build_object(status, now_ms())
    moved = await connection.execute(
        update(batches)
        .where(t.id == batch_id, t.status.in_(before))
        .values(status=status, reached_at_unix_ms=t.reached_at_unix_ms.concat(reached), **values)
    )
    return bool(moved.rowcount)


async def with_status(
    connection: AsyncConnection, statuses: Sequence[str], most: int
) -> list[wire.Batch]:
    """Return batches with one of the given statuses, the oldest first."""
    t = batches.c
    found = await connection.execute(
        select(batches).where(t.status.in_(statuses)).order_by(t.number).limit(most)
    )
    return [_batch(row) for row in found]


async def has_live(connection: AsyncConnection) -> bool:
    """Return whether there is a batch that has not ended."""
    return bool(await connection.scalar(_ANY_LIVE))


async def expire(connection: AsyncConnection) -> None:
    """Begin to end the batches whose deadline has passed."""
    t = batches.c
    late = select(t.id).where(t.status.in_(_OPEN), t.expires_at_unix_ms <= now_ms())
    for batch_id in (await connection.execute(late)).scalars().all():
        await move(connection, batch_id, _OPEN, "expiring")


async def add_lines(
    connection: AsyncConnection, batch_id: str, lines: Sequence[ParsedLine]
) -> None:
    """Store lines. Lines that are already stored stay unchanged."""
    rows = [
        {
            "batch_id": batch_id,
            "number": it.number,
            "custom_id": it.custom_id,
            "body": it.body,
            "leased_by": "",
            "leased_until_unix_ms": 0,
        }
        for it in lines
    ]
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        await connection.execute(insert(batch_lines).values(some).on_conflict_do_nothing())


async def record(connection: AsyncConnection, results: Sequence[wire.LineResult]) -> None:
    """Store the results of lines. The first result of a line is never overwritten."""
    t, b = batch_lines.c, batches.c
    for result in results:
        name = result.name
        written = await connection.execute(
            update(batch_lines)
            .where(
                t.batch_id == name.batch_id,
                t.number == name.number,
                t.status.is_(None),
                t.batch_id.in_(select(b.id).where(b.status == "in_progress")),
            )
            .values(
                status=result.status,
                request_id=result.request_id,
                result=result.body,
                leased_until_unix_ms=0,
            )
        )
        if written.rowcount:
            is_good = result.status < 400
            counter = {"completed": b.completed + 1} if is_good else {"failed": b.failed + 1}
            await connection.execute(update(batches).where(b.id == name.batch_id).values(**counter))


async def give_back(
    connection: AsyncConnection, gateway_id: str, names: Sequence[wire.LineName]
) -> None:
    """Release a gateway's leases of lines, so that the lines can be leased again."""
    await connection.execute(
        update(batch_lines)
        .where(_named(names), batch_lines.c.leased_by == gateway_id)
        .values(leased_until_unix_ms=0, leased_by="")
    )


async def extend(
    connection: AsyncConnection, gateway_id: str, names: Sequence[wire.LineName]
) -> list[wire.LineName]:
    """Renew a gateway's leases of lines, and return the lines whose lease has been lost."""
    t, b = batch_lines.c, batches.c
    mine = await connection.execute(
        update(batch_lines)
        .where(
            _named(names),
            t.leased_by == gateway_id,
            t.status.is_(None),
            t.batch_id.in_(select(b.id).where(b.status == "in_progress")),
        )
        .values(leased_until_unix_ms=now_ms() + LEASE_MS)
        .returning(t.batch_id, t.number)
    )
    kept = {(row.batch_id, row.number) for row in mine}
    return [it for it in names if (it.batch_id, it.number) not in kept]


async def take(connection: AsyncConnection, gateway_id: str, wanted: int) -> list[wire.BatchLine]:
    """Lease lines to a gateway, from the batch that has waited longest since its last lease."""
    t, b = batch_lines.c, batches.c
    at_ms = now_ms()
    is_free = and_(t.status.is_(None), t.leased_until_unix_ms <= at_ms)
    has_free = select(t.batch_id).where(t.batch_id == b.id, is_free).exists()
    chosen = await connection.execute(
        select(batches)
        .where(b.status == "in_progress", b.expires_at_unix_ms > at_ms, has_free)
        .order_by(b.taken_at_unix_ms)
        .limit(1)
        .with_for_update(skip_locked=True)
    )
    if (batch := chosen.first()) is None:
        return []
    await connection.execute(update(batches).where(b.id == batch.id).values(taken_at_unix_ms=at_ms))
    free = (
        select(t.number)
        .where(t.batch_id == batch.id, is_free)
        .order_by(t.number)
        .limit(wanted)
        .with_for_update(skip_locked=True)
    )
    taken = await connection.execute(
        update(batch_lines)
        .where(t.batch_id == batch.id, t.number.in_(free))
        .values(leased_by=gateway_id, leased_until_unix_ms=at_ms + LEASE_MS)
        .returning(t.number, t.body)
    )
    return [
        wire.BatchLine(
            name=wire.LineName(batch_id=batch.id, number=row.number),
            tenant_id=batch.tenant_id,
            key_id=batch.key_id,
            endpoint=batch.endpoint,
            body=row.body,
        )
        for row in sorted(taken, key=lambda row: row.number)
    ]


async def results(
    connection: AsyncConnection, batch_id: str, after: int, most: int
) -> Sequence[Any]:
    """Return lines with a number above `after`, at most `most`, in the order of numbers."""
    t = batch_lines.c
    columns = (t.number, t.custom_id, t.status, t.request_id, t.result)
    found = await connection.execute(
        select(*columns)
        .where(t.batch_id == batch_id, t.number > after)
        .order_by(t.number)
        .limit(most)
    )
    return found.all()


async def named_files(
    connection: AsyncConnection, batch_id: str, file_ids: Sequence[str]
) -> Sequence[str]:
    """Store ids for a batch's files unless the batch already has ids, and return the stored ids."""
    t = batches.c
    await connection.execute(
        update(batches)
        .where(t.id == batch_id, t.output_file_id == "", t.error_file_id == "")
        .values(output_file_id=file_ids[0], error_file_id=file_ids[1])
    )
    named = select(t.output_file_id, t.error_file_id).where(t.id == batch_id)
    row = _one((await connection.execute(named)).first())
    return row.output_file_id, row.error_file_id


async def finish_answered(connection: AsyncConnection) -> None:
    """Move the batches whose lines are all answered to status `finalizing`."""
    b = batches.c
    done = select(b.id).where(b.status == "in_progress", b.completed + b.failed >= b.total)
    for batch_id in (await connection.execute(done)).scalars().all():
        await move(connection, batch_id, ("in_progress",), "finalizing")


async def drop_lines(connection: AsyncConnection, batch_id: str) -> None:
    """Delete the lines of a batch whose output files are written."""
    await connection.execute(delete(batch_lines).where(batch_lines.c.batch_id == batch_id))


async def prune_batches(connection: AsyncConnection, *, kept_days: int) -> None:
    """Delete batches that were created more than `kept_days` ago."""
    before_ms = now_ms() - kept_days * 86_400_000
    await connection.execute(delete(batches).where(batches.c.created_at_unix_ms < before_ms))


def _named(names: Sequence[wire.LineName]) -> Any:
    t = batch_lines.c
    return tuple_(t.batch_id, t.number).in_([(it.batch_id, it.number) for it in names])


def _one(row: Any) -> Any:
    if row is None:
        raise NoRecordError
    return row


def _batch(row: Row[Any]) -> wire.Batch:
    reached: Mapping[str, int] = row.reached_at_unix_ms
    return wire.Batch(
        id=row.id,
        tenant_id=row.tenant_id,
        key_id=row.key_id,
        endpoint=row.endpoint,
        input_file_id=row.input_file_id,
        status=row.status,
        created_at_unix_ms=row.created_at_unix_ms,
        expires_at_unix_ms=row.expires_at_unix_ms,
        metadata=row.metadata,
        total=row.total,
        completed=row.completed,
        failed=row.failed,
        output_file_id=row.output_file_id,
        error_file_id=row.error_file_id,
        errors=row.errors,
        reached_at_unix_ms=reached,
    )


def now_ms() -> int:
    """Return the present Unix time in milliseconds."""
    return time.time_ns() // 1_000_000
