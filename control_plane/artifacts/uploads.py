"""Reads and writes uploads in PostgreSQL, in the caller's transactions.

A transaction that adds a reference to a chunk first updates the chunk's time of use, because a
recently used chunk is never removed (`control_plane.artifacts.garbage`).
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Integer,
    Text,
    and_,
    cast,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from control_plane.artifacts.model import LIVE_STATES, UploadState, pause_after
from control_plane.artifacts.tables import (
    artifact_chunks,
    artifact_grants,
    artifact_upload_chunks,
    artifact_uploads,
    artifacts,
    chunks,
)
from sluice.ids import new_id
from sluice.manifests import Manifest

_ROWS_MAX = 20_000  # Largest number of rows per statement. A statement may run for 5 s.
_WRONG_SHOWN = 8
_SHOWN = tuple(
    column for column in artifact_uploads.c if column.name not in {"manifest", "signatures"}
)


@dataclass(frozen=True, slots=True)
class NewUpload:
    """An upload or import that is to be created.

    Attributes:
        tenant_id: Tenant that will own the artifact, or None if every tenant may see it.
        kind: Kind of the artifact, `adapter` or `base`.
        base_digest: Digest of an adapter's base, or empty for a base.
        source: URI of an import, or empty for an upload.
        signatures: Signatures in base64, by the key's id.
    """

    tenant_id: str | None
    kind: str
    base_digest: str
    source: str
    signatures: dict[str, str]


async def find_live(
    connection: AsyncConnection, new: NewUpload, manifest: Manifest | None
) -> dict[str, Any] | None:
    """Return the live upload of the same content with its row locked, or None if there is none.

    Two imports are equal if their sources are equal, even before their manifests are known.
    """
    table = artifact_uploads.c
    is_same = table.source != "" if manifest is None else table.manifest_sha256 == manifest.sha256
    query = (
        select(artifact_uploads)
        .where(
            table.tenant_id.is_not_distinct_from(new.tenant_id),
            is_same,
            table.kind == new.kind,
            table.base_digest == new.base_digest,
            table.source == new.source,
            table.state.in_(LIVE_STATES),
        )
        .with_for_update(of=artifact_uploads)
    )
    return _row((await connection.execute(query)).mappings().first())


async def held_bytes(connection: AsyncConnection, tenant_id: str) -> tuple[int, int]:
    """Return the bytes of a tenant's artifacts and uploads, and the number of its uploads."""
    held = (
        select(func.coalesce(func.sum(artifacts.c.size_bytes), 0))
        .join(artifact_grants, artifact_grants.c.digest == artifacts.c.digest)
        .where(artifact_grants.c.tenant_id == tenant_id)
    )
    live = select(func.coalesce(func.sum(artifact_uploads.c.size_bytes), 0), func.count()).where(
        artifact_uploads.c.tenant_id == tenant_id, artifact_uploads.c.state.in_(LIVE_STATES)
    )
    on_its_way, count = (await connection.execute(live)).one()
    return int(await connection.scalar(held) or 0) + int(on_its_way), int(count)


async def create(
    connection: AsyncConnection, new: NewUpload, manifest: Manifest | None
) -> dict[str, Any]:
    """Create an upload, or an import if there is no manifest yet, and return its row."""
    state = UploadState.IMPORTING if manifest is None else UploadState.UPLOADING
    values = {
        "id": new_id("upload"),
        "tenant_id": new.tenant_id,
        "kind": new.kind,
        "base_digest": new.base_digest,
        "source": new.source,
        "signatures": new.signatures,
        "state": state,
    }
    query = insert(artifact_uploads).values(values).returning(artifact_uploads)
    row = _row((await connection.execute(query)).mappings().one())
    assert row is not None, "an insert returns its row"
    if manifest is not None:
        await set_manifest(connection, row["id"], new.tenant_id, manifest)
        row |= {"digest": manifest.digest, "size_bytes": manifest.size_bytes}
    return row


