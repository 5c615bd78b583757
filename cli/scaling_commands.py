"""`sluice scaling`: commands for bounds and manual sizes of pools, and the sizes' reasons."""

import re
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from cli.admin import AsJson, ask, given
from cli.api import ApiClient, Json
from cli.audit_commands import since_moment
from cli.day_picture import Panel, picture
from cli.render import show_fields, show_json, show_objects
from cli.scaling_roles import by_role, role_bounds
from cli.scaling_words import told
from cli.stack_commands import fail
from cli.token_curves import CurveError, TokenCurve, read_curve

scaling = typer.Typer(
    help="The number of a pool's replicas, and its reasons.", no_args_is_help=True
)

_STATUS = (
    *("pool_id", "is_on", "wanted", "ready", "booting", "asleep", "demand", "replicas_min"),
    *("replicas_max", "cause", "pin", "pin_until", "is_paused", "by_role", "warnings"),
)
_CHANGES = ("changed_at", "role", "before", "after", "cause", "text")
_BOUNDS = (
    *("replicas_min", "replicas_max", "minute_worth", "idle_s", "hold_s", "price", "is_on"),
    *("sleepers_share", "sleepers_min", "actuator", "replicas_per_node", "roles"),
)
_REPLAY = (
    *("violation_minutes", "violated_work_share", "replica_hours", "accelerator_hours", "price"),
    *("changes", "replicas_most"),
)
_DAY = ("demand", "wanted", "ready", "asleep")
_REPLAY_TIMEOUT_S = 60.0  # a query of a day, and two replays of seconds each
_ACTUATOR_FIELDS = ("name", "nodes_wanted", "nodes_present", "result", "short_since", "warning")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Pool = Annotated[str, typer.Argument(help="Id of a pool.")]
Least = Annotated[int | None, typer.Option("--min", min=0, help="Replicas at least.")]
Most = Annotated[int | None, typer.Option("--max", min=0, help="Replicas at most.")]
Worth = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Replica-minutes at the maximum that one avoided violated minute may cost; 3 by"
        " default.",
    ),
]
Idle = Annotated[
    str | None,
    typer.Option(
        help="Time without requests, as 15m (the default), after which the pool goes to 0, if --min"
        " is 0."
    ),
]
Hold = Annotated[
    str | None,
    typer.Option(
        help="Time, as 5m (the default), that a replica stays after demand last needed it."
    ),
]
Begin = Annotated[
    str | None,
    typer.Option("--from", help="Start of a time range: 6h ago, as 6h; or 2026-11-28T06:00:00Z."),
]
End = Annotated[str | None, typer.Option("--to", help="Like --from. Default: now.")]


def _svg(path: Path | None) -> Path | None:
    if path is not None and path.suffix != ".svg":
        raise typer.BadParameter(f"{path} does not end in .svg")
    return path


Plot = Annotated[
    Path | None,
    typer.Option(help="Draw a picture into this file, *.svg.", callback=_svg, dir_okay=False),
]
Sleepers = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Sleeping replicas per replica of the day's busiest quarter-hour; 0.05 by default if"
        " the engine can sleep.",
    ),
]


@scaling.command("status")
def show_status(*, as_json: AsJson = False) -> None:
    """List the pools that have bounds, with their numbers of replicas."""
    rows = ask(lambda api: api.list("/v1/scaling"))
    if not as_json:
        rows = [row | {"by_role": by_role(row)} for row in rows]
    show_objects(rows, _STATUS, as_json=as_json)


