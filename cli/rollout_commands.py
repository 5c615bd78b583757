"""`sluice rollouts`: starts, watches and ends the staged move of traffic to a release."""

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cli.admin import AsJson, ask, given
from cli.api import ApiClient, ApiError, Json
from cli.plan_files import read_plan
from cli.render import console, duration, show_fields, show_json, show_objects, show_table

rollouts = typer.Typer(help="Releases on their way to all requests.", no_args_is_help=True)

_STANDS = ("phase", "reason", "stage", "explanation", "problem")
_SHOWN = ("id", "model_id", "canary", "phase", "reason", "stage", "share_percent", "explanation")
_EVENTS = ("at", "event", "actor_id", "phase", "reason", "stage", "share_percent", "detail")
_STAGES = ("share_percent", "duration_min_s", "sample_min", "duration_max_s", "is_shadow")
_POLL_S = 0.5
_LOST_S_MAX = 60.0  # seconds without an answer, well above the time to replace a control plane
_ROLLOUT = re.compile(r"rollout_[0-9a-z]{26}")
_UNKNOWN_STATUS = 3  # exit status, because 2 means wrong words on the command line

Id = Annotated[
    str,
    typer.Argument(metavar="ROLLOUT|MODEL", help="Id of a rollout, or a model: its latest one."),
]
Model = Annotated[str, typer.Argument(help="Public name of a model.")]
File = Annotated[
    Path | None,
    typer.Option("--plan", exists=True, dir_okay=False, help="JSON; default: the model's plan."),
]


