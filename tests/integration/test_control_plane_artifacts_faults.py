"""Uploads that outlive their control plane and their store: killed at any instant, resumed."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.artifacts import digest_directory
from sluice.manifests import manifest_of_directory
from sluice.process import ChildProcess
from tests.integration.artifact_site import (
    UPLOADS,
    artifact_site,
    begin,
    contents,
    push,
    send,
)
from tests.integration.bucket import Bucket
from tests.support.random_models import write_random_adapter, write_random_model

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large") / "base"
    write_random_model(directory, seed=3, changes={"intermediate_size": 12_000})
    return directory


class Mortal:
    """A control plane that is killed now and then, and comes back at the same address."""

    def __init__(self, plane: Any) -> None:
        self._spec = plane.spec
        self._child = plane.child
        self._mine: list[ChildProcess] = []

    async def kill(self) -> None:
        os.kill(self._child.pid, signal.SIGKILL)
        await self._child.wait()

    async def start(self) -> None:
        self._child = await ChildProcess.start(self._spec)
        self._mine.append(self._child)
        await self._child.wait_ready(60)

    async def stop(self) -> None:
        for child in self._mine:
            await child.stop()


async def insist(client: httpx.AsyncClient, method: str, path: str, eventually: Any) -> Any:
    """Repeat a request until it is answered with less than 500, and return the answer."""
    found: list[httpx.Response] = []

    async def once() -> bool:
        with suppress(httpx.TransportError):
            answer = await client.request(method, path)
            if answer.status_code < 500:
                found.append(answer)
        return bool(found)

    await eventually(once, f"{method} {path} is answered")
    return found[0].json()


async def test_a_control_plane_that_is_killed_leaves_uploads_to_go_on_with(
    database_url, tmp_path, start_control_plane, large, eventually
) -> None:
    """Killed three times while chunks arrive, and once while the upload is looked at."""
    digest = digest_directory(large)
    held = contents(large, manifest_of_directory(large))
    chance = random.Random(4)
    async with artifact_site(start_control_plane, database_url, tmp_path) as site:
        admin, plane = site.admin, Mortal(site.plane)
        upload = (await begin(admin, large)).json()
        one = f"{UPLOADS}/{upload['id']}"

        async def put(sha256: str) -> None:
            with suppress(httpx.TransportError):
                await admin.put(f"{one}/chunks/{sha256}", content=held[sha256])

        try:
            for _ in range(3):
                async with asyncio.TaskGroup() as tasks:
                    for sha256 in chance.sample(sorted(held), 4):
                        tasks.create_task(put(sha256))
                    await asyncio.sleep(chance.uniform(0, 0.05))
                    await plane.kill()
                await plane.start()
                seen = await insist(admin, "GET", one, eventually)
                assert seen["state"] == "uploading"
                assert (await admin.get(f"/v1/artifacts/{digest}")).status_code == 404
                present = set(held) - {chunk["sha256"] for chunk in seen["missing"]}
                assert present <= site.blobs(), "what is noted as present is in the store"
            again = (await begin(admin, large)).json()
            assert again["id"] == upload["id"]
            await send(admin, again, large)

            async with asyncio.TaskGroup() as tasks:

                async def complete() -> None:
                    with suppress(httpx.TransportError):
                        await admin.post(f"{one}/complete")

                tasks.create_task(complete())

                async def is_looked_at() -> bool:
                    return (await admin.get(one)).json()["state"] != "uploading"

                await eventually(is_looked_at, "somebody looks at the upload")
                await plane.kill()
            await plane.start()

            async def is_ready() -> bool:
                return (await insist(admin, "GET", one, eventually))["state"] == "ready"

            await eventually(is_ready, "another worker takes it over", 60)
            assert (await admin.get(f"/v1/artifacts/{digest}/manifest")).status_code == 200
            for sha256, content in held.items():
                assert (await admin.get(f"/v1/artifacts/chunks/{sha256}")).content == content
        finally:
            await plane.stop()


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    made = Bucket()
    yield made
    made.stop()


async def test_a_store_in_s3_that_goes_away_and_comes_back(
    database_url, tmp_path, start_control_plane, large, bucket
) -> None:
    manifest = manifest_of_directory(large)
    held = contents(large, manifest)
    async with artifact_site(
        start_control_plane, database_url, tmp_path, **bucket.environment
    ) as site:
        admin = site.admin
        upload = (await begin(admin, large)).json()
        first, *others = [chunk["sha256"] for chunk in upload["missing"]]
        await send(admin, upload, large, only=[first])
        bucket.stop()
        path = f"{UPLOADS}/{upload['id']}/chunks/{others[0]}"
        down = await admin.put(path, content=held[others[0]])
        assert (down.status_code, down.json()["code"]) == (503, "unavailable")
        assert int(down.headers["Retry-After"]) >= 1
        seen = (await admin.get(f"{UPLOADS}/{upload['id']}")).json()
        assert others[0] in {chunk["sha256"] for chunk in seen["missing"]}

        bucket.start()
        ready = await push(admin, large)
        assert (ready.status_code, ready.json()["id"]) == (200, upload["id"]), ready.text
        assert bucket.keys() == {f"some/prefix/chunks/{s[:2]}/{s[2:4]}/{s}" for s in held}
        write_random_adapter(tmp_path / "adapter", large, rank=2)
        accepted = await push(admin, tmp_path / "adapter", manifest.digest)
        assert accepted.status_code == 200, accepted.text

        key = f"some/prefix/chunks/{first[:2]}/{first[2:4]}/{first}"
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=b"x" * len(held[first]))
        lost = await admin.get(f"/v1/artifacts/chunks/{first}")
        assert lost.status_code == 503
        assert "has been changed in the store" in lost.json()["detail"]
