"""Imports by a control plane as a process: from a directory, from S3 and from a web server."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from aiohttp import web

from sluice.artifacts import digest_directory
from sluice.process import ChildProcess
from tests.integration.artifact_site import Site, artifact_site
from tests.integration.bucket import Bucket
from tests.support.random_models import write_random_adapter, write_random_model

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="session")]

IMPORTS = "/v1/artifacts/imports"


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "allowed" / "base"
    write_random_model(directory, seed=11, changes={"intermediate_size": 6000})
    return directory


class WebServer:
    """Serves a directory; redirects below /moved, and below /unlisted hides what is not there."""

    def __init__(self, directory: Path) -> None:
        application = web.Application()
        application.router.add_get("/moved/{name}", self._moved)
        application.router.add_get("/unlisted/{name:.*}", self._unlisted)
        application.router.add_static("/files", directory)
        self._directory = directory
        self.runner = web.AppRunner(application)
        self.port = 0

    async def _moved(self, request: web.Request) -> web.Response:
        raise web.HTTPFound(f"/files/base/{request.match_info['name']}")

    async def _unlisted(self, request: web.Request) -> web.FileResponse:
        file = self._directory / request.match_info["name"]
        if not file.is_file():
            raise web.HTTPForbidden
        return web.FileResponse(file)

    async def start(self) -> None:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    made = Bucket()
    yield made
    made.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def web_server(base_dir: Path) -> AsyncIterator[WebServer]:
    server = WebServer(base_dir.parent)
    await server.start()
    yield server
    await server.runner.cleanup()


@pytest_asyncio.fixture(loop_scope="session")
async def site(
    database_url, tmp_path, base_dir, web_server, start_control_plane
) -> AsyncIterator[Site]:
    allowed = {
        "CONTROL_PLANE__ARTIFACT_IMPORT_ROOTS": str(base_dir.parent),
        "CONTROL_PLANE__ARTIFACT_IMPORT_HOSTS": f"127.0.0.1:{web_server.port},localhost",
    }
    async with artifact_site(start_control_plane, database_url, tmp_path, **allowed) as found:
        yield found


async def fetch(client: httpx.AsyncClient, source: str, base: str = "") -> httpx.Response:
    kind = "adapter" if base else "base"
    return await client.post(IMPORTS, json={"kind": kind, "base_digest": base, "source": source})


async def test_a_base_and_its_adapter_come_from_a_directory_and_a_web_server(
    site, base_dir, web_server
) -> None:
    digest = digest_directory(base_dir)
    local = await fetch(site.admin, f"file://{base_dir}")
    assert (local.status_code, local.json().get("digest")) == (200, digest), local.text
    url = f"http://127.0.0.1:{web_server.port}/files"
    for files in ("files", "unlisted"):
        again = await fetch(site.admin, f"{url.replace('files', files)}/base/")
        assert (again.status_code, again.json().get("digest")) == (200, digest), again.text

    write_random_adapter(base_dir.parent / "adapter", base_dir, rank=2)
    acme = await site.publisher("acme")
    adapter = await fetch(acme, f"{url}/adapter", digest)
    assert adapter.status_code == 200, adapter.text
    assert adapter.json()["tenant_id"] == "acme"
    assert adapter.json()["digest"] == digest_directory(base_dir.parent / "adapter")
    for files in ("files", "unlisted"):
        weights = f"{url.replace('files', files)}/adapter/adapter_model.safetensors"
        single = await fetch(acme, weights, digest)
        assert (single.status_code, single.json().get("digest")) == (200, adapter.json()["digest"])
    listed = (await acme.get("/v1/artifacts")).json()["data"]
    assert {item["digest"] for item in listed} == {digest, adapter.json()["digest"]}


async def test_missing_and_forbidden_sources_are_refused(
    site, base_dir, web_server, tmp_path
) -> None:
    (base_dir.parent / "link").symlink_to(tmp_path)
    (base_dir / "deep").symlink_to("/etc")
    url = f"http://127.0.0.1:{web_server.port}"
    for source, text in (
        (f"file://{tmp_path}", "nothing may be imported from directory"),
        (f"file://{base_dir.parent}/link", "leads out of"),
        (f"file://{base_dir}", "deep is a symbolic link"),
        (f"file://{base_dir.parent}/none", "is no directory"),
        (f"file://{base_dir}/model.safetensors", "is no directory"),
        ("s3://bucket/x", "nothing may be imported from bucket bucket"),
        (f"http://localhost:{web_server.port}/files/base", "nothing may be imported from host"),
        ("http://localhost/files/base", "is not a public address"),
        (f"{url}/files/none", "is it the right directory?"),
        (f"{url}/unlisted/none", "is it public?"),
        (f"{url}/moved", "is elsewhere (302): give its final address"),
        ("http://127.0.0.1:1/", "nothing may be imported from host"),
    ):
        answer = await fetch(site.admin, source)
        assert answer.status_code == 400, (source, answer.text)
        assert text in answer.json()["detail"], answer.text
    assert (await site.admin.get("/v1/artifacts")).json()["data"] == []


async def test_a_prefix_of_a_bucket(
    database_url, tmp_path, base_dir, start_control_plane, bucket: Bucket
) -> None:
    bucket.fill("in/base", base_dir)
    environment = bucket.environment | {
        "CONTROL_PLANE__ARTIFACT_STORE_URL": f"file://{tmp_path}/store",
        "CONTROL_PLANE__ARTIFACT_IMPORT_BUCKETS": bucket.name,
    }
    async with artifact_site(start_control_plane, database_url, tmp_path, **environment) as site:
        answer = await fetch(site.admin, f"s3://{bucket.name}/in/base")
        assert answer.status_code == 200, answer.text
        assert answer.json()["digest"] == digest_directory(base_dir)
        missing = await fetch(site.admin, f"s3://{bucket.name}/nothing/here")
        assert missing.status_code == 400, missing.text

        write_random_adapter(base_dir.parent / "adapter", base_dir, rank=2)
        bucket.fill("in/adapter", base_dir.parent / "adapter")
        weights = f"s3://{bucket.name}/in/adapter/adapter_model.safetensors"
        single = await fetch(site.admin, weights, answer.json()["digest"])
        assert single.status_code == 200, single.text
        assert single.json()["digest"] == digest_directory(base_dir.parent / "adapter")
        alone = await fetch(
            site.admin, f"s3://{bucket.name}/in/adapter/none.safetensors", answer.json()["digest"]
        )
        assert "none.safetensors not found" in alone.json()["detail"], alone.text


async def test_an_import_survives_the_death_of_its_control_plane(
    site, base_dir, eventually
) -> None:
    """The connection breaks with the process; another one fetches it from the beginning."""
    digest = digest_directory(base_dir)

    async def ask() -> None:
        with suppress(httpx.TransportError):
            await fetch(site.admin, f"file://{base_dir}")

    async def has_begun() -> bool:
        return bool((await site.admin.get("/v1/artifacts/uploads")).json()["data"])

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask())
        await eventually(has_begun, "the import is noted")
        os.kill(site.plane.child.pid, signal.SIGKILL)
    await site.plane.child.wait()
    child = await ChildProcess.start(site.plane.spec)
    try:
        await child.wait_ready(60)

        async def is_there() -> bool:
            return (await site.admin.get(f"/v1/artifacts/{digest}")).status_code == 200

        await eventually(is_there, "the import goes on", 60)
    finally:
        await child.stop()