@rollouts.command("start")
def start_rollout(
    model: Model,
    release: Annotated[str, typer.Argument(help="Name of one of its releases.")],
    *,
    plan: File = None,
    later: Annotated[
        bool, typer.Option("--later", help="Only plan the rollout; see: launch.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Roll a release of a model out, in stages."""
    body = {"model_id": model, "release": release, "is_started": not later}
    body |= given(plan=None if plan is None else read_plan(plan))
    _show(ask(lambda api: api.call("POST", "/v1/rollouts", body)), as_json=as_json)


@rollouts.command("list")
def list_rollouts(
    *,
    model: Annotated[str | None, typer.Option(help="Only rollouts of this model.")] = None,
    phase: Annotated[
        str | None, typer.Option(help="planned, shadow, running, paused, halted, done, ...")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the rollouts, newest first."""
    only = given(model_id=model, phase=phase)
    show_objects(ask(lambda api: api.list("/v1/rollouts", **only)), _SHOWN, as_json=as_json)


@rollouts.command("show")
def show_rollout(rollout: Id, *, as_json: AsJson = False) -> None:
    """Show the stage of a rollout, and the counts of each gate."""

    async def work(api: ApiClient) -> Json:
        return await api.call("GET", await _path(api, rollout))

    _show(ask(work), as_json=as_json)


@rollouts.command("events")
def list_events(rollout: Id, *, as_json: AsJson = False) -> None:
    """List the events of a rollout."""

    async def work(api: ApiClient) -> list[Json]:
        return await api.list(f"{await _path(api, rollout)}/events")

    found = ask(work)
    show_objects(found, _EVENTS, as_json=as_json)


@rollouts.command("watch")
def watch_rollout(rollout: Id, *, as_json: AsJson = False) -> None:
    """Print the progress of a rollout until it ends.

    Exit status 0 means promoted, 1 not promoted, and 3 an unknown state for a minute.
    """
    found = ask(lambda api: _follow(api, rollout, as_json=as_json), status=_UNKNOWN_STATUS)
    if found["phase"] != "done":
        raise typer.Exit(1)


@rollouts.command("launch")
def launch_rollout(rollout: Id, *, as_json: AsJson = False) -> None:
    """Start a rollout that is planned."""
    _command(rollout, "start", as_json=as_json)


@rollouts.command("pause")
def pause_rollout(rollout: Id, *, as_json: AsJson = False) -> None:
    """Pause a rollout. Its share of traffic stays, and the gates still watch it."""
    _command(rollout, "pause", as_json=as_json)


@rollouts.command("resume")
def resume_rollout(rollout: Id, *, as_json: AsJson = False) -> None:
    """Continue a paused rollout."""
    _command(rollout, "resume", as_json=as_json)


@rollouts.command("abort")
def abort_rollout(rollout: Id, *, as_json: AsJson = False) -> None:
    """End a rollout, and send all traffic to control again."""
    _command(rollout, "abort", as_json=as_json)


@rollouts.command("promote")
def promote_rollout(
    rollout: Id,
    *,
    stage: Annotated[
        int | None, typer.Option(min=0, help="Stage; default: the present one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """End the present stage of a rollout early. No later stage is skipped."""

    async def work(api: ApiClient) -> Json:
        path = await _path(api, rollout)
        seen = stage if stage is not None else max(0, (await api.call("GET", path))["stage"])
        return await api.call("POST", f"{path}/promote", {"stage": seen})

    _show(ask(work), as_json=as_json)


@rollouts.command("plan")
def plan_rollouts(
    model: Model,
    *,
    file: Annotated[
        Path | None,
        typer.Option("--set", exists=True, dir_okay=False, help="JSON of the plan."),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Back to the default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show or set the plan of a model's rollouts. Running rollouts continue with their plan."""
    path = f"/v1/models/{model}/rollout-plan"
    if file is not None and default:
        raise typer.BadParameter("exclude each other: choose one", param_hint="--set, --default")
    body = None if file is None else read_plan(file)

    async def work(api: ApiClient) -> Json:
        if body is not None:
            return await api.call("PUT", path, body)
        if default:
            await api.call("DELETE", path)
        return await api.call("GET", path)

    found = ask(work)
    if as_json:
        show_json(found)
        return
    plan = found["plan"]
    show_objects([_whole(stage) for stage in plan["stages"]], _STAGES, as_json=False)
    show_objects(plan["gates"], ("metric", "tolerated_percent", "sample_min"), as_json=False)
    rest = {name: plan[name] for name in plan if name not in ("stages", "gates")}
    show_fields({"model_id": model, "is_default": found["is_default"]} | _whole(rest))


def _whole(found: Json) -> Json:
    """Return whole numbers of seconds as integers, so that 86400 is not shown as 8.64e+04."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in found.items()
    }


def roll_back(
    model: Model,
    *,
    to: Annotated[
        str | None, typer.Option(help="A release of the model; default: the one before.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Abort a model's rollout, or else serve its previous release again, at once."""
    body = given(release=to)
    found = ask(lambda api: api.call("POST", f"/v1/models/{model}/rollback", body))
    if as_json:
        show_json(found)
    elif found["aborted_rollout_id"]:
        typer.echo(
            f"{model} stays {found['release']}: rollout {found['aborted_rollout_id']} is aborted"
        )
    else:
        typer.echo(f"{model} serves {found['release']}; before: {found['previous_release']}")


def _command(rollout: str, command: str, *, as_json: bool) -> None:
    async def work(api: ApiClient) -> Json:
        return await api.call("POST", f"{await _path(api, rollout)}/{command}")

    _show(ask(work), as_json=as_json)


async def _path(api: ApiClient, name: str) -> str:
    """Return the path of a rollout, which is named by its id or by its model.

    Raises:
        ApiError: The model has no rollout.
    """
    if _ROLLOUT.fullmatch(name):
        return f"/v1/rollouts/{name}"
    latest = await api.list("/v1/rollouts", model_id=name, limit=1)
    if not latest:
        raise ApiError(f"model {name} has no rollout; see: sluice rollouts list", 404)
    return f"/v1/rollouts/{latest[0]['id']}"


def _show(found: Json, *, as_json: bool) -> None:
    if as_json:
        show_json(found)
        return
    told = ("id", "model_id", "control", "canary", "phase", "reason", "explanation")
    fields = {name: found[name] for name in told}
    fields |= {name: found[name] for name in ("waiting_for", "problem") if found.get(name)}
    if trials := found.get("trials"):
        told_by = (f"{it['node_id']}: {it['message'] or it['code'] or 'loaded'}" for it in trials)
        fields["trials"] = "; ".join(told_by)
    fields |= {"stage": _stage(found), "share": _percent(found), "seen": _seen(found)}
    show_fields(fields | given(left_of_stage=_left(found)))
    for past in found.get("past_stages", ()):
        counts = f"{past['sample']:,} and {past['control_sample']:,} requests"
        seen = f"{past['watched_s']:.0f} s, {counts}"
        _show_gates(past["gates"], f"stage {past['stage']}, {_percent(past)}: {seen}")
    if any(gate[side]["total"] for gate in found["gates"] for side in ("canary", "control")):
        _show_gates(found["gates"], f"stage {found['stage']}, {_percent(found)}: {_seen(found)}")


def _show_gates(gates: list[Json], title: str) -> None:
    """Print the evidence of the gates in a stage."""
    rows = [
        (
            gate["metric"],
            *(
                f"{gate[side]['bad']:,} of {gate[side]['total']:,}"
                if gate[side]["total"]
                else "not measured"
                for side in ("canary", "control")
            ),
            f"{gate['tolerated_percent']:g} %",
            f"10^{gate['e_value_log10']:.1f} of 10^{gate['e_value_needed_log10']:.1f}",
            "-" if (rate := gate.get("detectable_percent")) is None else f"{rate:g} %",
        )
        for gate in gates
    ]
    if rows:
        console().print(title, highlight=False)
        columns = ("gate", "canary", "control", "tolerated", "evidence", "finds")
        show_table(columns, rows, right="canary control tolerated finds")


def _stage(found: Json) -> str:
    """Return the stage's number, which is counted from 0 as in plans and explanations."""
    last = found["stages"] - 1
    return f"none yet (0 to {last})" if found["stage"] < 0 else f"{found['stage']} (0 to {last})"


def _percent(found: Json) -> str:
    copied = found["mirrored_percent"]
    return f"{found['share_percent']:g} %" + (f", copies of {copied:g} %" if copied else "")


def _left(found: Json) -> str | None:
    """Return the remaining time of the stage at the present pace, or None without progress."""
    left_s = found.get("stage_left_s")
    return None if left_s is None else f"about {duration(left_s)}"


def _seen(found: Json) -> str:
    return (
        f"{found['watched_s']:.0f} s of {found['watched_needed_s']:.0f} s,"
        f" {found['sample']:,} and {found['control_sample']:,} requests"
        f" of {found['sample_needed']:,}"
    )


async def _follow(api: ApiClient, rollout: str, *, as_json: bool) -> Json:
    """Print a line per change of a rollout until it has ended, then return the rollout."""
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[seen]}"))
    err = console(stderr=True)
    told: tuple[object, ...] = ()
    path = await _path(api, rollout)
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task("", seen="")
        while True:
            found = await _polled(api, path)
            total = found["watched_needed_s"] or 1
            progress.update(
                bar,
                description=f"stage {_stage(found)}",
                total=total,
                completed=min(found["watched_s"], total),
                seen=_seen(found) + (f", left: {left}" if (left := _left(found)) else ""),
            )
            stands = tuple(found.get(name, "") for name in _STANDS)
            if stands != told:
                told = stands
                sys.stdout.write((json.dumps(found) if as_json else _line(found)) + "\n")
                sys.stdout.flush()
            if found["ended_at"]:
                return found
            await asyncio.sleep(_POLL_S)


async def _polled(api: ApiClient, path: str) -> Json:
    """Return an object, and retry for a minute if the server does not answer."""
    until_s = time.monotonic() + _LOST_S_MAX
    while True:
        try:
            return await api.call("GET", path)
        except ApiError as error:
            if 0 < error.status < 500 or time.monotonic() >= until_s:
                raise
        await asyncio.sleep(_POLL_S)


def _line(found: Json) -> str:
    reasons = (found["explanation"], found.get("waiting_for", ""), found.get("problem", ""))
    why = "".join(f": {reason}" for reason in reasons if reason)
    return f"{found['phase']}, stage {_stage(found)}, share {_percent(found)}{why}"
