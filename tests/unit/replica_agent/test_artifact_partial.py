"""Tests an artifact whose chunks arrive in any order, from many threads, with interruptions."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from replica.agent.artifacts.holdings import Holdings
from replica.agent.artifacts.library import Library
from replica.agent.artifacts.partial import CorruptChunkError, Partial, bitmap, members, pieces_of
from sluice.artifacts import digest_directory
from sluice.manifests import CHUNK_BYTES, manifest_of_directory


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Three chunks, the first of them in two files, and an empty file."""
    root = tmp_path_factory.mktemp("source")
    content = random.Random(1).randbytes(2 * CHUNK_BYTES + 100)
    (root / "deep" / "er").mkdir(parents=True)
    (root / "weights.bin").write_bytes(content)
    (root / "deep" / "er" / "again.bin").write_bytes(content[:CHUNK_BYTES])
    (root / "empty").touch()
    return root


@pytest.fixture(scope="module")
def manifest(source):
    return manifest_of_directory(source)


@pytest.fixture(scope="module")
def contents(source, manifest):
    found = []
    for piece in pieces_of(manifest):
        name, offset = piece.places[0]
        found.append((source / name).read_bytes()[offset : offset + piece.size_bytes])
    return found


def test_chunks_from_many_threads_are_the_artifact(tmp_path, manifest, contents) -> None:
    partial = Partial(tmp_path / "partial", manifest)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(partial.write, range(3), contents))
    assert partial.missing == 0
    assert [partial.read(number) for number in range(3)] == contents
    assert digest_directory(partial.seal()) == manifest.digest


def test_chunks_fetched_before_an_interruption_are_kept(tmp_path, manifest, contents) -> None:
    partial = Partial(tmp_path / "partial", manifest)
    partial.write(2, contents[2])
    # The state after a SIGKILL: no file was closed, and a chunk was written but not recorded.
    (partial.files / "weights.bin").write_bytes(contents[0])
    again = Partial(tmp_path / "partial", manifest)
    assert again.held == 0b100
    with pytest.raises(CorruptChunkError):
        again.write(1, contents[0])
    assert again.held == 0b100
    partial.close()
    with pytest.raises(OSError, match="closed"):
        partial.write(0, contents[0])


def test_a_disk_that_lies_is_found_out_at_the_end(tmp_path, manifest, contents) -> None:
    partial = Partial(tmp_path / "partial", manifest)
    for number, content in enumerate(contents):
        partial.write(number, content)
    (partial.files / "weights.bin").write_bytes(bytes(2 * CHUNK_BYTES + 100))
    with pytest.raises(CorruptChunkError, match="the disk damaged"):
        partial.seal()
    assert not partial.root.exists()


async def test_a_node_reports_changes_and_serves_its_chunks(
    tmp_path, manifest, contents, source
) -> None:
    holdings = Holdings(tmp_path, Library(tmp_path, max_bytes=0, reserve_bytes=0))
    await holdings.start()
    await holdings.keep(manifest)
    partial = await holdings.begin(manifest)
    partial.write(1, contents[1])
    (told,) = holdings.held(is_full=True)
    assert (told.digest, told.chunks, told.is_complete) == (manifest.digest, b"\x02", False)
    assert holdings.held(is_full=False) == []
    assert holdings.read(manifest.digest, 1) == contents[1]
    assert holdings.read(manifest.digest, 0) is None
    assert holdings.read(manifest.digest, 99_999) is None
    assert holdings.read("ef" * 32, 0) is None
    partial.write(0, contents[0])
    partial.write(2, contents[2])
    await holdings.complete(partial)
    (told,) = holdings.held(is_full=False)
    assert (told.chunks, told.is_complete) == (b"\x07", True)
    assert digest_directory(tmp_path / manifest.digest) == digest_directory(source)
    assert holdings.read(manifest.digest, 2) == contents[2]

    # The next agent finds the partial artifact. After its removal, it is not reported any more.
    after = Holdings(tmp_path, Library(tmp_path, max_bytes=0, reserve_bytes=0))
    await after.start()
    assert [told.is_complete for told in after.held(is_full=True)] == [True]
    (tmp_path / manifest.digest).rename(tmp_path / "elsewhere")
    await after.library.scan()
    assert [told.is_complete for told in after.held(is_full=False)] == [False]
    assert after.read(manifest.digest, 2) is None


async def test_a_foreign_file_is_served_if_it_matches_its_digest(
    tmp_path, manifest, contents, source
) -> None:
    source_copy = tmp_path / manifest.digest
    (source_copy / "deep" / "er").mkdir(parents=True)
    for file in manifest.files:
        (source_copy / file.name).write_bytes((source / file.name).read_bytes())
    wrong = "12" * 32
    (tmp_path / wrong).mkdir()
    (tmp_path / wrong / "weights.bin").write_bytes(b"something else")
    holdings = Holdings(tmp_path, Library(tmp_path, max_bytes=0, reserve_bytes=0))
    await holdings.start()
    for digest in (manifest.digest, wrong):
        await holdings.adopt(digest)
    assert [told.digest for told in holdings.held(is_full=True)] == [manifest.digest]
    assert holdings.read(manifest.digest, 1) == contents[1]
    assert holdings.read(wrong, 0) is None


def test_bitmaps_begin_with_the_lowest_chunk() -> None:
    assert bitmap(0) == b""
    assert bitmap(1 << 8 | 1) == b"\x01\x01"
    assert list(members(1 << 40 | 0b101)) == [0, 2, 40]