@scaling.command("set")
def set_bounds(
    pool: Pool,
    *,
    least: Least = None,
    most: Most = None,
    minute_worth: Worth = None,
    idle: Idle = None,
    hold: Hold = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a replica per hour.")] = None,
    sleepers: Sleepers = None,
    sleepers_min: Annotated[
        int | None, typer.Option(min=0, help="Sleeping replicas at least.")
    ] = None,
    actuator: Annotated[
        str | None, typer.Option(help="Actuator that adds nodes; '' for none.")
    ] = None,
    per_node: Annotated[
        int | None, typer.Option(min=1, help="Replicas that a node of the actuator takes.")
    ] = None,
    is_on: Annotated[
        bool | None, typer.Option("--on/--off", help="Off: plan, but change nothing.")
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="Bounds of the role prefill, as 1,4 (a least and a greatest number)."),
    ] = None,
    decode: Annotated[str | None, typer.Option(help="Bounds of the role decode.")] = None,
    as_json: AsJson = False,
) -> None:
    """Scale a pool within bounds, or change only the given bounds."""
    of_roles = role_bounds(prefill=prefill, decode=decode)
    changes = given(
        replicas_min=least,
        replicas_max=most,
        minute_worth=minute_worth,
        idle_s=None if idle is None else _seconds(idle, "--idle"),
        hold_s=None if hold is None else _seconds(hold, "--hold"),
        price=price,
        sleepers_share=sleepers,
        sleepers_min=sleepers_min,
        actuator=actuator,
        replicas_per_node=per_node,
        is_on=is_on,
    )

    def change(known: Json) -> Json:
        if most is None and "replicas_max" not in known:
            raise typer.BadParameter(f"pool {pool} has no bounds yet: give --max")
        kept = {name: known[name] for name in _BOUNDS if name in known}
        return kept | changes | {"roles": kept.get("roles", {}) | of_roles}

    _show(ask(lambda api: api.edit(f"/v1/pools/{pool}/scaling", change, {})), as_json=as_json)


@scaling.command("unset")
def unset_bounds(pool: Pool) -> None:
    """Stop scaling a pool. Its present number of replicas stays."""
    ask(lambda api: api.call("DELETE", f"/v1/pools/{pool}/scaling"))


@scaling.command("explain")
def explain(pool: Pool, *, as_json: AsJson = False) -> None:
    """Show the reasons for a pool's present number of replicas."""

    async def find(api: ApiClient) -> Json:
        rows = await api.list("/v1/scaling")
        found = next((row for row in rows if row["pool_id"] == pool), None)
        return await api.call("GET", f"/v1/pools/{pool}/scaling") if found is None else found

    _explain(ask(find), as_json=as_json)


