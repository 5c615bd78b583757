"""What the tests of artifacts share: a control plane with a store, and a client that uploads."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import httpx
from moto.server import ThreadedMotoServer

from sluice.manifests import CHUNK_BYTES, Manifest, manifest_of_directory
from sluice.process import free_port
from tests.integration.admin_description import HOOKS

UPLOADS = "/v1/artifacts/uploads"
TENANT_BYTES_MAX = 48 << 20


def contents(directory: Path, manifest: Manifest) -> dict[str, bytes]:
    """The bytes of each chunk of a directory."""
    found: dict[str, bytes] = {}
    for file in manifest.files:
        content = (directory / file.name).read_bytes()
        for index, chunk in enumerate(file.chunks()):
            found[chunk.sha256] = content[index * CHUNK_BYTES :][: chunk.size_bytes]
    return found


class Bucket:
    """An S3 server with a bucket that may go away for a while."""

    def __init__(self) -> None:
        # One of its own: what moto holds is there for the whole process, whatever server is asked.
        self.name = f"artifacts-{os.urandom(4).hex()}"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "CONTROL_PLANE__ARTIFACT_STORE_URL": f"s3://{self.name}/some/prefix",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
        self.start()
        self.client.create_bucket(Bucket=self.name)

    @property
    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )

    def start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def keys(self) -> set[str]:
        listed = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return {item["Key"] for item in listed}

    def fill(self, prefix: str, directory: Path) -> None:
        for path in directory.iterdir():
            self.client.put_object(
                Bucket=self.name, Key=f"{prefix}/{path.name}", Body=path.read_bytes()
            )


@dataclass
class Site:
    """A control plane with a store."""

    plane: Any
    store: Path
    clients: dict[str, httpx.AsyncClient] = field(default_factory=dict)

    @property
    def admin(self) -> httpx.AsyncClient:
        return self.plane.admin

    async def publisher(self, tenant: str) -> httpx.AsyncClient:
        """A client with a key of a publisher of a tenant, which is made if need be."""
        if tenant not in self.clients:
            await self.plane.put("tiers/artifacts")
            await self.plane.put(f"tenants/{tenant}", tier_id="artifacts")
            body = {"role": "publisher", "tenant_id": tenant}
            made = await self.admin.post("/v1/admin-keys", json=body)
            assert made.status_code == 201, made.text
            self.clients[tenant] = httpx.AsyncClient(
                base_url=self.admin.base_url,
                headers={"Authorization": f"Bearer {made.json()['key']}"},
                timeout=60,
                event_hooks=HOOKS,
            )
        return self.clients[tenant]

    def blobs(self) -> set[str]:
        """The chunks that lie in the store."""
        return {path.name for path in self.store.rglob("*") if path.is_file()}


async def begin(
    client: httpx.AsyncClient, directory: Path, base_digest: str = "", **more: Any
) -> httpx.Response:
    manifest = manifest_of_directory(directory)
    kind = "adapter" if base_digest else "base"
    body = {"kind": kind, "base_digest": base_digest, "manifest": manifest.document()} | more
    return await client.post(UPLOADS, json=body)


async def send(
    client: httpx.AsyncClient, upload: dict[str, Any], directory: Path, only: Iterable[str] = ()
) -> None:
    """Send what an upload lacks, or some of it, all at once."""
    held = contents(directory, manifest_of_directory(directory))
    wanted = list(only) or [chunk["sha256"] for chunk in upload["missing"]]
    answers = await asyncio.gather(
        *(
            client.put(f"{UPLOADS}/{upload['id']}/chunks/{sha256}", content=held[sha256])
            for sha256 in wanted
        )
    )
    assert {answer.status_code for answer in answers} <= {204}, [a.text for a in answers]


async def push(
    client: httpx.AsyncClient, directory: Path, base_digest: str = "", **more: Any
) -> httpx.Response:
    """Upload a directory and return what became of it."""
    begun = await begin(client, directory, base_digest, **more)
    assert begun.status_code in {200, 201}, begun.text
    await send(client, begun.json(), directory)
    return await client.post(f"{UPLOADS}/{begun.json()['id']}/complete")


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@asynccontextmanager
async def artifact_site(
    start: Callable[..., Any], database_url: str, directory: Path, **environment: str
) -> AsyncIterator[Site]:
    """Run a control plane with a store on a disk."""
    settings = {
        "CONTROL_PLANE__ARTIFACT_STORE_URL": f"file://{directory}/store",
        "CONTROL_PLANE__ARTIFACT_TENANT_BYTES_MAX": str(TENANT_BYTES_MAX),
    }
    async with start(database_url, directory, **(settings | environment)) as plane:
        site = Site(plane, directory / "store")
        try:
            yield site
        finally:
            for client in site.clients.values():
                await client.aclose()
