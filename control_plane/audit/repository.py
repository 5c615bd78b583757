"""Writes and reads audit rows and stored answers, in the caller's transaction."""

from dataclasses import asdict
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.audit.model import KEPT_H, KeptAnswer, in_progress, lock_number
from control_plane.audit.tables import answers, audit

_KEPT = timedelta(hours=KEPT_H)
_PRUNED_MAX = 10_000  # Largest number of rows per deletion. One deletion lasts about 100 ms.


class AuditRow(NamedTuple):
    """A change of an object by a write, or a write that was refused.

    Attributes:
        id: Id of the row, which sorts by time.
        actor_id: Id of the admin key, or `bootstrap`.
        actor_role: Role of the key at the time of the write.
        action: Kind of change, such as `create`, `replace` or `delete`.
        kind: Kind of the object, as in the path.
        object_id: Id of the object. For a refused write, it is the id in the request.
        outcome: `done`, or the code of the refusal.
        detail: Reason of the refusal.
        before: Object before the write in the form of a GET, or None if it did not exist.
        after: Object after the write in the form of a GET, or None if it does not exist.
        request_id: Id of the request, which is also in the answer and in the logs.
        idempotency_key: Idempotency key of the request, or empty without a key.
        actor_name: Name of the key or the person, for display.
    """

    id: str
    actor_id: str
    actor_role: str
    action: str
    kind: str
    object_id: str
    outcome: str
    detail: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str
    idempotency_key: str
    actor_name: str = ""


async def record(connection: AsyncConnection, rows: list[AuditRow]) -> None:
    """Add rows."""
    await connection.execute(insert(audit), [row._asdict() for row in rows])


async def is_recorded(connection: AsyncConnection, row: AuditRow) -> bool:
    """Wait for a transaction that may still commit a row, and return whether the row exists.

    A transaction whose connection broke may still commit. A second insertion of the row waits for
    the end of that transaction, and fails if the row was committed.
    """
    savepoint = await connection.begin_nested()
    again = insert(audit).values(row._asdict()).on_conflict_do_nothing()
    is_new = (await connection.execute(again)).rowcount == 1
    await savepoint.rollback()
    return not is_new


async def take_key(
    connection: AsyncConnection, actor_id: str, key: str, *, may_wait: bool
) -> KeptAnswer | None:
    """Lock an idempotency key until the transaction ends, and return the key's stored answer.

    Args:
        connection: Connection of the transaction of the write.
        actor_id: Id of the admin key that sent the idempotency key.
        key: Idempotency key.
        may_wait: Whether to wait for a transaction that has locked the key. Only a retry after a
            broken connection waits.

    Raises:
        PlatformError: 409 if another request with this key is in progress.
    """
    number = lock_number(actor_id, key)
    if may_wait:
        await connection.execute(select(func.pg_advisory_xact_lock(number)))
    elif not await connection.scalar(select(func.pg_try_advisory_xact_lock(number))):
        raise in_progress()
    t = answers.c
    is_fresh = t.created_at > func.now() - _KEPT
    query = select(t.request_sha256, t.status, t.body, t.is_secret, t.object_id)
    found = await connection.execute(query.where(t.actor_id == actor_id, t.key == key, is_fresh))
    row = found.first()
    return None if row is None else KeptAnswer(*row)


async def keep_answer(
    connection: AsyncConnection, actor_id: str, key: str, answer: KeptAnswer
) -> None:
    """Store an answer under a key that `take_key` has locked. An expired answer is replaced."""
    values = asdict(answer) | {"created_at": func.now()}
    query = insert(answers).values(actor_id=actor_id, key=key, **values)
    await connection.execute(
        query.on_conflict_do_update(index_elements=["actor_id", "key"], set_=values)
    )


async def prune_answers(connection: AsyncConnection) -> None:
    """Delete the stored answers that have expired."""
    await connection.execute(delete(answers).where(answers.c.created_at < func.now() - _KEPT))


async def prune_audit(connection: AsyncConnection, *, kept_days: int) -> None:
    """Delete a bounded number of the oldest rows that are older than `kept_days`."""
    t = audit.c
    is_old = t.at < func.now() - timedelta(days=kept_days)
    oldest = select(t.id).where(is_old).order_by(t.at).limit(_PRUNED_MAX)
    await connection.execute(delete(audit).where(t.id.in_(oldest)))
