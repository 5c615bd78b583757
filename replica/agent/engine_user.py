"""Chooses the user of engines, so that code in models does not run as root like the agent."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import structlog

import replica
from replica.agent import engine_entry
from replica.agent.engine_view import EngineView, view_for
from replica.agent.installation import inspect_installation
from replica.agent.settings import AgentSettings
from sluice.accounts import is_root, lacking_capabilities

log = structlog.get_logger(__name__)

# Longest time for the trial, in which Python starts, in seconds. An idle machine needs 0.1 s.
_TRIAL_S = 60.0
# This program runs as the engines' user. It checks that packages can be imported and that each path
# is readable.
_TRIAL = """
import os, sys
import replica, sluice
closed = [path for path in sys.argv[1:] if not os.access(path, os.R_OK | os.X_OK)]
sys.exit(f"user id {os.getuid()} may not read {', '.join(closed)}" if closed else 0)
"""


@dataclass(frozen=True, slots=True)
class EngineUser:
    """A user other than the agent's, with its view of closed directories.

    Attributes:
        uid: User and group id.
        view: The parts of closed directories that are visible to this user's engines.
    """

    uid: int
    view: EngineView = field(default_factory=EngineView)

    def command(self, program: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """Return the command with which root runs a program as this user.

        Args:
            program: Absolute path of the program, and its arguments.
            environment: Additional variables for the program.
        """
        entry = {
            "uid": self.uid,
            "closed": {path: asdict(found) for path, found in self.view.closed.items()},
            "environment": dict(environment),
        }
        script = str(Path(engine_entry.__file__).resolve())
        return [sys.executable, "-I", "-S", script, json.dumps(entry), *program]


def engine_user(settings: AgentSettings) -> EngineUser | None:
    """Return the user that engines run as, or None if they run as the agent's user."""
    if not is_root() or settings.engine_uid == 0:
        return None
    for path in (settings.state_dir, settings.artifacts_dir):
        path.mkdir(parents=True, exist_ok=True)
    user, why = find_user(settings.engine_uid, needed_paths(settings))
    if user is None:
        log.warning(
            "engine_user_missing",
            reason=why,
            fix="mend the reason, or run the agent as a user that is not root",
        )
    return user


def needed_paths(settings: AgentSettings) -> list[Path]:
    """Return the directories that engines read: programs, packages, artifacts, state."""
    found = inspect_installation()
    return [
        *(Path(sys.prefix), Path(sys.base_prefix), found.bin_dir),
        Path(replica.__file__).parents[1],
        *(Path(path) for path in (found.triton, found.libpython_dir) if path),
        *(settings.state_dir, settings.artifacts_dir),
    ]


def find_user(uid: int, paths: Sequence[Path]) -> tuple[EngineUser | None, str]:
    """Return a user as which a trial of Python succeeded, or None and the reason of the failure."""
    if lacking := lacking_capabilities(_capabilities(needs_view=False)):
        return None, f"this root lacks the capabilities {', '.join(lacking)}"
    view = view_for(uid, paths)
    if view.problem:
        return None, view.problem
    if view.closed and (lacking := lacking_capabilities(_capabilities(needs_view=True))):
        return None, (
            f"user id {uid} may not enter {', '.join(view.closed)}, and this root lacks"
            f" {', '.join(lacking)} to open parts of it for engines: chmod o+x it, or install"
            " Python and Sluice elsewhere"
        )
    user = EngineUser(uid, view)
    why = _try(user, paths)
    return (None, why) if why else (user, "")


def _capabilities(*, needs_view: bool) -> Iterable[str]:
    if needs_view:
        return ("SYS_ADMIN",)
    return ("CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID", "SYS_PTRACE")


def _try(user: EngineUser, paths: Sequence[Path]) -> str:
    """Return the reason why Python does not run as this user, or empty if it runs."""
    python = str(inspect_installation().bin_dir / "python3")
    known = [str(path.absolute()) for path in paths if path.exists()]
    try:
        done = subprocess.run(
            user.command([python, "-c", _TRIAL, *known], {}),
            env={"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=_TRIAL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Python could not be run as user id {user.uid}: {error}"
    if done.returncode == 0:
        return ""
    told = done.stderr.strip().splitlines()
    return f"Python does not run as user id {user.uid}: {told[-1] if told else done.returncode}"
