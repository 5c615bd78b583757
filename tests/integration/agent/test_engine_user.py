"""Engines of an agent that is root are another user, also where Python is in a closed home."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import replica
from replica.agent import engine_user
from replica.agent.engine_user import EngineUser, find_user

UID = 10001

pytestmark = [pytest.mark.real]


def can_mount() -> bool:
    """Return whether root may have mount namespaces here, asked of a program of others."""
    tried = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
    return tried.returncode == 0


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or not can_mount(), reason="root may not mount here (CAP_SYS_ADMIN)"
)
PYTHON = [Path(sys.prefix), Path(sys.base_prefix), Path(replica.__file__).parents[1]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A closed home with a program and a secret, below pytest's own closed directory."""
    home = tmp_path / "home"
    (home / "tools").mkdir(parents=True)
    shutil.copy("/bin/cat", home / "tools" / "cat")
    (home / "tools" / "open").write_text("open")
    (home / "private").write_text("private")
    (home / "private").chmod(0o644)
    home.chmod(0o700)
    return home


def user_of(home: Path) -> EngineUser:
    user, why = find_user(UID, [*PYTHON, home / "tools"])
    assert user is not None, why
    return user


def run(user: EngineUser, *program: str) -> "subprocess.CompletedProcess[str]":
    command = user.command(program, {"ONLY": "there"})
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_mounts
def test_an_engine_sees_its_needed_paths_and_nothing_beside_them(home: Path) -> None:
    user, cat = user_of(home), str(home / "tools" / "cat")
    assert run(user, cat, str(home / "tools" / "open")).stdout == "open"
    hidden = run(user, cat, str(home / "private"))
    assert "No such file" in hidden.stderr
    assert run(user, "/usr/bin/touch", str(home / "mine")).returncode != 0
    assert run(user, "/usr/bin/env").stdout.splitlines().count("ONLY=there") == 1


@needs_mounts
def test_the_machine_keeps_its_own_view(home: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    assert run(user_of(home), "/bin/true").returncode == 0
    assert Path("/proc/self/mountinfo").read_text() == before
    assert (home / "private").read_text() == "private"
    assert home.stat().st_mode & 0o777 == 0o700


@needs_mounts
def test_it_is_that_user_without_ways_back(home: Path) -> None:
    status = run(user_of(home), "/bin/cat", "/proc/self/status").stdout
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert facts["Uid"].split() == facts["Gid"].split() == [str(UID)] * 4
    assert facts["Groups"].strip() == ""
    assert {facts[name] for name in ("CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert facts["NoNewPrivs"] == "1"


@needs_mounts
def test_a_path_that_no_view_opens_is_reported_with_its_fix(home: Path) -> None:
    (home / "tools").chmod(0o700)
    user, why = find_user(UID, [*PYTHON, home / "tools"])
    assert user is None
    assert f"chmod o+x {home / 'tools'}" in why
    (home / "tools").chmod(0o711)  # may be entered, not read
    user, why = find_user(UID, [*PYTHON, home / "tools"])
    assert (user, f"may not read {home / 'tools'}" in why) == (None, True)


@needs_root
def test_a_root_without_mounts_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_user, "lacking_capabilities", lambda names: [it for it in names if it == "SYS_ADMIN"]
    )
    user, why = find_user(UID, [*PYTHON, home / "tools"])
    assert user is None
    assert "lacks SYS_ADMIN" in why
    assert "chmod o+x" in why


@needs_root
def test_a_program_that_cannot_be_started_says_why(home: Path) -> None:
    told = run(EngineUser(UID), str(home / "tools" / "cat")).stderr
    assert told.startswith(f"error: {home}/tools/cat could not be started as user id {UID}")