@scaling.command("plan")
def plan(
    pool: Pool,
    *,
    least: Least = None,
    most: Most = None,
    minute_worth: Worth = None,
    is_dry: Annotated[
        bool, typer.Option("--dry-run", help="Only show the plan; the loop keeps its settings.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compute a plan now, with other bounds if given, and show the result."""
    if not is_dry:
        message = "give --dry-run; `sluice scaling set` changes the bounds"
        raise typer.BadParameter(message)
    query = given(replicas_min=least, replicas_max=most, minute_worth=minute_worth)
    found = ask(lambda api: api.call("GET", f"/v1/pools/{pool}/scaling/plan", query=query))
    _explain(found, as_json=as_json)


@scaling.command("replay")
def replay(
    pool: Pool,
    *,
    least: Least = None,
    most: Most = None,
    minute_worth: Worth = None,
    hours: Annotated[int, typer.Option(min=1, max=48, help="Hours of demand to replay.")] = 24,
    day: Annotated[
        str | None,
        typer.Option(
            help="Replay the requests of a day of UTC, as 2026-11-28, that ClickHouse has."
        ),
    ] = None,
    begin: Begin = None,
    end: End = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="File of requests to replay in place of the recorded demand: Azure's CSV,"
            " Mooncake's JSON lines, or an export of the table `requests` as JSONEachRow."
        ),
    ] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Replay the recorded demand of a pool, its requests, or a trace, with other bounds.

    The command changes no pool.
    """
    span = _span(day, begin, end)
    if trace is not None and span:
        raise typer.BadParameter("choose one of --trace and a time range")
    bounds = given(replicas_min=least, replicas_max=most, minute_worth=minute_worth)
    path = f"/v1/pools/{pool}/scaling/replay"
    query = {} if plot is None else {"curves": "true"}
    if trace is None:
        query |= bounds | (span or {"hours": str(hours)})
        found = ask(lambda api: api.call("GET", path, query=query), timeout_s=_REPLAY_TIMEOUT_S)
    else:
        body = bounds | asdict(_curve(trace))
        found = ask(
            lambda api: api.call("POST", path, body, query=query), timeout_s=_REPLAY_TIMEOUT_S
        )
    if plot is not None:
        # Without a time range, the picture counts hours from the start of the demand.
        _draw(plot, _replayed(found), span.get("from", "2000-01-01T00:00:00+00:00"))
    if as_json:
        show_json(found)
        return
    rows = [{"bounds": name, **found[name]} for name in ("present", "asked")]
    show_objects(rows, ("bounds", *_REPLAY), as_json=False)
    if found.get("recorded"):
        typer.echo(
            f"The trace store has {found['recorded']['requests']} requests, and"
            f" {found['recorded']['violation_minutes']} violated minutes."
        )


def _curve(trace: Path) -> TokenCurve:
    try:
        return read_curve(trace)
    except CurveError as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from None


@scaling.command("day")
def show_day(
    pool: Pool,
    *,
    day: Annotated[
        str | None, typer.Option(help="A day of UTC, as 2026-11-28. Default: the last 24 hours.")
    ] = None,
    begin: Begin = None,
    end: End = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Show a day of a pool hour by hour: replicas, demand and violated minutes."""
    path, query = f"/v1/pools/{pool}/scaling/minutes", _span(day, begin, end)
    found = ask(lambda api: api.call("GET", path, query=query), timeout_s=_REPLAY_TIMEOUT_S)
    if plot is not None:
        lines = {name: found[name] for name in _DAY}
        _draw(plot, [Panel(f"Pool {pool}", lines, found["violated"])], found["from"])
    if as_json:
        show_json(found)
        return
    show_objects(hours_of(found), ("hour", *_DAY, "requests", "violated"), as_json=False)
    if found["missing"]:
        typer.echo(f"Requests and violated minutes are missing: {found['missing']}")


def hours_of(found: Json) -> list[Json]:
    """Return a row per hour of a pool's minutes: the greatest numbers, and the mean demand."""
    begin, minutes = datetime.fromisoformat(found["from"]), len(found["wanted"])
    first = 60 - begin.minute
    edges = sorted({0, *range(first, minutes, 60), minutes})
    rows: list[Json] = []
    for start, stop in pairwise(edges):
        known = {name: [it for it in found[name][start:stop] if it is not None] for name in _DAY}
        row: Json = {"hour": (begin + timedelta(minutes=start)).strftime("%Y-%m-%d %H:%M")}
        row |= {name: max(known[name], default=None) for name in _DAY}
        row["demand"] = round(fmean(known["demand"]), 2) if known["demand"] else None
        row |= {name: sum(found[name][start:stop]) for name in ("requests", "violated")}
        if found["missing"]:
            row |= {"requests": None, "violated": None}
        rows.append(row)
    return rows


def _span(day: str | None, begin: str | None, end: str | None) -> dict[str, str]:
    """Return the query of a time range, which is empty if no option names one."""
    if day is None:
        if end is not None and begin is None:
            raise typer.BadParameter("give --from, too", param_hint="--to")
        now = datetime.now(UTC)
        moments = {"from": begin, "to": end}
        return {
            name: since_moment(text, now, f"--{name}") for name, text in moments.items() if text
        }
    if begin is not None or end is not None:
        raise typer.BadParameter("choose one of --day, and --from with --to", param_hint="--day")
    try:
        first = datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise typer.BadParameter(f"{day!r} is no day: 2026-11-28 is", param_hint="--day") from None
    return {"from": first.isoformat(), "to": (first + timedelta(days=1)).isoformat()}


def _replayed(found: Json) -> list[Panel]:
    """Return a chart for the present bounds and one for the given bounds, without their curves."""
    panels: list[Panel] = []
    for name in ("present", "asked"):
        curves = found[name].pop("curves")
        lines = {"demand": found["demand"], "paid": curves["provisioned"], "ready": curves["ready"]}
        panels.append(Panel(f"Replay with the {name} bounds", lines, curves["violated"]))
    found["demand"] = []
    return panels


def _draw(path: Path, panels: list[Panel], begin: str) -> None:
    try:
        path.write_text(picture(panels, datetime.fromisoformat(begin)), encoding="utf-8")
    except OSError as error:
        raise fail(f"{path} cannot be written: {error.strerror}") from None


@scaling.command("pin")
def pin(
    pool: Pool,
    replicas: Annotated[int, typer.Argument(min=0, help="Replicas, whatever the demand.")],
    *,
    for_: Annotated[
        str | None, typer.Option("--for", help="Time, as 2h; default: until `resume`.")
    ] = None,
    prefill: Annotated[
        int | None,
        typer.Option(min=1, help="Replicas that only prefill; default: demand decides."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set a pool's number of replicas by hand."""
    for_s = 0.0 if for_ is None else _seconds(for_, "--for")
    body = {"replicas": replicas, "for_s": for_s} | given(prefill=prefill)
    _post(pool, "pin", body, as_json=as_json)


@scaling.command("pause")
def pause(pool: Pool, *, as_json: AsJson = False) -> None:
    """Pause the scaling of a pool. Its present number of replicas stays."""
    _post(pool, "pause", None, as_json=as_json)


@scaling.command("resume")
def resume(pool: Pool, *, as_json: AsJson = False) -> None:
    """Scale a pool again, after a pause or after its number was set by hand."""
    _post(pool, "resume", None, as_json=as_json)


@scaling.command("history")
def history(
    pool: Pool,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Number of rows, the newest first.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the changes of a pool's number of replicas."""
    path = f"/v1/pools/{pool}/scaling/changes"
    show_objects(ask(lambda api: api.list(path, limit=limit)), _CHANGES, as_json=as_json)


@scaling.command("actuators")
def show_actuators(*, as_json: AsJson = False) -> None:
    """List the actuators of nodes, and the state of their requests."""
    show_objects(
        ask(lambda api: api.list("/v1/scaling/actuators")), _ACTUATOR_FIELDS, as_json=as_json
    )


@scaling.command("budget")
def budget(
    *,
    accelerators: Annotated[
        int | None, typer.Option(min=0, help="Accelerators that replicas of all pools may use.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="Cost per hour of the replicas of all pools.")
    ] = None,
    accelerator_price: Annotated[
        float | None,
        typer.Option(min=0, help="Cost per accelerator and hour in pools without a price."),
    ] = None,
    is_unlimited: Annotated[bool, typer.Option("--unlimited", help="Lift both bounds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the bounds on the sum of all pools, or set the given bounds."""
    changes: Json = given(
        accelerators=accelerators, price=price, accelerator_price=accelerator_price
    )
    if is_unlimited:
        changes = {"accelerators": None, "price": None}
    path = "/v1/scaling/budget"

    async def work(api: ApiClient) -> Json:
        known = await api.call("GET", path)
        return await api.call("PUT", path, known | changes) if changes else known

    _show(ask(work), as_json=as_json)


def _explain(found: Json, *, as_json: bool) -> None:
    if as_json:
        show_json(found)
    else:
        for line in told(found):
            typer.echo(line)


def _post(pool: str, verb: str, body: Json | None, *, as_json: bool) -> None:
    path = f"/v1/pools/{pool}/scaling/{verb}"
    _show(ask(lambda api: api.call("POST", path, body)), as_json=as_json)


def _show(found: Any, *, as_json: bool) -> None:
    if as_json:
        show_json(found)
    else:
        show_fields(found)


def _seconds(text: str, option: str) -> float:
    """Return the seconds of a duration, which is a number followed by s, m, h or d."""
    found = re.fullmatch(r"([0-9]{1,7}(?:\.[0-9]{1,3})?)([smhd])", text.strip())
    if found is None:
        message = f"{text!r} is no duration: 90s, 15m, 2h and 1d are"
        raise typer.BadParameter(message, param_hint=option)
    return float(found[1]) * _UNITS[found[2]]
