"""A download fetches what is lacking, believes nothing, and is there whole or not at all."""

from pathlib import Path
from typing import Any

import pytest

from cli import downloads
from cli.api import ApiClient, ApiError
from cli.downloads import Pull, fetch_file, find_manifest
from sluice.manifests import CHUNK_BYTES, Manifest, manifest_of_directory

NOWHERE = "http://127.0.0.1:1"


class Plane(ApiClient):
    """Has one artifact; answers so many times with other bytes, or not at all."""

    manifest: Manifest
    chunks: dict[str, bytes]
    wrong = errors = 0
    status = 503
    asked: list[str]

    async def call(self, method, path, body=None, query=None) -> dict[str, Any]:
        return self.manifest.document()

    async def read(self, path, query) -> bytes:
        sha256 = path.rpartition("/")[2]
        self.asked.append(sha256)
        if self.errors:
            self.errors -= 1
            raise ApiError("restarts", self.status)
        if self.wrong:
            self.wrong -= 1
            return b"other"
        return self.chunks[sha256]


@pytest.fixture
async def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three chunks in two files, one of them twice, and an empty file."""
    monkeypatch.setattr(downloads, "_PAUSE_S", 0.0)
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "empty").write_bytes(b"")
    (source / "small").write_bytes(b"small")
    (source / "deep" / "large").write_bytes(b"a" * CHUNK_BYTES + b"b" * CHUNK_BYTES + b"small")
    async with Plane(NOWHERE, "key") as made:
        made.manifest, made.asked = manifest_of_directory(source), []
        made.chunks = {}
        for entry in made.manifest.files:
            content = (source / entry.name).read_bytes()
            for index, chunk in enumerate(entry.chunks()):
                begin = index * CHUNK_BYTES
                made.chunks[chunk.sha256] = content[begin : begin + chunk.size_bytes]
        yield made


async def pull(plane: Plane, target: Path, told: list[tuple[int, int]] | None = None) -> None:
    told = [] if told is None else told
    await Pull(target, plane.manifest).run(
        plane, jobs=2, on_done=lambda done, every: told.append((done, every))
    )


async def test_it_is_there_whole(plane, tmp_path) -> None:
    told: list[tuple[int, int]] = []
    await pull(plane, tmp_path / "target", told)
    assert manifest_of_directory(tmp_path / "target") == plane.manifest
    assert sorted(plane.asked) == sorted(plane.manifest.chunks()), "each chunk once"
    every = plane.manifest.size_bytes
    assert (told[0], told[-1]) == ((0, every), (every, every))


@pytest.mark.parametrize("words", ["..", "deep/../..", "../../target", "link"])
async def test_the_place_may_be_named_in_any_way(plane, tmp_path, monkeypatch, words) -> None:
    target = tmp_path / "target"
    (target / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(target / "here")
    Path("link").symlink_to(target)
    assert Pull(Path(words), plane.manifest).part.parent == tmp_path
    assert Pull(Path(words), plane.manifest).part == Pull(target, plane.manifest).part


async def test_a_target_that_cannot_be_replaced_is_refused(plane, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    for words, why in ((".", "working directory"), ("/", "mount point")):
        with pytest.raises(ApiError, match=f"{why}.*name one inside it"):
            Pull(Path(words), plane.manifest)
    with pytest.raises(ApiError, match="loop"):
        Pull(Path("loop"), plane.manifest)


async def test_other_bytes_and_restarts_are_tried_again(plane, tmp_path) -> None:
    plane.wrong, plane.errors = 3, 3
    await pull(plane, tmp_path / "target")
    assert manifest_of_directory(tmp_path / "target") == plane.manifest


async def test_a_broken_download_continues_with_its_good_parts(plane, tmp_path) -> None:
    plane.errors, plane.status = 1, 403
    target = tmp_path / "target"
    with pytest.raises(ApiError, match="restarts"):
        await pull(plane, target)
    assert not target.exists()
    part = Pull(target, plane.manifest).part
    large = part / "deep" / "large"
    with large.open("r+b") as file:
        file.write(b"a" * CHUNK_BYTES)
        file.write(b"x")
    (part / "small").write_bytes(b"small and more")
    plane.asked.clear()
    await pull(plane, target)
    assert manifest_of_directory(target) == plane.manifest
    first = plane.manifest.find("deep/large").chunk_sha256s[0]
    assert first not in plane.asked
    assert not part.exists()


async def test_a_source_with_wrong_bytes_is_named(plane, tmp_path) -> None:
    plane.wrong = 10_000
    with pytest.raises(ApiError, match="other bytes"):
        await pull(plane, tmp_path / "target")
    assert not (tmp_path / "target").exists()


async def test_a_full_disk_is_said_before_anything_is_fetched(plane, tmp_path, monkeypatch) -> None:
    class Usage:
        free = 3

    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(ApiError, match="has room for 3"):
        await pull(plane, tmp_path / "target")
    assert plane.asked == []


async def test_manifests_are_checked_against_the_digest(plane) -> None:
    assert await find_manifest(plane, plane.manifest.digest) == plane.manifest
    with pytest.raises(ApiError, match="is of other files"):
        await find_manifest(plane, "00" * 32)
    assert await fetch_file(plane, plane.manifest, "small") == b"small"
    with pytest.raises(ApiError, match="has no config"):
        await fetch_file(plane, plane.manifest, "config")
