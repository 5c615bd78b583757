"""Manifests of artifacts: what they say, what is refused, and that they are the directory."""

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice import manifests
from sluice.artifacts import digest_directory
from sluice.manifests import (
    CHUNK_BYTES,
    Chunk,
    ManifestError,
    manifest_of_directory,
    parse_manifest,
)


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


def entry(name: str, content: bytes = b"abc", **changes: Any) -> dict[str, Any]:
    pieces = [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]
    chunks = [hashlib.sha256(piece).hexdigest() for piece in pieces]
    made = {
        "name": name,
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "chunks": chunks,
    }
    return made | changes


def document(*files: Any, **changes: Any) -> dict[str, Any]:
    return {"format": 1, "chunk_bytes": CHUNK_BYTES, "files": list(files)} | changes


def test_a_directory_and_its_manifest_have_the_same_digest(tmp_path: Path) -> None:
    # "a.b" sorts before "a/b" as a text, and after it as a path.
    files = {"a/b": b"1", "a.b": b"2", "a b": b"3", "empty": b"", "Z": b"4", "a/c/d": b"5"}
    manifest = manifest_of_directory(write(tmp_path / "made", files))
    assert manifest.digest == digest_directory(tmp_path / "made")
    assert {file.name for file in manifest.files} == set(files)
    assert manifest.size_bytes == 5
    assert parse_manifest(json.loads(manifest.canonical_json())) == manifest
    shuffled = document(*reversed(manifest.document()["files"]))
    assert parse_manifest(shuffled).canonical_json() == manifest.canonical_json()


def test_files_are_cut_into_chunks_and_equal_chunks_are_one(tmp_path: Path) -> None:
    block, rest = b"x" * CHUNK_BYTES, b"yz"
    manifest = manifest_of_directory(
        write(tmp_path, {"one": block + block + rest, "two": block, "three": rest})
    )
    first, last = (hashlib.sha256(piece).hexdigest() for piece in (block, rest))
    file = manifest.find("one")
    assert file is not None
    assert list(file.chunks()) == [
        Chunk(first, CHUNK_BYTES),
        Chunk(first, CHUNK_BYTES),
        Chunk(last, 2),
    ]
    assert manifest.chunks() == {first: CHUNK_BYTES, last: 2}
    assert manifest.missing(set()) == [Chunk(first, CHUNK_BYTES), Chunk(last, 2)]
    assert manifest.missing({first}) == [Chunk(last, 2)]
    assert manifest.missing({first, last}) == []
    assert manifest.find("four") is None


def test_no_file_is_whole_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(16 * CHUNK_BYTES)
    tracemalloc.start()
    manifest = manifest_of_directory(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert manifest.size_bytes == 16 * CHUNK_BYTES
    assert peak < 3 * CHUNK_BYTES


def test_paths_outside_an_artifact_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="holds 0 files"):
        manifest_of_directory(tmp_path)
    write(tmp_path, {"config.json": b"{}"})
    (tmp_path / "link").symlink_to("config.json")
    with pytest.raises(ManifestError, match="link is a symbolic link: copy"):
        manifest_of_directory(tmp_path)
    (tmp_path / "link").unlink()
    write(tmp_path, {"naïve": b""})
    with pytest.raises(ManifestError, match="cannot be a file of an artifact"):
        manifest_of_directory(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("", "/etc/passwd", "../x", "a/../x", "a//b", "a/", ".", "./a", "a\\b", "c:d", "a\0b"),
        *("a\n", "tail.", "tail ", "a./b", "é", "x" * 256, "/".join("abcdefghi"), "~\x7f"),
    ],
)
def test_names_that_could_leave_or_confuse_a_directory(name: str) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(document(entry(name)))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("a", "a"), "same name"),
        (("a/README.md", "a/readme.MD"), "same name"),
        (("a", "a/b"), "file and a directory"),
        (("A", "a/b"), "file and a directory"),
        (("a/x", "A/y"), "there is a directory"),
    ],
)
def test_names_that_are_one_on_some_systems(names: tuple[str, ...], text: str) -> None:
    with pytest.raises(ManifestError, match=text):
        parse_manifest(document(*map(entry, names)))


SHA = "ab" * 32
WRONG = [
    (None, "not a JSON object"),
    ([], "not a JSON object"),
    ({}, "exactly the fields"),
    (document(entry("a"), format=True), "format is True"),
    (document(entry("a"), format=2), "format is 2"),
    (document(entry("a"), chunk_bytes=1), "chunk_bytes is 1"),
    (document(entry("a"), more=1), "more"),
    (document(), "0 files"),
    (document(1), "a file is not a JSON object"),
    (document(files={}), "not a list"),
    (document({"name": "a"}), "exactly the fields"),
    (document(entry(1)), "not a text"),  # type: ignore[arg-type]
    (document(entry("a", size_bytes=True)), "size_bytes is True"),
    (document(entry("a", size_bytes=-1)), "size_bytes is -1"),
    (document(entry("a", size_bytes=10**400)), "size_bytes is 1000"),
    (document(entry("a", size_bytes=CHUNK_BYTES + 1)), "are 2 chunks, but 1"),
    (document(entry("a", chunks=[])), "are 1 chunks, but 0"),
    (document(entry("a", chunks="abc")), "chunks is not a list"),
    (document(entry("a", chunks=[SHA.upper()])), "no SHA-256"),
    (document(entry("a", sha256=5)), "no SHA-256"),
    (document(entry("a", sha256=SHA)), "only chunk differ"),
    (document(entry("a", b"", sha256=SHA)), "only chunk differ"),
    (
        document(
            entry("a", size_bytes=3, sha256=SHA, chunks=[SHA]),
            entry("b", size_bytes=4, sha256=SHA, chunks=[SHA]),
        ),
        "two different sizes",
    ),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG)
def test_malformed_manifests_are_refused(wrong: Any, text: str) -> None:
    with pytest.raises(ManifestError, match=text):
        parse_manifest(wrong)


def test_the_number_of_files_and_chunks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "FILES_MAX", 2)
    with pytest.raises(ManifestError, match="3 files"):
        parse_manifest(document(*map(entry, "abc")))
    monkeypatch.setattr(manifests, "FILES_MAX", 3)
    monkeypatch.setattr(manifests, "CHUNKS_MAX", 2)
    with pytest.raises(ManifestError, match="3 chunks"):
        parse_manifest(document(*map(entry, "abc")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(
    change=JSON,
    at=st.sampled_from(["", "files", "name", "size_bytes", "sha256", "chunks", "format"]),
)
def test_any_json_is_a_manifest_or_refused(change: Any, at: str) -> None:
    file = entry("a")
    made = document(file)
    if at in file:
        file[at] = change
    elif at:
        made[at] = change
    try:
        manifest = parse_manifest(made if at else change)
    except ManifestError as error:
        assert len(str(error)) < 1000
    else:
        assert parse_manifest(json.loads(manifest.canonical_json())) == manifest