async def set_manifest(
    connection: AsyncConnection, upload_id: str, tenant_id: str | None, manifest: Manifest
) -> None:
    """Store the manifest of an upload.

    Chunks of artifacts that the upload's tenant may see count as present. Chunks of other artifacts
    count as missing, because the tenant must first prove that it has their bytes.
    """
    await connection.execute(
        update(artifact_uploads)
        .where(artifact_uploads.c.id == upload_id)
        .values(
            digest=manifest.digest,
            size_bytes=manifest.size_bytes,
            manifest=manifest.document(),
            manifest_sha256=manifest.sha256,
            touched_at=func.now(),
        )
    )
    known = delete(artifact_upload_chunks).where(artifact_upload_chunks.c.upload_id == upload_id)
    await connection.execute(known)
    held = manifest.chunks()
    names, sizes = list(held), list(held.values())
    for start in range(0, len(names), _ROWS_MAX):
        part = slice(start, start + _ROWS_MAX)
        rows = select(
            literal(upload_id),
            func.unnest(cast(names[part], ARRAY(Text))),
            func.unnest(cast(sizes[part], ARRAY(Integer))),
        )
        columns = ["upload_id", "sha256", "size_bytes"]
        await connection.execute(insert(artifact_upload_chunks).from_select(columns, rows))
    seen = (
        select(artifact_chunks.c.sha256)
        .join(artifact_upload_chunks, artifact_upload_chunks.c.sha256 == artifact_chunks.c.sha256)
        .join(artifacts, artifacts.c.digest == artifact_chunks.c.digest)
        .where(
            artifact_upload_chunks.c.upload_id == upload_id,
            artifacts.c.retired_at.is_(None),
            granted(tenant_id),
        )
    )
    touched = (
        update(chunks)
        .where(chunks.c.sha256.in_(seen), chunks.c.doomed_at.is_(None))
        .values(used_at=func.now())
        .returning(chunks.c.sha256)
        .cte("touched")
    )
    await connection.execute(
        update(artifact_upload_chunks)
        .where(
            artifact_upload_chunks.c.upload_id == upload_id,
            artifact_upload_chunks.c.sha256.in_(select(touched.c.sha256)),
        )
        .values(is_present=True)
        .add_cte(touched)
    )


def granted(tenant_id: str | None) -> ColumnElement[bool]:
    """Return the SQL condition that a tenant may see an artifact. None means every tenant."""
    who = artifact_grants.c.tenant_id
    is_seen = who.is_(None) if tenant_id is None else or_(who.is_(None), who == tenant_id)
    return exists().where(artifact_grants.c.digest == artifacts.c.digest, is_seen)


async def get(
    connection: AsyncConnection, upload_id: str, *, is_locked: bool = False
) -> dict[str, Any] | None:
    """Return an upload without its manifest, or None if the upload does not exist."""
    query = select(*_SHOWN).where(artifact_uploads.c.id == upload_id)
    if is_locked:
        query = query.with_for_update()
    return _row((await connection.execute(query)).mappings().first())


async def missing(connection: AsyncConnection, upload_id: str) -> list[dict[str, Any]]:
    """Return the SHA-256 and the size of the chunks that an upload lacks."""
    table = artifact_upload_chunks.c
    query = (
        select(table.sha256, table.size_bytes)
        .where(table.upload_id == upload_id, table.is_present.is_(False))
        .order_by(table.sha256)
    )
    return [dict(row) for row in (await connection.execute(query)).mappings()]


async def wrong_sizes(connection: AsyncConnection, upload_id: str) -> list[str]:
    """Return the present chunks whose size differs from the manifest."""
    table = artifact_upload_chunks.c
    query = (
        select(table.sha256, table.size_bytes, chunks.c.size_bytes)
        .join(chunks, chunks.c.sha256 == table.sha256)
        .where(
            table.upload_id == upload_id,
            table.is_present,
            table.size_bytes != chunks.c.size_bytes,
        )
        .order_by(table.sha256)
        .limit(_WRONG_SHOWN)
    )
    return [
        f"chunk {sha256} has {size} bytes, not {claimed}: make the manifest anew"
        for sha256, claimed, size in await connection.execute(query)
    ]


