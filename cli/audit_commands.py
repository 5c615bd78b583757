"""`sluice audit`: shows the writes of the admin REST with their authors, and refused writes."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from cli.admin import AsJson, ask, given
from cli.key_commands import duration_s
from cli.render import show_objects

_SHOWN = ("at", "actor_id", "actor_role", "action", "kind", "object_id", "outcome", "change")


def audit(
    *,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="Number of rows; 0: all.")
    ] = 20,
    actor: Annotated[
        str | None, typer.Option(help="Id of the admin key; bootstrap is the stack's own.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="tiers, tenants, keys, models, ...")] = None,
    object_id: Annotated[
        str | None, typer.Option("--object", help="Id of the object that was written.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="2h ago, as 2h; or a moment, as 2030-12-31T12:00:00Z.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the latest writes and refusals of the admin REST, newest first."""
    moment = None if since is None else since_moment(since, datetime.now(UTC))
    query = given(actor=actor, kind=kind, object_id=object_id, since=moment)
    found = ask(lambda api: api.list("/v1/audit", limit=limit, **query))
    shown = [row | {"at": row["at"][:19], "change": changed(row)} for row in found]
    show_objects(found if as_json else shown, _SHOWN, as_json=as_json)


def since_moment(text: str, now: datetime, hint: str = "--since") -> str:
    """Return a moment in ISO 8601 from a moment or an age like `2h`. Raises BadParameter."""
    if re.fullmatch(r"\d+[smhd]", text):
        return (now - timedelta(seconds=duration_s(text))).isoformat()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is neither like 2h nor like 2030-12-31T12:00:00Z"
        raise typer.BadParameter(message, param_hint=hint) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat()


def changed(row: Mapping[str, Any]) -> str:
    """Return the changed fields of a write, or the reason of its refusal."""
    before, after = row["before"], row["after"]
    if row["outcome"] != "done" or before is None or after is None:
        return str(row["detail"])
    return ", ".join(
        f"{name}: {before.get(name)} -> {value}"
        for name, value in after.items()
        if before.get(name) != value
    )
