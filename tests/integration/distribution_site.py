"""What the tests of distribution share: an artifact in a store, and nodes without engines."""

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
from sqlalchemy import make_url

from replica.agent.artifacts.library import Library
from replica.agent.artifacts.node import ArtifactCache, NodeOptions
from sluice import shared_secret
from sluice.artifacts import digest_directory
from sluice.chunk_store import ChunkStore, open_backend
from sluice.logs import configure_logs
from sluice.manifests import CHUNK_BYTES, Manifest, manifest_of_directory, read_chunks

CHUNKS = 8


async def connect(database_url: str) -> asyncpg.Connection:
    url = make_url(database_url)
    return await asyncpg.connect(
        user=url.username,
        database=url.database,
        host=url.query.get("host") or url.host,
        port=int(url.query.get("port") or url.port or 5432),
        timeout=5,
    )


async def publish(database_url: str, store: Path, source: Path) -> Manifest:
    """Make an artifact of a few chunks, some of them in more than one place, and accept it."""
    whole = random.Random(7).randbytes((CHUNKS - 1) * CHUNK_BYTES + 1000)
    (source / "sub").mkdir(parents=True)
    (source / "weights.bin").write_bytes(whole)
    (source / "sub" / "same.bin").write_bytes(whole[:CHUNK_BYTES])
    (source / "empty").touch()
    manifest = manifest_of_directory(source)
    chunks = ChunkStore(open_backend(store.as_uri()))
    for file in manifest.files:
        with (source / file.name).open("rb") as content:
            for sha256, piece in zip(file.chunk_sha256s, read_chunks(content), strict=True):
                await chunks.put(sha256, piece)
    chunks.close()
    connection = await connect(database_url)
    async with connection.transaction():
        await connection.execute(
            "INSERT INTO artifacts (digest, kind, size_bytes, file_count, manifest, is_pinned)"
            " VALUES ($1, 'base', $2, $3, $4, true)",
            manifest.digest,
            manifest.size_bytes,
            len(manifest.files),
            json.dumps(manifest.document()),
        )
        for sha256 in manifest.chunks():
            await connection.execute(
                "INSERT INTO artifact_chunks VALUES ($1, $2)", manifest.digest, sha256
            )
    await connection.close()
    return manifest


@dataclass
class Node:
    """A running node, and where its artifacts lie."""

    artifacts: ArtifactCache
    directory: Path

    @property
    def bytes_from(self) -> dict[str, int]:
        return self.artifacts.downloaded_bytes

    def is_whole(self, manifest: Manifest) -> bool:
        path = self.directory / manifest.digest
        return path.is_dir() and digest_directory(path) == manifest.digest


def options(
    root: Path,
    control_address: str,
    store: Path,
    rate: float = 0.0,
    peer_address: str = "127.0.0.1:0",
) -> NodeOptions:
    return NodeOptions(
        node_id=root.name,
        region="here",
        rack="one",
        control_address=control_address,
        directory=root,
        store_url=store.as_uri(),
        keys_file=root.with_name(f"{root.name}-keys.json"),
        peer_address=peer_address,
        downloads_max=2,
        download_bytes_per_s=rate,
    )


@asynccontextmanager
async def running_node(found: NodeOptions) -> AsyncIterator[Node]:
    """Run a node while the context lasts."""
    library = Library(found.directory, max_bytes=0, reserve_bytes=0)
    artifacts = ArtifactCache(found, library)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(artifacts.run())
        try:
            yield Node(artifacts, found.directory)
        finally:
            task.cancel()


async def _fetch(root: str, control_address: str, store: str, rate: str, digest: str) -> None:
    async with running_node(options(Path(root), control_address, Path(store), float(rate))) as node:
        await node.artifacts.ensure(digest, needed=True)


if __name__ == "__main__":
    configure_logs("node")
    shared_secret.use()
    asyncio.run(_fetch(*sys.argv[1:]))