async def chunk_size(connection: AsyncConnection, upload_id: str, sha256: str) -> int | None:
    """Return the size of an upload's chunk in bytes, or None if the upload has no such chunk."""
    table = artifact_upload_chunks.c
    query = select(table.size_bytes).where(table.upload_id == upload_id, table.sha256 == sha256)
    return await connection.scalar(query)


async def reserve(connection: AsyncConnection, sha256: str, size_bytes: int) -> bool:
    """Reserve a chunk before it is stored, and return whether the reservation succeeded.

    While the chunk is being deleted, the result is false, and a retry may succeed.
    """
    query = insert(chunks).values(sha256=sha256, size_bytes=size_bytes)
    query = query.on_conflict_do_update(
        index_elements=["sha256"],
        set_={"used_at": func.now()},
        where=chunks.c.doomed_at.is_(None),
    )
    return (await connection.execute(query)).rowcount == 1


async def have(connection: AsyncConnection, upload_id: str, sha256: str) -> bool:
    """Record that an upload's chunk is stored. The result is false if the chunk was deleted."""
    touched = (
        update(chunks)
        .where(chunks.c.sha256 == sha256, chunks.c.doomed_at.is_(None))
        .values(used_at=func.now())
    )
    if not (await connection.execute(touched)).rowcount:
        return False
    table = artifact_upload_chunks.c
    await connection.execute(
        update(artifact_upload_chunks)
        .where(table.upload_id == upload_id, table.sha256 == sha256)
        .values(is_present=True)
    )
    await connection.execute(
        update(artifact_uploads)
        .where(artifact_uploads.c.id == upload_id)
        .values(touched_at=func.now())
    )
    return True


async def sign(connection: AsyncConnection, upload_id: str, signatures: dict[str, str]) -> None:
    """Replace the signatures of an upload."""
    query = update(artifact_uploads).where(artifact_uploads.c.id == upload_id)
    await connection.execute(query.values(signatures=signatures))


async def submit(connection: AsyncConnection, upload_id: str) -> None:
    """Request the inspection of a complete upload."""
    await connection.execute(
        update(artifact_uploads)
        .where(artifact_uploads.c.id == upload_id)
        .values(state=UploadState.VALIDATING, touched_at=func.now(), claimed_until=None, attempts=0)
    )


async def cancel(connection: AsyncConnection, upload_id: str) -> None:
    """Cancel a live upload. A worker that has claimed the upload can no longer change it."""
    query = update(artifact_uploads).where(artifact_uploads.c.id == upload_id)
    ended = {"state": UploadState.CANCELLED, "touched_at": func.now(), "claim": ""}
    await connection.execute(query.values(ended))
    await _forget_chunks(connection, upload_id)


def waits_for_work(states: tuple[UploadState, ...]) -> ColumnElement[bool]:
    """Return the condition of an upload that waits for work, or whose lease has expired."""
    table = artifact_uploads.c
    is_free = or_(table.claimed_until.is_(None), table.claimed_until < func.now())
    return and_(table.state.in_(states), is_free)


