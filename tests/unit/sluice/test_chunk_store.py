"""The store of chunks, on a real disk and in memory; S3 is among the integration tests."""

import asyncio
import hashlib
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore

from control_plane.artifacts.stored import stored_files
from sluice.chunk_store import (
    ChunkStore,
    LostChunkError,
    StoreDownError,
    awake_s,
    chunk_path,
    open_backend,
)
from sluice.manifests import CHUNK_BYTES, manifest_of_directory

CONTENT = b"some bytes"
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(params=["memory", "disk"])
def backend(request, tmp_path):
    return MemoryStore() if request.param == "memory" else open_backend(f"file://{tmp_path}/a%20b")


@pytest.fixture
def store(backend):
    made = ChunkStore(backend)
    yield made
    made.close()


async def test_chunks_come_back_until_they_are_deleted(store) -> None:
    with pytest.raises(LostChunkError, match="is not in the store"):
        await store.get(SHA)
    await asyncio.gather(*(store.put(SHA, CONTENT) for _ in range(20)))
    assert await store.get(SHA) == CONTENT
    with pytest.raises(StoreDownError):
        await store.delete(SHA, before_s=awake_s())
    assert await store.get(SHA) == CONTENT, "who comes too late deletes nothing"
    await store.delete(SHA, before_s=awake_s() + 60)
    await store.delete(SHA, before_s=awake_s() + 60)
    with pytest.raises(LostChunkError):
        await store.get(SHA)


async def test_a_chunk_that_was_changed_is_never_given_out(store, backend) -> None:
    await store.put(SHA, CONTENT)
    obstore.put(backend, chunk_path(SHA), CONTENT[:-1])
    with pytest.raises(LostChunkError, match="has been changed"):
        await store.get(SHA)
    await store.put(SHA, CONTENT)  # what was cut off is replaced
    assert await store.get(SHA) == CONTENT


async def test_a_store_that_fails_is_down_not_empty(tmp_path: Path) -> None:
    (tmp_path / "chunks").write_text("a file where directories should be")
    store = ChunkStore(LocalStore(prefix=tmp_path))
    try:
        for call in (store.put(SHA, CONTENT), store.get(SHA)):
            with pytest.raises(StoreDownError) as caught:
                await call
            assert caught.value.retry_after_s
    finally:
        store.close()


@pytest.mark.parametrize("url", ["", "/a", "file:a", "file://host/a", "s3:///a", "http://a/b"])
def test_malformed_stores_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no store"):
        open_backend(url)


async def test_files_are_read_in_parts(tmp_path: Path, store, backend) -> None:
    content = bytes(range(256)) * (CHUNK_BYTES // 256) * 2 + b"the end"
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "large").write_bytes(content)
    (tmp_path / "source" / "small").write_bytes(CONTENT)
    manifest = manifest_of_directory(tmp_path / "source")
    for start in range(0, len(content), CHUNK_BYTES):
        piece = content[start : start + CHUNK_BYTES]
        await store.put(hashlib.sha256(piece).hexdigest(), piece)
    large = stored_files(backend, manifest)["large"]
    for start, length in ((0, 8), (CHUNK_BYTES - 3, 7), (1, CHUNK_BYTES * 2), (len(content), 0)):
        assert large.read(start, length) == content[start : start + length]
    assert large.is_whole()
    obstore.put(backend, chunk_path(manifest.find("large").chunk_sha256s[0]), bytes(CHUNK_BYTES))
    assert not large.is_whole()
    small = stored_files(backend, manifest)["small"]
    assert small.is_whole()
    with pytest.raises(OSError):  # noqa: PT011 - each backend has its own words
        small.read(0, 4)
