"""`sluice alerts`, `sluice incidents`: commands for alerts, silences, notices and incidents."""

import re
from typing import Annotated

import typer

from cli.admin import AsJson, ask, given, show_one
from cli.render import show_fields, show_json, show_objects, show_table
from cli.stack_commands import fail

alerts = typer.Typer(
    help="Alerts, their acknowledgements, silences and receivers.", no_args_is_help=True
)
incidents = typer.Typer(help="Incidents, from the page to their report.", no_args_is_help=True)

_ALERTS = ("id", "name", "rank", "is_firing", "is_silenced", "starts_at", "acknowledged_by")
_SILENCES = ("id", "matchers", "reason", "created_by", "ends_at")
_NOTICE_FIELDS = ("receiver", "group_key", "status", "state", "attempts", "told_at", "error")
_INCIDENTS = ("id", "title", "is_open", "opened_at", "closed_at", "closed_by")
_MATCHER = re.compile(r"([a-zA-Z_]\w*)(=~|!~|!=|=)(.*)", re.DOTALL)
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}

AlertId = Annotated[str, typer.Argument(help="Id of an alert, as `sluice alerts list` shows it.")]
IncidentId = Annotated[str, typer.Argument(help="Id of an incident.")]
Text = Annotated[str, typer.Argument(help="Note, in your words.")]


@alerts.command("list")
def list_alerts(
    *,
    is_firing: Annotated[
        bool | None, typer.Option("--firing/--over", help="Only alerts in this state.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Severity of the rule.")] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of rows, the newest first.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """List alerts, the newest first."""
    firing = None if is_firing is None else str(is_firing).lower()
    query = given(is_firing=firing, name=name, limit=limit)
    show_objects(ask(lambda api: api.list("/v1/alerts", **query)), _ALERTS, as_json=as_json)


@alerts.command("show")
def show_alert(alert: AlertId, *, as_json: AsJson = False) -> None:
    """Show an alert with its labels, its meaning and its runbook."""
    show_one(f"/v1/alerts/{alert}", as_json=as_json)


@alerts.command("acknowledge")
def acknowledge(
    alert: AlertId, *, note: Annotated[str, typer.Option(help="Note, shown to others.")] = ""
) -> None:
    """Acknowledge an alert, which stops its repeated notices to all receivers."""
    ask(lambda api: api.call("POST", f"/v1/alerts/{alert}/acknowledge", {"note": note}))
    typer.echo(f"acknowledged {alert}")


@alerts.command("silence")
def silence(
    matchers: Annotated[
        list[str],
        typer.Argument(
            metavar="LABEL=VALUE...",
            help="Labels of an alert, all of which must match; also !=, =~ and !~.",
        ),
    ],
    *,
    for_: Annotated[str, typer.Option("--for", help="Length: 30m, 2h, 7d.")] = "2h",
    reason: Annotated[str, typer.Option(help="Reason, shown to others.")],
    as_json: AsJson = False,
) -> None:
    """Silence alerts for a while, e.g. during planned work."""
    body = {
        "matchers": [matcher_of(word) for word in matchers],
        "duration_s": seconds_of(for_),
        "reason": reason,
    }
    made = ask(lambda api: api.call("POST", "/v1/alert-silences", body))
    show_objects([made], _SILENCES, as_json=as_json)


@alerts.command("silences")
def list_silences(*, as_json: AsJson = False) -> None:
    """List silences, also ended ones, the newest first."""
    show_objects(ask(lambda api: api.list("/v1/alert-silences")), _SILENCES, as_json=as_json)


@alerts.command("unsilence")
def unsilence(silence_id: Annotated[str, typer.Argument(help="Id of a silence.")]) -> None:
    """End a silence."""
    ask(lambda api: api.call("DELETE", f"/v1/alert-silences/{silence_id}"))
    typer.echo(f"ended {silence_id}")


@alerts.command("try")
def try_receivers(
    *,
    severity: Annotated[
        str, typer.Option(help="Rank, which decides the receivers: P1, P2 or P3.")
    ] = "P3",
) -> None:
    """Let a test alert fire for five minutes, to test its receivers (see: sluice alerts told).

    A test alert of severity P1 pages people, and opens an incident.
    """
    labels = {"alertname": "TryOut", "severity": severity}
    alert = {"labels": labels, "annotations": {"summary": "A test of the receivers of alerts"}}
    ask(lambda api: api.report_alerts([alert]))
    typer.echo("TryOut fires; receivers get it in about 10 s, and its end in 5 minutes")


@alerts.command("told")
def told(*, as_json: AsJson = False) -> None:
    """List the last notice of each group of alerts to each receiver, and its outcome."""
    show_objects(
        ask(lambda api: api.list("/v1/alert-notifications")), _NOTICE_FIELDS, as_json=as_json
    )


@incidents.command("list")
def list_incidents(
    *,
    is_open: Annotated[
        bool | None, typer.Option("--open/--closed", help="Only incidents in this state.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List incidents, the newest first."""
    query = {} if is_open is None else {"is_open": str(is_open).lower()}
    found = ask(lambda api: api.list("/v1/incidents", **query))
    show_objects(found, _INCIDENTS, as_json=as_json)


@incidents.command("show")
def show_incident(incident: IncidentId, *, as_json: AsJson = False) -> None:
    """Show an incident and its events, in order."""
    found = ask(lambda api: api.call("GET", f"/v1/incidents/{incident}"))
    if as_json:
        show_json(found)
        return
    events = found.pop("events")
    show_fields(found)
    rows = [(it["at"][:19], it["kind"], it["text"], it["actor"] or "-") for it in events]
    show_table(("at", "kind", "text", "by"), rows)


@incidents.command("note")
def note(incident: IncidentId, text: Text) -> None:
    """Add a note to an incident."""
    ask(lambda api: api.call("POST", f"/v1/incidents/{incident}/notes", {"text": text}))
    typer.echo(f"noted in {incident}")


@incidents.command("close")
def close(incident: IncidentId, text: Text) -> None:
    """Close an incident with its cause and its repair."""
    ask(lambda api: api.call("POST", f"/v1/incidents/{incident}/close", {"text": text}))
    typer.echo(f"closed {incident}")


def matcher_of(word: str) -> dict[str, str]:
    """Return the label matcher that a word of the command line denotes."""
    found = _MATCHER.fullmatch(word)
    if found is None:
        raise fail(f"{word!r} is no LABEL=VALUE (or !=, =~, !~)", 2)
    name, operator, value = found.groups()
    return {"name": name, "operator": operator, "value": value}


def seconds_of(text: str) -> int:
    """Return the seconds of a duration like `30m`, `2h` or `7d`."""
    if not (text[:-1].isdigit() and text[-1:] in _UNITS_S):
        raise fail(f"{text!r} is no time like 30m, 2h or 7d", 2)
    return int(text[:-1]) * _UNITS_S[text[-1]]
