"""Reads and writes the ejections that routers have reported."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from sqlalchemy import ARRAY, and_, any_, cast, delete, func, select, update
from sqlalchemy import Text as Words
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane import tables
from control_plane.quality.askings import Asking
from control_plane.quality.clearance import are_all_right
from control_plane.quality.ejections import CLEARED, CONFIRMED, OPEN_MAX, Ejection
from control_plane.quality.tables import ejections
from sluice.detector.evidence import EvidenceKind

_KEPT = timedelta(days=7)
_IS_OPEN = and_(ejections.c.ended_at.is_(None), ejections.c.heard_at > func.now() - OPEN_MAX)
IS_ANY = select(ejections.c.replica_id).where(_IS_OPEN).exists()
_OPEN_EJECTIONS = (
    select(*(ejections.c[name] for name in Ejection.__dataclass_fields__))
    .where(_IS_OPEN)
    .order_by(ejections.c.heard_at, ejections.c.ejected_at_unix_ms)
)


async def add(connection: AsyncConnection, found: Sequence[Ejection]) -> list[Ejection]:
    """Store each ejection once if its router owns the replica's cell. Return the new ejections."""
    r, c = tables.replicas.c, tables.cells.c
    query = (
        select(r.id, c.id, c.epoch)
        .join(tables.cells, c.id == r.cell_id)
        .where(r.id == any_(cast([one.replica_id for one in found], ARRAY(Words))))
    )
    known = {tuple(row) for row in await connection.execute(query)}
    rows = [
        {name: getattr(one, name) for name in Ejection.__dataclass_fields__}
        for one in found
        if (one.replica_id, one.cell_id, one.epoch) in known
    ]
    if not rows:
        return []
    key = ejections.c.replica_id, ejections.c.ejected_at_unix_ms
    added = insert(ejections).values(rows).on_conflict_do_nothing().returning(*key)
    new = {tuple(row) for row in await connection.execute(added)}
    return [one for one in found if (one.replica_id, one.ejected_at_unix_ms) in new]


async def accused(connection: AsyncConnection) -> dict[str, Ejection]:
    """Return the newest open ejection of each replica."""
    rows = (await connection.execute(_OPEN_EJECTIONS)).mappings()
    return {
        row["replica_id"]: replace(Ejection(**row), evidence=EvidenceKind(row["evidence"]))
        for row in rows
    }


async def settle(
    connection: AsyncConnection,
    askings: Mapping[str, Asking],
    right: Mapping[str, Sequence[str]],
    quarantined: Iterable[str],
) -> list[str]:
    """Store the outcomes of ejections, and return the replicas that were cleared.

    Args:
        connection: Connection of the transaction that judges the answers.
        askings: All present askings.
        right: Result of `right_answers`, which is ids of askings by replica.
        quarantined: Replicas that were quarantined in this transaction.
    """
    await _end(connection, sorted(quarantined), CONFIRMED)
    e = ejections.c
    cleared: list[str] = []
    for replica_id, ids in sorted(right.items()):
        both = e.right_askings + cast(list(ids), ARRAY(Words))
        known = update(ejections).where(e.replica_id == replica_id, e.ended_at.is_(None))
        rows = await connection.execute(known.values(right_askings=both).returning(e.right_askings))
        if any(are_all_right(askings, row[0]) for row in rows):
            cleared.append(replica_id)
    await _end(connection, cleared, CLEARED)
    return cleared


async def _end(connection: AsyncConnection, replica_ids: Sequence[str], outcome: str) -> None:
    if replica_ids:
        of = ejections.c.replica_id == any_(cast(list(replica_ids), ARRAY(Words)))
        query = update(ejections).where(of, ejections.c.ended_at.is_(None))
        await connection.execute(query.values(ended_at=func.now(), outcome=outcome))


async def prune(connection: AsyncConnection) -> None:
    """Delete old ejections."""
    await connection.execute(delete(ejections).where(ejections.c.heard_at < func.now() - _KEPT))
