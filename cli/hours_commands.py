"""`sluice fleet hours`: shows the hours for which replicas existed."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from cli.admin import AsJson, ask, given
from cli.audit_commands import since_moment
from cli.render import show_json, show_table

_HOURS = (
    *("replica_hours", "running_hours", "reserved_hours", "accelerator_hours"),
    "unassigned_hours",
)


class HoursGroup(StrEnum):
    """The object, or the hour, of one row."""

    POOL = "pool"
    NODE = "node"
    HOUR = "hour"


def hours(
    *,
    by: Annotated[
        HoursGroup, typer.Option(help="Group of a row; hour: hour and pool.")
    ] = HoursGroup.POOL,
    since: Annotated[
        str, typer.Option("--from", "--since", help="30d ago, as 30d; or a moment.")
    ] = "1d",
    until: Annotated[
        str | None, typer.Option("--to", "--until", help="Like --from. Default: now.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show for how many hours replicas were placed on nodes, as the control plane recorded it."""
    now = datetime.now(UTC)
    query = given(
        by=by.value,
        to=since_moment(until, now, "--to") if until else None,
        **{"from": since_moment(since, now, "--from")},
    )
    rows = ask(lambda api: api.list("/v1/replica-hours", **query))
    if as_json:
        show_json(rows)
        return
    names = ("start", "name") if by is HoursGroup.HOUR else ("name",)
    cells = [
        (*(row[name] for name in names), *(f"{row[name]:,.2f}" for name in _HOURS)) for row in rows
    ]
    totals = (f"{sum(row[name] for row in rows):,.2f}" for name in _HOURS)
    cells.append(("total", *("" for _ in names[1:]), *totals))
    shown = ("start", "pool") if by is HoursGroup.HOUR else (by.value,)
    show_table((*shown, *_HOURS), cells, right=" ".join(_HOURS))
