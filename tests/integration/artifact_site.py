"""What the tests of artifacts share: a control plane with a store, and a client that uploads."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import httpx
from sqlalchemy import make_url

from control_plane.schema import metadata
from sluice.manifests import CHUNK_BYTES, Manifest, manifest_of_directory
from tests.integration.admin_description import HOOKS

UPLOADS = "/v1/artifacts/uploads"
TENANT_BYTES_MAX = 48 << 20
# The control plane's own, which it wants to find again.
_KEPT = frozenset({"changes", "fleet_secrets", "leases"})
_EMPTY = ";".join(
    f'DELETE FROM "{table.name}"'
    for table in reversed(metadata.sorted_tables)
    if table.name not in _KEPT
)


def contents(directory: Path, manifest: Manifest) -> dict[str, bytes]:
    """The bytes of each chunk of a directory."""
    found: dict[str, bytes] = {}
    for file in manifest.files:
        content = (directory / file.name).read_bytes()
        for index, chunk in enumerate(file.chunks()):
            found[chunk.sha256] = content[index * CHUNK_BYTES :][: chunk.size_bytes]
    return found


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

    @property
    def database_url(self) -> str:
        return self.plane.spec.env["CONTROL_PLANE__DATABASE_URL"]

    @property
    def home(self) -> Path:
        """A directory for what a test makes; the control plane may import what lies in it."""
        return self.store.parent

    async def empty(self) -> None:
        """Delete every row, whose triggers tell all watchers so, and every file."""
        await self.close_clients()
        url = make_url(self.database_url)
        database = await asyncpg.connect(
            url.set(drivername="postgresql").render_as_string(hide_password=False), timeout=60
        )
        try:
            await database.execute(_EMPTY)
        finally:
            await database.close()
        for path in (*self.home.iterdir(), *self.store.iterdir()):
            if path.is_dir() and path != self.store:
                shutil.rmtree(path)

    async def close_clients(self) -> None:
        for client in self.clients.values():
            await client.aclose()
        self.clients.clear()

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
            await site.close_clients()
