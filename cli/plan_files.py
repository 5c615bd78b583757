"""Reads rollout plans from JSON files."""

import json
from pathlib import Path

from cli.api import Json
from cli.stack_commands import fail


def read_plan(path: Path) -> Json:
    """Return the plan in a file, which the control plane later validates."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise fail(f"{path}: {error}") from None
