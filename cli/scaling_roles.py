"""The options and the lines of `sluice scaling` about the roles of a pool."""

import re
from typing import Any

import typer

from cli.api import Json


def role_bounds(**options: str | None) -> dict[str, Any]:
    """Return the bounds of the roles in options such as "1,4", by role."""
    return {role: _bounds(text, f"--{role}") for role, text in options.items() if text is not None}


def _bounds(text: str, option: str) -> Json:
    found = re.fullmatch(r"([0-9]{1,5}),([0-9]{1,5})", text.strip())
    if found is None:
        message = f"{text!r} has no two bounds: 1,4 has"
        raise typer.BadParameter(message, param_hint=option)
    return {"replicas_min": int(found[1]), "replicas_max": int(found[2])}


def by_role(row: Json) -> str:
    """Return the numbers of a pool's roles, as "2 prefill, 6 decode", or an empty text."""
    roles = sorted(row["role_decisions"].items(), reverse=True)
    return ", ".join(f"{one['wanted']} {role}" for role, one in roles)


def role_lines(found: Json) -> list[str]:
    """Return a line with the replicas and the demand of each role, if the pool has roles."""
    lines = [
        f"  {one['wanted']:>4}  {role} ({one['ready']} ready, {one['booting']} booting),"
        f" {one['demand']:.1f} work-seconds/s"
        for role, one in sorted(found.get("role_decisions", {}).items(), reverse=True)
    ]
    if lines and found["sleepers"]:
        lines.append(f"  {found['sleepers']:>4}  asleep: a sleeper wakes into either role")
    return lines
