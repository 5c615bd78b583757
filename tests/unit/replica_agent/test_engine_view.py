"""Tests which directories on the way to paths are closed to a user, and which are opened."""

from pathlib import Path

import pytest

from replica.agent.engine_view import Closed, view_for

STRANGER = 54321


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory that all users may enter, inside one that they may not enter."""
    (tmp_path / "home" / "python" / "bin").mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def _open_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pytest's own directories accessible, so that only a test's directories are closed."""
    for parent in (tmp_path, *tmp_path.parents):
        if not parent.name.startswith(("test_", "popen-", "pytest-")):
            break
        parent.chmod(0o755)


def test_an_open_path_needs_no_view(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o755)
    (tmp_path / "a" / "file").write_text("")
    assert view_for(STRANGER, [tmp_path / "a" / "file", tmp_path / "later"]).closed == {}


def test_the_first_closed_directory_is_opened_for_the_needed_paths_alone(home: Path) -> None:
    (home / "python" / "lib").mkdir()
    (home / "python").chmod(0o700)
    (home / "private").mkdir()
    view = view_for(STRANGER, [home / "python" / "bin", home / "python" / "bin", home / "none"])
    assert view.closed == {str(home): Closed((str(home / "python" / "bin"),), {})}


def test_a_tree_in_a_tree_is_there_already(home: Path) -> None:
    view = view_for(STRANGER, [home / "python" / "bin", home / "python"])
    assert view.closed[str(home)].trees == (str(home / "python"),)


def test_links_are_followed_and_kept(home: Path, tmp_path: Path) -> None:
    (home / "current").symlink_to("python")
    (tmp_path / "outside").symlink_to(home / "current" / "bin")
    view = view_for(STRANGER, [tmp_path / "outside"])
    assert view.closed == {
        str(home): Closed((str(home / "python" / "bin"),), {str(home / "current"): "python"})
    }


def test_a_path_that_is_itself_closed_cannot_be_opened(home: Path) -> None:
    (home / "python").chmod(0o700)
    view = view_for(STRANGER, [home])
    assert (view.closed, f"chmod o+x {home}" in view.problem) == ({}, True)


def test_links_without_an_end_are_told(home: Path) -> None:
    (home / "a").symlink_to("b")
    (home / "b").symlink_to("a")
    assert "without an end" in view_for(STRANGER, [home / "a"]).problem
