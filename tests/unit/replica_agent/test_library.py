"""Tests a node's artifact folder: its contents, new artifacts, and evictions."""

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from replica.agent.artifacts.library import PARTIAL, Library
from sluice.manifests import Manifest, manifest_of_directory

A, B, C, D = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)
GIB = 1 << 30


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def put(root: Path, digest: str, size: int, *, is_adapter: bool = True) -> Path:
    path = root / digest
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"x" * size)
    if is_adapter:
        (path / "adapter_config.json").touch()
    return path


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Library]:
    def library(max_bytes: int = 100, **options: object) -> Library:
        values = {"reserve_bytes": 0, "clock": Clock(), **options}
        return Library(tmp_path / "artifacts", max_bytes=max_bytes, **values)  # type: ignore[arg-type]

    return library


async def filled(library: Library, root: Path, sizes: Mapping[str, int]) -> Library:
    for digest, size in sizes.items():
        put(root / "artifacts", digest, size)
    await library.scan()
    return library


async def test_whole_artifacts_are_found_and_leaving_ones_removed(make, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    put(root, PARTIAL, 5)
    put(root, ".staging_1", 5)
    put(root, ".leaving_1", 5)
    library = await filled(make(), tmp_path, {A: 10, B: 20})
    assert library.complete() == {A: 10, B: 20}
    assert library.has(A)
    assert not library.has(C)
    assert not library.has("..")
    assert sorted(path.name for path in root.iterdir() if path.name[0] == ".") == [
        PARTIAL,
        ".staging_1",
    ]


async def test_a_folder_that_is_missing_is_made(make, tmp_path: Path) -> None:
    library = make()
    await library.scan()
    assert library.complete() == {}
    assert (tmp_path / "artifacts").is_dir()


async def test_artifacts_added_or_removed_by_others_are_found_later(make, tmp_path: Path) -> None:
    library = await filled(make(), tmp_path, {A: 10})
    put(tmp_path / "artifacts", B, 7)
    assert library.has(B)
    (tmp_path / "artifacts" / A).rename(tmp_path / "away")
    await library.scan()
    assert library.complete() == {B: 7}


async def test_the_coldest_makes_way_and_is_gone_from_the_disk(make, tmp_path: Path) -> None:
    library = await filled(make(), tmp_path, {A: 40, B: 40})
    library.used(A)
    assert await library.make_room(60, needed=False)
    assert library.complete() == {A: 40}
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == [A]
    assert library.evictions == 1


async def test_an_artifact_that_cannot_be_removed_stays(make, tmp_path: Path) -> None:
    library = await filled(make(), tmp_path, {A: 30, B: 30, C: 30})
    library.desire([A])
    library.use("engine", [B])
    library.want({C: 2})
    assert not await library.make_room(30, needed=False)
    assert await library.make_room(30, needed=True)
    assert library.complete() == {A: 30, B: 30}
    library.want({B: 1})
    library.use("engine", [])
    assert not await library.make_room(60, needed=True)
    assert library.complete() == {A: 30, B: 30}


async def test_a_complete_directory_is_admitted_at_once_and_twice_does_no_harm(
    make, tmp_path: Path
) -> None:
    library = await filled(make(), tmp_path, {})
    for number in range(2):
        staging = put(tmp_path / "artifacts" / f"{PARTIAL}{number}", "x", 25)
        library.admit(A, staging)
        assert not staging.exists()
    assert library.complete() == {A: 25}
    assert (tmp_path / "artifacts" / A / "weights").stat().st_size == 25


async def test_room_that_was_promised_is_not_promised_twice(make, tmp_path: Path) -> None:
    library = await filled(make(), tmp_path, {})
    assert await library.make_room(60, needed=True, digest=A)
    # the same request again reserves no second room
    assert await library.make_room(60, needed=True, digest=A)
    assert not await library.make_room(60, needed=True, digest=B)
    library.give_up(A)
    assert await library.make_room(60, needed=True, digest=B)
    library.admit(B, put(tmp_path / "artifacts" / PARTIAL, B, 60))
    assert not await library.make_room(60, needed=False, digest=C) or library.complete() == {}


async def test_without_a_budget_the_disk_itself_and_its_reserve_are_the_limit(
    make, tmp_path: Path
) -> None:
    library = make(0, reserve_bytes=50, free_bytes=lambda: 80)
    await filled(library, tmp_path, {A: 10})
    assert await library.make_room(30, needed=False)
    assert library.complete() == {A: 10}
    assert await library.make_room(40, needed=False)
    assert library.complete() == {}
    assert not await library.make_room(41, needed=True)


async def test_all_that_leaves_is_away_before_anything_is_deleted(
    make, tmp_path: Path, monkeypatch
) -> None:
    library = await filled(make(), tmp_path, {A: 40, B: 40})
    found: list[bool] = []
    delete = shutil.rmtree

    def rmtree(path: Path, **options: bool) -> None:
        found.append(library.has(A) or library.has(B))
        delete(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert await library.make_room(90, needed=False)
    assert found == [False, False]
    assert library.complete() == {}


async def test_an_artifact_removed_by_others_needs_no_eviction(make, tmp_path: Path) -> None:
    library = await filled(make(), tmp_path, {A: 40, B: 40})
    (tmp_path / "artifacts" / A).rename(tmp_path / "away")
    assert await library.make_room(90, needed=False)
    assert library.complete() == {}
    assert library.evictions == 1


async def test_room_is_kept_for_downloads_open_at_the_start(make, tmp_path: Path) -> None:
    library = await filled(make(), tmp_path, {})
    library.expect(A, 60)
    assert not await library.make_room(60, needed=True, digest=B)
    library.give_up(A)
    assert await library.make_room(60, needed=True, digest=B)


async def test_heat_outlives_the_agent(make, tmp_path: Path) -> None:
    library = await filled(make(), tmp_path, {A: 40, B: 40})
    library.used(A, 3)
    await library.save_heat()
    again = make()
    await again.scan()
    assert await again.make_room(50, needed=False)
    assert again.complete() == {A: 40}
    (tmp_path / "artifacts" / ".heat.json").write_text("[1, 2")
    damaged = make()
    await damaged.scan()
    assert damaged.complete() == {A: 40}


async def test_many_at_once_stay_within_the_budget(make, tmp_path: Path) -> None:
    library = await filled(make(), tmp_path, {A: 30, B: 30, C: 30})
    asked = [library.make_room(50, needed=False, digest=digest) for digest in (A, B, C, D)]
    assert sorted(await asyncio.gather(*asked)) == [False, False, True, True]


def put_sound(root: Path) -> str:
    """Add an adapter whose name is its digest, and return the name."""
    path = put(root, "made", 10)
    digest = manifest_of_directory(path).digest
    path.rename(root / digest)
    return digest


def rot(path: Path) -> None:
    """Change a byte, but neither size nor time of modification, like a faulty disk."""
    status = path.stat()
    path.write_bytes(b"y" + path.read_bytes()[1:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


async def test_a_touched_artifact_is_read_again_and_moved_away_if_bad(make, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    digest = put_sound(root)
    library = await filled(make(), tmp_path, {})
    assert not library.looks_sound(digest), "never verified"
    assert await library.problem_of(digest) == ""
    assert library.looks_sound(digest)
    (root / digest / "weights").write_bytes(b"changed!!!")
    assert "damaged" in await library.problem_of(digest)
    assert not library.has(digest)
    assert library.complete() == {}
    assert (root / f".spoiled-{digest}" / "weights").read_bytes() == b"changed!!!"
    assert await library.problem_of(digest) == "", "it is fetched before it is used"
    await library.make_room(1 << 10, needed=True)
    assert not (root / f".spoiled-{digest}").exists(), "bad copies are the first to make way"


async def test_rot_that_shows_in_no_time_stamp_is_found_after_a_doubt(make, tmp_path: Path) -> None:
    root = tmp_path / "artifacts"
    digest = put_sound(root)
    library = await filled(make(), tmp_path, {A: 10})
    problems = await asyncio.gather(*(library.problem_of(digest) for _ in range(3)))
    assert problems == [""] * 3
    rot(root / digest / "weights")
    assert await library.problem_of(digest) == "", "nothing tells that it changed"
    library.doubt(A, with_adapters=True)
    problems = await asyncio.gather(*(library.problem_of(digest) for _ in range(3)))
    assert sorted(map(bool, problems)) == [False, False, True], "one reads, and moves it away"
    assert library.spoiled == 1


async def test_a_fetched_artifact_is_not_read_again(make, tmp_path: Path) -> None:
    library = await filled(make(), tmp_path, {})
    library.admit(A, put(tmp_path / "artifacts" / PARTIAL, "x", 25))
    assert library.looks_sound(A)
    assert await make().problem_of(A) == "", "nor by the next agent"


async def test_an_artifact_evicted_during_reading_is_missing(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = make()
    root = tmp_path / "artifacts"
    await library.scan()
    put(root, C, 10)

    def evicted(path: Path) -> Manifest:
        manifest = manifest_of_directory(path)
        shutil.rmtree(path)
        return manifest

    monkeypatch.setattr("replica.agent.artifacts.library.manifest_of_directory", evicted)
    assert await library.problem_of(C) == ""
    assert (library.has(C), library.spoiled) == (False, 0)
