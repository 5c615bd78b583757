"""`python -m control_plane`: the service."""

import sys

import uvloop

from control_plane.app import run
from control_plane.settings import Settings
from sluice.logs import configure_logs


def main() -> None:
    """Serve until stopped; status 1 and one line when an address cannot be had."""
    configure_logs("control-plane")
    settings = Settings.from_environment()
    problems: list[BaseException] = []
    try:
        uvloop.run(run(settings))
    except* OSError as errors:
        problems += errors.exceptions
    if problems:
        sys.stderr.write(f"the control plane could not run: {problems[0]}\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
