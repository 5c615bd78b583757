"""What nobody needs goes from PostgreSQL and from the store; what anybody needs stays."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio

from control_plane.artifacts import sweep, uploads
from control_plane.artifacts.sweep import Graces, Sweeper
from control_plane.database import Database
from sluice import chunk_store
from sluice.artifacts import digest_directory
from sluice.chunk_store import Backend, ChunkStore, StoreDownError, awake_s, open_backend
from sluice.manifests import manifest_of_directory
from tests.integration.artifact_site import Site, artifact_site, begin, contents, push, send
from tests.support.random_models import write_random_adapter, write_random_model

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session")
async def site(database_url, tmp_path, start_control_plane) -> AsyncIterator[Site]:
    grace = {"CONTROL_PLANE__ARTIFACT_GRACE_S": "1"}
    async with artifact_site(start_control_plane, database_url, tmp_path, **grace) as found:
        yield found


def chunks_of(directory: Path) -> set[str]:
    return set(contents(directory, manifest_of_directory(directory)))


async def test_only_needed_artifacts_stay(site, tmp_path, eventually) -> None:
    base, kept, pinned, dropped = (tmp_path / n for n in ("base", "kept", "pinned", "dropped"))
    write_random_model(base)
    for seed, directory in enumerate((kept, pinned, dropped)):
        write_random_adapter(directory, base, rank=2, seed=seed)
    half = tmp_path / "half"
    write_random_model(half, seed=4, changes={"intermediate_size": 6000})
    digests = {path.name: digest_directory(path) for path in (base, kept, pinned, dropped)}
    admin, put = site.admin, site.plane.put
    assert (await push(admin, base)).is_success
    await put(f"bases/{digests['base']}", context_tokens_max=64)
    await put("pools/main", base_digest=digests["base"], engine="sim", replicas_wanted=0)
    acme = await site.publisher("acme")
    assert (await push(acme, kept, digests["base"])).is_success
    model = {"base_digest": digests["base"], "pool_id": "main"}
    await put("models/m", **model, adapter_digest=digests["kept"], release="1")
    assert (await push(acme, pinned, digests["base"])).is_success
    pin = f"/v1/artifacts/{digests['pinned']}/pin"
    assert (await acme.put(pin, json={"is_pinned": True})).status_code == 403
    assert (await admin.put(pin, json={"is_pinned": True})).json()["is_pinned"]
    assert (await push(acme, dropped, digests["base"])).is_success
    begun = (await begin(admin, half)).json()
    waiting = begun["missing"][0]["sha256"]
    await send(admin, begun, half, only=[waiting])

    async def is_gone() -> bool:
        return not chunks_of(dropped) & (site.blobs() - chunks_of(kept) - chunks_of(pinned))

    await eventually(is_gone, "what is dropped leaves the store")
    assert (await admin.get(f"/v1/artifacts/{digests['dropped']}")).status_code == 404
    needed = chunks_of(base) | chunks_of(kept) | chunks_of(pinned) | {waiting}
    assert site.blobs() == needed
    for name in ("base", "kept", "pinned"):
        assert (await admin.get(f"/v1/artifacts/{digests[name]}")).status_code == 200

    named = await acme.delete(f"/v1/artifacts/{digests['kept']}")
    assert (named.status_code, named.json()["code"]) == (409, "conflict")
    assert (await acme.delete(f"/v1/artifacts/{digests['base']}")).status_code in {403, 404, 409}
    assert (await acme.delete(f"/v1/artifacts/{digests['pinned']}")).status_code == 204
    assert (await acme.get(f"/v1/artifacts/{digests['pinned']}")).status_code == 404
    assert (await admin.get(f"/v1/artifacts/{digests['pinned']}")).status_code == 200

    again = await push(acme, dropped, digests["base"])
    assert again.status_code == 200, again.text
    assert (await push(admin, half)).is_success


async def test_uploads_and_sweeps_of_the_same_chunks(database_url, tmp_path) -> None:
    """Whatever an upload was told is present, is in the store, however the two meet."""
    write_random_model(tmp_path / "base")
    held = contents(tmp_path / "base", manifest_of_directory(tmp_path / "base"))
    sha256, content = next(iter(held.items()))
    database = Database(database_url)
    store = ChunkStore(open_backend(f"file://{tmp_path}/store"))
    sweeper = Sweeper(database, store, Graces.of(0.02))
    told = 0

    async def put(upload_id: str) -> bool:
        if not await database.run(lambda found: uploads.reserve(found, sha256, len(content))):
            return False
        await store.put(sha256, content)
        return await database.run(lambda found: uploads.have(found, upload_id, sha256))

    new = uploads.NewUpload(None, "base", "", "", {})
    manifest = manifest_of_directory(tmp_path / "base")
    try:
        for _ in range(25):
            upload = await database.run(lambda found: uploads.create(found, new, manifest))
            is_present, *_ = await asyncio.gather(
                put(upload["id"]), sweeper.sweep(), sweeper.sweep(), asyncio.sleep(0.03)
            )
            await sweeper.sweep()
            if is_present:
                told += 1
                assert await store.get(sha256) == content
            await database.run(lambda found, row=upload: _forget(found, row["id"]))
            await asyncio.sleep(0.03)
            await sweeper.sweep()
        assert told
    finally:
        store.close()
        await database.close()


async def test_a_sweeper_that_stood_still_deletes_nothing_that_was_put_since(
    database_url, tmp_path, monkeypatch
) -> None:
    write_random_model(tmp_path / "base")
    manifest = manifest_of_directory(tmp_path / "base")
    sha256, content = next(iter(contents(tmp_path / "base", manifest).items()))
    backend = open_backend(f"file://{tmp_path}/store")
    database, store, frozen = Database(database_url), ChunkStore(backend), FrozenStore(backend)
    graces = Graces.of(0)
    monkeypatch.setattr(sweep, "_ABANDONED", timedelta(0))

    async def put() -> bool:
        if not await database.run(lambda found: uploads.reserve(found, sha256, len(content))):
            return False
        await store.put(sha256, content)
        return True

    try:
        assert await put()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sweeps_in_vain(Sweeper(database, frozen, graces)))
            await frozen.stands_still.wait()
            assert not await put(), "it is doomed"
            assert (await Sweeper(database, store, graces).sweep()).chunks == 1
            assert await put()
            monkeypatch.setattr(chunk_store, "awake_s", lambda: awake_s() + 40.0)
            frozen.wakes_up.set()
        assert await store.get(sha256) == content
    finally:
        store.close()
        frozen.close()
        await database.close()


async def sweeps_in_vain(sweeper: Sweeper) -> None:
    with pytest.raises(StoreDownError):
        await sweeper.sweep()


class FrozenStore(ChunkStore):
    """Of a process that stands still before it deletes."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.stands_still, self.wakes_up = asyncio.Event(), asyncio.Event()

    async def delete(self, sha256: str, *, before_s: float) -> None:
        self.stands_still.set()
        await self.wakes_up.wait()
        await super().delete(sha256, before_s=before_s)


async def _forget(connection, upload_id: str) -> None:
    from control_plane.artifacts.tables import artifact_uploads

    await connection.execute(artifact_uploads.delete().where(artifact_uploads.c.id == upload_id))
