"""`sluice tenants guard`: commands for rules on the content of requests and answers."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.admin import AsJson, Tenant, ask
from cli.api import Json
from cli.render import show_objects
from cli.stack_commands import fail

guard = typer.Typer(
    help="Rules on prompts and answers: blocked, rewritten, marked or counted.",
    no_args_is_help=True,
)

_SETTINGS = (
    *("owner_tenant_id", "models", "keys", "rules", "active_version", "is_withheld_free"),
    *("fence", "fence_tokens", "is_closed_on_failure"),
)
_SHOWN = ("id", "owner_tenant_id", "version", "active_version", "rules", "models", "keys")
GuardSetId = Annotated[str, typer.Argument(help="Name of the set of rules.")]


@guard.command("set")
def set_rules(
    tenant: Tenant,
    set_id: GuardSetId,
    *,
    file: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSON: a list of rules.")],
    model: Annotated[
        list[str] | None, typer.Option(help="For this model alone (repeat). Default: all.")
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="For this key's id alone (repeat). Default: all.")
    ] = None,
    free_withheld: Annotated[
        bool | None,
        typer.Option(help="Whether tokens that its blocks withhold are not billed."),
    ] = None,
    fence: Annotated[
        str | None,
        typer.Option(help="Time that answers wait for classifiers: none, sentence, tokens or end."),
    ] = None,
    fence_tokens: Annotated[
        int | None, typer.Option(help="Tokens at a time, of the fence 'tokens'.")
    ] = None,
    closed_on_failure: Annotated[
        bool | None,
        typer.Option(help="Whether text that no classifier could judge is blocked."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload rules, which only count matches until `promote`. The active version stays."""
    try:
        rules = json.loads(file.read_text())
    except ValueError as error:
        raise fail(f"{file} holds no JSON: {error}") from None
    changes = {"owner_tenant_id": tenant, "rules": rules}
    changes |= {"models": model} if model else {}
    changes |= {"keys": key} if key else {}
    options = {
        "is_withheld_free": free_withheld,
        "fence": fence,
        "fence_tokens": fence_tokens,
        "is_closed_on_failure": closed_on_failure,
    }
    changes |= {name: value for name, value in options.items() if value is not None}

    def change(known: Json) -> Json:
        return _kept(known) | changes

    made = ask(lambda api: api.edit(f"/v1/guard-sets/{set_id}", change, {}))
    _show([made], as_json=as_json)


@guard.command("promote")
def promote_rules(set_id: GuardSetId, *, as_json: AsJson = False) -> None:
    """Let the newest version of a rule set act."""

    def change(known: Json) -> Json:
        return _kept(known) | {"active_version": known["version"]}

    _show([ask(lambda api: api.edit(f"/v1/guard-sets/{set_id}", change))], as_json=as_json)


@guard.command("stop")
def stop_rules(set_id: GuardSetId, *, as_json: AsJson = False) -> None:
    """Let no version of a rule set act. Matches of the newest version are still counted."""

    def change(known: Json) -> Json:
        return _kept(known) | {"active_version": 0}

    _show([ask(lambda api: api.edit(f"/v1/guard-sets/{set_id}", change))], as_json=as_json)


@guard.command("show")
def show_sets(*, as_json: AsJson = False) -> None:
    """Show the rule sets, and the active version of each."""
    _show(ask(lambda api: api.list("/v1/guard-sets")), as_json=as_json)


@guard.command("remove")
def remove_set(set_id: GuardSetId) -> None:
    """Remove a rule set."""
    ask(lambda api: api.call("DELETE", f"/v1/guard-sets/{set_id}"))
    typer.echo(f"removed the rules {set_id}")


def _kept(known: Json) -> Json:
    return {field: known[field] for field in _SETTINGS if field in known}


def _show(sets: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print rule sets. The table shows the number of rules instead of the rules."""
    if not as_json:
        sets = [it | {"rules": len(it["rules"])} for it in sets]
    show_objects(sets, _SHOWN, as_json=as_json)