async def claim(
    connection: AsyncConnection, states: tuple[UploadState, ...], lease: timedelta
) -> dict[str, Any] | None:
    """Claim an upload that waits for work, or whose worker's lease has expired.

    The claim counts as an attempt, even if the worker dies.
    """
    table = artifact_uploads.c
    waiting = (
        select(table.id)
        .where(waits_for_work(states))
        .order_by(table.touched_at)
        .limit(1)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    query = (
        update(artifact_uploads)
        .where(table.id == waiting)
        .values(
            claim=new_id("claim"), claimed_until=func.now() + lease, attempts=table.attempts + 1
        )
        .returning(artifact_uploads)
    )
    return _row((await connection.execute(query)).mappings().first())


def _is_claimed(upload: dict[str, Any]) -> ColumnElement[bool]:
    table = artifact_uploads.c
    return and_(table.id == upload["id"], table.claim == upload["claim"])


async def keep_claim(connection: AsyncConnection, upload: dict[str, Any], lease: timedelta) -> bool:
    """Renew a claim. The result is false if another worker has claimed the upload since."""
    query = update(artifact_uploads).where(_is_claimed(upload))
    done = await connection.execute(query.values(claimed_until=func.now() + lease))
    return done.rowcount == 1


async def postpone(connection: AsyncConnection, upload: dict[str, Any]) -> None:
    """Delay a claimed upload, longer after each attempt. Nothing changes if the claim was lost."""
    rests_until = func.now() + pause_after(upload["attempts"])
    query = update(artifact_uploads).where(_is_claimed(upload))
    await connection.execute(query.values(claim="", claimed_until=rests_until))


async def fetched(connection: AsyncConnection, upload: dict[str, Any], manifest: Manifest) -> bool:
    """Mark a claimed import as ready for inspection, because all its chunks are stored.

    Returns:
        False if the claim was lost.
    """
    state = {"state": UploadState.VALIDATING, "claim": "", "claimed_until": None, "attempts": 0}
    query = update(artifact_uploads).where(_is_claimed(upload)).values(state)
    if not (await connection.execute(query)).rowcount:
        return False
    await set_manifest(connection, upload["id"], upload["tenant_id"], manifest)
    every = artifact_upload_chunks.c.upload_id == upload["id"]
    await connection.execute(update(artifact_upload_chunks).where(every).values(is_present=True))
    return True


async def refuse(connection: AsyncConnection, upload: dict[str, Any], reasons: list[str]) -> bool:
    """End a claimed upload as refused. The result is false if the claim was lost."""
    query = update(artifact_uploads).where(_is_claimed(upload))
    ended = {"state": UploadState.REFUSED, "reasons": reasons, "touched_at": func.now()}
    if not (await connection.execute(query.values(ended | {"claim": ""}))).rowcount:
        return False
    await _forget_chunks(connection, upload["id"])
    return True


async def accept(connection: AsyncConnection, upload: dict[str, Any], manifest: Manifest) -> bool:
    """Accept a claimed upload, and make its artifact visible. False means a lost claim."""
    query = update(artifact_uploads).where(_is_claimed(upload))
    ended = {"state": UploadState.READY, "touched_at": func.now(), "claim": ""}
    if not (await connection.execute(query.values(ended))).rowcount:
        return False
    digest, base = manifest.digest, upload["base_digest"]
    of_upload = select(artifact_upload_chunks.c.sha256).where(
        artifact_upload_chunks.c.upload_id == upload["id"]
    )
    touched = update(chunks).where(chunks.c.sha256.in_(of_upload)).values(used_at=func.now())
    await connection.execute(touched)
    signed_by = sorted(upload["signatures"])
    bases = [base] if base else []
    made = insert(artifacts).values(
        digest=digest,
        kind=upload["kind"],
        base_digests=bases,
        size_bytes=manifest.size_bytes,
        file_count=len(manifest.files),
        manifest=manifest.document(),
    )
    known = artifacts.c.base_digests
    again = {"retired_at": None, "unreferenced_since": None, "kind": upload["kind"]}
    if base:
        again["base_digests"] = func.array_append(func.array_remove(known, base), base)
    await connection.execute(made.on_conflict_do_update(index_elements=["digest"], set_=again))
    await connection.execute(
        insert(artifact_grants)
        .values(
            id=new_id("grant"), digest=digest, tenant_id=upload["tenant_id"], signed_by=signed_by
        )
        .on_conflict_do_update(
            index_elements=["digest", "tenant_id"], set_={"signed_by": signed_by}
        )
    )
    pairs = of_upload.with_only_columns(literal(digest), artifact_upload_chunks.c.sha256)
    await connection.execute(
        insert(artifact_chunks).from_select(["digest", "sha256"], pairs).on_conflict_do_nothing()
    )
    await _forget_chunks(connection, upload["id"])
    return True


async def _forget_chunks(connection: AsyncConnection, upload_id: str) -> None:
    query = delete(artifact_upload_chunks).where(artifact_upload_chunks.c.upload_id == upload_id)
    await connection.execute(query)


def _row(found: Any) -> dict[str, Any] | None:
    return None if found is None else {str(name): value for name, value in found.items()}
