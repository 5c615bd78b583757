"""As whom engines run: what is loaded there must not be root because the agent is."""

import sys
from pathlib import Path

import structlog

import replica
from replica.agent.installation import inspect_installation
from replica.agent.settings import AgentSettings
from sluice.accounts import is_root, why_not_as

log = structlog.get_logger(__name__)


def engine_user(settings: AgentSettings) -> int | None:
    """Return the user id that engines run as; None: the agent's own."""
    if not is_root() or settings.engine_uid == 0:
        return None
    found = inspect_installation()
    paths = [
        *(found.bin_dir, Path(sys.executable), Path(replica.__file__)),
        *(settings.state_dir, settings.artifacts_dir),
        *(Path(path) for path in (found.triton, found.libpython_dir) if path),
    ]
    if why := why_not_as(settings.engine_uid, paths):
        log.warning("engines_run_as_root", reason=why, fix="open it, or run the agent as a user")
        return None
    return settings.engine_uid
