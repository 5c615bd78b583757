"""Reads and writes records of tenants and their items."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.records.tables import record_items, records
from control_plane.tables import content_keys
from sluice.wire.state.v1 import state_pb2 as wire

_ITEMS_AT_ONCE = 512  # largest number of items per statement


class NoRecordError(Exception):
    """The tenant has no record with this id."""


class TooManyItemsError(Exception):
    """A record would exceed its largest number of items."""


async def create(
    connection: AsyncConnection, record: wire.Record, items: Sequence[wire.RecordItem]
) -> None:
    """Store a record with its first items, unless the record exists."""
    row = {
        "id": record.id,
        "tenant_id": record.tenant_id,
        "kind": record.kind,
        "created_at_unix_ms": record.created_at_unix_ms,
        "touched_at_unix_ms": _now_ms(),
        "model": record.model,
        "metadata": dict(record.metadata),
        "content": record.content,
    }
    await connection.execute(insert(records).values(row).on_conflict_do_nothing())
    await _add(connection, record.id, items)


async def show(connection: AsyncConnection, tenant_id: str, record_id: str) -> wire.Record:
    """Return a record. Raises NoRecordError if the record does not exist."""
    found = await connection.execute(select(records).where(*_is(tenant_id, record_id)))
    return _record(_one(found.first()))


async def listed(
    connection: AsyncConnection, wanted: wire.ListRecordsRequest
) -> Sequence[wire.Record]:
    """Return at most `wanted.limit` records of a kind.

    Raises:
        NoRecordError: The record `after` does not exist.
    """
    t = records.c
    query = select(records).where(*_live(wanted.tenant_id), t.kind == wanted.kind)
    if wanted.model:
        query = query.where(t.model == wanted.model)
    if wanted.metadata:
        query = query.where(t.metadata.contains(dict(wanted.metadata)))
    if wanted.after:
        mark = select(t.number).where(t.id == wanted.after, t.tenant_id == wanted.tenant_id)
        number = _one((await connection.execute(mark)).first()).number
        query = query.where(t.number > number if wanted.is_ascending else t.number < number)
    order = t.number.asc() if wanted.is_ascending else t.number.desc()
    found = await connection.execute(query.order_by(order).limit(wanted.limit))
    return [_record(row) for row in found]


async def change(
    connection: AsyncConnection,
    tenant_id: str,
    record_id: str,
    metadata: Mapping[str, str],
    content: bytes,
) -> wire.Record:
    """Replace the content of a record, and return the record. Raises NoRecordError if missing."""
    values: dict[str, Any] = {"metadata": dict(metadata), "touched_at_unix_ms": _now_ms()}
    if content:
        values["content"] = content
    changed = await connection.execute(
        update(records).where(*_is(tenant_id, record_id)).values(values).returning(*records.columns)
    )
    return _record(_one(changed.first()))


async def remove(connection: AsyncConnection, tenant_id: str, record_id: str) -> None:
    """Delete a record with its items. Raises NoRecordError if the record does not exist."""
    gone = await connection.execute(delete(records).where(*_is(tenant_id, record_id)))
    if not gone.rowcount:
        raise NoRecordError


async def append(connection: AsyncConnection, wanted: wire.AppendItemsRequest) -> None:
    """Append items to a record. Raises NoRecordError or TooManyItemsError."""
    await _lock(connection, wanted.tenant_id, wanted.id)
    await _add(connection, wanted.id, wanted.items)
    if wanted.items_max:
        t = record_items.c
        count = select(func.count()).select_from(record_items).where(t.record_id == wanted.id)
        if (await connection.execute(count)).scalar_one() > wanted.items_max:
            raise TooManyItemsError


async def items(
    connection: AsyncConnection, wanted: wire.ListItemsRequest, limit: int
) -> Sequence[wire.RecordItem]:
    """Return at most `limit` items of a record.

    Raises:
        NoRecordError: The record, or its item `after`, does not exist.
    """
    t = record_items.c
    owned = select(records.c.id).where(*_is(wanted.tenant_id, wanted.id))
    _one((await connection.execute(owned)).first())
    query = select(record_items).where(t.record_id == wanted.id)
    if wanted.item_ids:
        query = query.where(t.id.in_(list(wanted.item_ids)))
    if wanted.after:
        mark = select(t.number).where(t.record_id == wanted.id, t.id == wanted.after)
        number = _one((await connection.execute(mark)).first()).number
        query = query.where(t.number > number if wanted.is_ascending else t.number < number)
    order = t.number.asc() if wanted.is_ascending else t.number.desc()
    found = await connection.execute(query.order_by(order).limit(limit))
    return [wire.RecordItem(id=row.id, content=row.content) for row in found]


async def remove_item(
    connection: AsyncConnection, tenant_id: str, record_id: str, item_id: str
) -> None:
    """Delete an item of a record. Raises NoRecordError if the record or the item does not exist."""
    await _lock(connection, tenant_id, record_id)
    t = record_items.c
    gone = await connection.execute(
        delete(record_items).where(t.record_id == record_id, t.id == item_id)
    )
    if not gone.rowcount:
        raise NoRecordError


def _live(tenant_id: str) -> tuple[ColumnElement[bool], ...]:
    """Return the SQL conditions for records of a tenant that were not erased."""
    k = content_keys.c
    erased = select(k.erased_at_unix_ms).where(k.id == tenant_id).scalar_subquery()
    t = records.c
    return t.tenant_id == tenant_id, t.created_at_unix_ms >= func.coalesce(erased, 0)


def _is(tenant_id: str, record_id: str) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions on one record."""
    return records.c.id == record_id, *_live(tenant_id)


async def _lock(connection: AsyncConnection, tenant_id: str, record_id: str) -> None:
    """Lock a record by an update, so that no concurrent transaction changes its items."""
    touched = await connection.execute(
        update(records).where(*_is(tenant_id, record_id)).values(touched_at_unix_ms=_now_ms())
    )
    if not touched.rowcount:
        raise NoRecordError


async def _add(
    connection: AsyncConnection, record_id: str, added: Collection[wire.RecordItem]
) -> None:
    rows = [{"record_id": record_id, "id": it.id, "content": it.content} for it in added]
    for start in range(0, len(rows), _ITEMS_AT_ONCE):
        some = rows[start : start + _ITEMS_AT_ONCE]
        await connection.execute(insert(record_items).values(some).on_conflict_do_nothing())


def _one(row: Row[Any] | None) -> Row[Any]:
    if row is None:
        raise NoRecordError
    return row


def _record(row: Row[Any]) -> wire.Record:
    return wire.Record(
        id=row.id,
        tenant_id=row.tenant_id,
        kind=row.kind,
        created_at_unix_ms=row.created_at_unix_ms,
        metadata=row.metadata,
        content=row.content,
        model=row.model,
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
