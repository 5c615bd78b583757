"""Reads and writes the keys of content, and deletes expired content in small transactions."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, delete, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.batches.tables import batches
from control_plane.content.model import KeySealer, renewed
from control_plane.records.tables import records
from control_plane.responses.tables import responses
from control_plane.tables import content_keys, tenants
from sluice.stored_content import CHAT_COMPLETION, CONVERSATION

_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
# time in milliseconds after an erasure, within which all erased rows are deleted
_ERASURE_MS = 7 * _DAY_MS
AT_ONCE = 500  # largest number of rows per transaction


class ContentBound(NamedTuple):
    """The bound of the age of a tenant's content.

    Attributes:
        tenant_id: Id of the tenant.
        before_unix_ms: Unix time in milliseconds. Content without a later write has expired. Zero
            means that only the platform's bound applies.
        erased_at_unix_ms: Unix time in milliseconds. Content that was created earlier has been
            erased. Zero means that there was no erasure.
    """

    tenant_id: str
    before_unix_ms: int
    erased_at_unix_ms: int


async def keys_of(connection: AsyncConnection, tenant_id: str) -> tuple[list[dict[str, Any]], int]:
    """Return the keys of a tenant, and the time of its last erasure."""
    query = select(content_keys).where(content_keys.c.id == tenant_id)
    row = (await connection.execute(query)).first()
    return ([], 0) if row is None else (list(row.keys), row.erased_at_unix_ms)


async def write_keys(
    connection: AsyncConnection,
    tenant_id: str,
    keys: Sequence[dict[str, Any]],
    erased_at_unix_ms: int,
) -> None:
    """Replace the keys of a tenant."""
    values = {"keys": list(keys), "erased_at_unix_ms": erased_at_unix_ms}
    await connection.execute(
        insert(content_keys)
        .values(id=tenant_id, **values)
        .on_conflict_do_update(index_elements=[content_keys.c.id], set_=values)
    )


async def renew_keys(connection: AsyncConnection, sealer: KeySealer) -> None:
    """Encrypt the keys of all tenants with the newest secret of the installation."""
    t = content_keys.c
    for row in (await connection.execute(select(content_keys).with_for_update())).all():
        keys = renewed(row.id, row.keys, sealer)
        if keys is not None:
            await connection.execute(update(content_keys).where(t.id == row.id).values(keys=keys))


async def bounds(connection: AsyncConnection) -> list[ContentBound]:
    """Return the bounds of the tenants whose bound differs from the platform's."""
    now_ms, t, k = now_unix_ms(), tenants.c, content_keys.c
    is_erased = k.erased_at_unix_ms > now_ms - _ERASURE_MS
    found = await connection.execute(
        select(t.id, t.retention_hours, k.erased_at_unix_ms)
        .outerjoin(content_keys, k.id == t.id)
        .where(or_(t.retention_hours > 0, is_erased))
    )
    return [
        ContentBound(
            row.id,
            now_ms - row.retention_hours * _HOUR_MS if row.retention_hours else 0,
            row.erased_at_unix_ms or 0,
        )
        for row in found
    ]


async def delete_responses(connection: AsyncConnection, bound: ContentBound) -> int:
    """Delete at most `AT_ONCE` expired responses of a tenant, and return their number."""
    t, before_ms = responses.c, max(bound.before_unix_ms, bound.erased_at_unix_ms)
    day = datetime.fromtimestamp(before_ms / 1000, UTC).date()
    return await _delete_responses(
        connection,
        (t.tenant_id == bound.tenant_id, t.day <= day, t.created_at_unix_ms < before_ms),
    )


async def delete_ownerless_responses(connection: AsyncConnection) -> int:
    """Delete at most `AT_ONCE` responses of deleted tenants, and return their number."""
    gone = responses.c.tenant_id.not_in(select(tenants.c.id))
    return await _delete_responses(connection, (gone,))


async def delete_records(connection: AsyncConnection, bound: ContentBound) -> int:
    """Delete at most `AT_ONCE` expired records of a tenant, and return their number."""
    t = records.c
    is_over: ColumnElement[bool] = t.created_at_unix_ms < bound.erased_at_unix_ms
    if bound.before_unix_ms:
        is_kept_texts = t.kind.in_((CONVERSATION, CHAT_COMPLETION))
        is_over = or_(is_over, is_kept_texts & (t.touched_at_unix_ms < bound.before_unix_ms))
    return await _delete_records(connection, (t.tenant_id == bound.tenant_id, is_over))


async def delete_old_records(connection: AsyncConnection, *, kept_days: int) -> int:
    """Delete at most `AT_ONCE` records last written over `kept_days` ago. Return their number."""
    before_ms = now_unix_ms() - kept_days * _DAY_MS
    return await _delete_records(connection, (records.c.touched_at_unix_ms < before_ms,))


async def delete_ownerless_records(connection: AsyncConnection) -> int:
    """Delete at most `AT_ONCE` records of deleted tenants, and return their number."""
    gone = records.c.tenant_id.not_in(select(tenants.c.id))
    return await _delete_records(connection, (gone,))


async def delete_batches(connection: AsyncConnection, bound: ContentBound) -> int:
    """Delete at most `AT_ONCE` erased batches of a tenant, and return their number."""
    t = batches.c
    is_over = (t.tenant_id == bound.tenant_id, t.created_at_unix_ms < bound.erased_at_unix_ms)
    found = await connection.execute(select(t.id).where(*is_over).limit(AT_ONCE))
    ids = list(found.scalars())
    if ids:
        await connection.execute(delete(batches).where(t.id.in_(ids)))
    return len(ids)


async def _delete_responses(
    connection: AsyncConnection, conditions: Sequence[ColumnElement[bool]]
) -> int:
    t = responses.c
    some = select(t.day, t.id).where(*conditions).limit(AT_ONCE)
    rows = (await connection.execute(some.with_for_update(skip_locked=True))).all()
    # Deletes by primary keys, because a condition on a subquery would scan whole partitions.
    if rows:
        keys = [(row.day, row.id) for row in rows]
        await connection.execute(delete(responses).where(tuple_(t.day, t.id).in_(keys)))
    return len(rows)


async def _delete_records(
    connection: AsyncConnection, conditions: Sequence[ColumnElement[bool]]
) -> int:
    some = select(records.c.id).where(*conditions).limit(AT_ONCE)
    ids = list((await connection.execute(some.with_for_update(skip_locked=True))).scalars())
    if ids:
        await connection.execute(delete(records).where(records.c.id.in_(ids)))
    return len(ids)


def now_unix_ms() -> int:
    """Return the time in Unix milliseconds."""
    return time.time_ns() // 1_000_000
