"""A backup of a control plane that serves, and the way back to it."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
import pytest_asyncio

from cli.backups import BackupError, back_up, read_backup, restore
from tests.integration.artifact_site import Site, artifact_site, push
from tests.support.random_models import write_random_model

pytestmark = pytest.mark.real


def _unseen(_done: int, _all: int) -> None:
    pass


@pytest_asyncio.fixture
async def site(database_url, tmp_path, start_control_plane) -> AsyncIterator[Site]:
    async with artifact_site(start_control_plane, database_url, tmp_path) as found:
        yield found


@pytest.fixture
def urls(database_url, tmp_path) -> tuple[str, str]:
    return database_url, f"file://{tmp_path}/store"


@pytest.fixture
def push_base(site: Site, tmp_path: Path, eventually) -> Callable[[], Awaitable[str]]:
    """Make a base an artifact; return its digest."""

    async def push_base() -> str:
        write_random_model(tmp_path / "base")
        pushed = await push(site.admin, tmp_path / "base")
        assert pushed.is_success, pushed.text
        digest = pushed.json()["digest"]

        async def is_ready() -> bool:
            return (await site.admin.get(f"/v1/artifacts/{digest}")).status_code == 200

        await eventually(is_ready, "it is an artifact")
        return digest

    return push_base


async def tenants_of(site: Site) -> set[str]:
    """The tenants; empty while the control plane looks for its database."""
    try:
        answer = await site.admin.get("/v1/tenants")
    except httpx.HTTPError:
        return set()
    found: list[dict[str, Any]] = answer.json().get("data", [])
    return {one["id"] for one in found}


async def test_a_restore_brings_back_all_while_the_control_plane_serves(
    site: Site, urls: tuple[str, str], tmp_path: Path, push_base, eventually
) -> None:
    backup = tmp_path / "backup"
    digest = await push_base()
    await site.plane.put("tiers/t")
    await site.plane.put("tenants/before", tier_id="t")
    made = await back_up(*urls, backup, _unseen)
    assert (made.chunks, made.lost) == (len(site.blobs()), [])
    assert (backup.stat().st_mode & 0o777, read_backup(backup)) == (0o700, made)
    assert (backup / "database.dump").stat().st_mode & 0o077 == 0

    await site.plane.put("tenants/later", tier_id="t")
    shutil.rmtree(site.store / "chunks")
    kept = await restore(backup, *urls, _unseen)

    async def is_back() -> bool:
        return await tenants_of(site) == {"before"}

    await eventually(is_back, "the control plane has the database of the backup", timeout_s=30)
    assert len(site.blobs()) == made.chunks
    manifest = (await site.admin.get(f"/v1/artifacts/{digest}/manifest")).json()
    for sha256 in (it for file in manifest["files"] for it in file["chunks"]):
        assert (await site.admin.get(f"/v1/artifacts/chunks/{sha256}")).status_code == 200
    await site.plane.put("tenants/after", tier_id="t")
    connection = await asyncpg.connect(_named(urls[0], kept))
    try:
        rows = await connection.fetch("SELECT id FROM tenants")
    finally:
        await connection.close()
    assert {row["id"] for row in rows} == {"before", "later"}, "what was there is kept"


async def test_a_backup_that_is_not_whole_changes_nothing(
    site: Site, urls: tuple[str, str], tmp_path: Path, push_base
) -> None:
    backup = tmp_path / "backup"
    with pytest.raises(BackupError, match="is no whole backup"):
        await restore(backup, *urls, _unseen)
    await push_base()
    made = await back_up(*urls, backup, _unseen)
    await site.plane.put("tiers/later")
    chunk = next(path for path in (backup / "chunks").rglob("*") if path.is_file())
    chunk.write_bytes(b"rotten")
    with pytest.raises(BackupError, match=f"lacks chunk {chunk.name}"):
        await restore(backup, *urls, _unseen)
    assert (await site.admin.get("/v1/tiers/later")).status_code == 200
    again = await back_up(*urls, backup, _unseen)
    assert again.chunks == made.chunks
    assert chunk.read_bytes() != b"rotten", "a renewed backup mends what has another size"


async def test_a_backup_lists_the_chunks_that_the_store_has_lost(
    site: Site, urls: tuple[str, str], tmp_path: Path, push_base
) -> None:
    await push_base()
    lost = next(path for path in (site.store / "chunks").rglob("*") if path.is_file())
    lost.unlink()
    assert (await back_up(*urls, tmp_path / "backup", _unseen)).lost == [lost.name]


def _named(database: str, name: str) -> str:
    head, _, query = database.replace("+asyncpg", "").partition("?")
    return f"{head.rpartition('/')[0]}/{name}?{query}"
