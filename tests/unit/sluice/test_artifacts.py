from pathlib import Path

import pytest

from sluice.artifacts import artifact_path, digest_directory, import_directory


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def test_the_digest_covers_names_and_bytes_and_nothing_else(tmp_path: Path) -> None:
    files = {"config.json": "{}", "deep/weights": "abc"}
    one, two = write(tmp_path / "one", files), write(tmp_path / "two", files)
    assert digest_directory(one) == digest_directory(two)
    (two / "config.json").write_text("{ }")
    assert digest_directory(one) != digest_directory(two)
    renamed = write(tmp_path / "three", {"config.jso": "{}", "deep/weights": "abc"})
    assert digest_directory(one) != digest_directory(renamed)


def test_an_import_is_complete_idempotent_and_leaves_no_staging(tmp_path: Path) -> None:
    source, root = write(tmp_path / "source", {"a": "1", "b/c": "2"}), tmp_path / "artifacts"
    digest = import_directory(source, root)
    assert import_directory(source, root) == digest
    assert digest_directory(artifact_path(root, digest)) == digest
    assert [path.name for path in root.iterdir()] == [digest]


def test_an_empty_directory_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="at least one"):
        digest_directory(tmp_path)


def test_a_missing_artifact_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="import it first"):
        artifact_path(tmp_path, "0" * 64)
