"""What nobody needs goes from PostgreSQL and from the store; what anybody needs stays."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from control_plane.artifacts import uploads
from control_plane.artifacts.sweep import Graces, Sweeper
from control_plane.database import Database
from replica.engine.testing import write_random_adapter, write_random_model
from sluice.artifacts import digest_directory
from sluice.chunk_store import ChunkStore, open_backend
from sluice.manifests import manifest_of_directory
from tests.integration.artifact_site import Site, artifact_site, begin, contents, push, send

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session")
async def site(database_url, tmp_path, start_control_plane) -> AsyncIterator[Site]:
    grace = {"CONTROL_PLANE__ARTIFACT_GRACE_S": "1"}
    async with artifact_site(start_control_plane, database_url, tmp_path, **grace) as found:
        yield found


def chunks_of(directory: Path) -> set[str]:
    return set(contents(directory, manifest_of_directory(directory)))


async def test_only_what_is_needed_stays(site, tmp_path, eventually) -> None:
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


async def _forget(connection, upload_id: str) -> None:
    from control_plane.artifacts.tables import artifact_uploads

    await connection.execute(artifact_uploads.delete().where(artifact_uploads.c.id == upload_id))
