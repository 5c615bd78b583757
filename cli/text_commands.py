"""`sluice tenants texts`: commands for the stored, redacted texts of a tenant's requests."""

from typing import Annotated, Any

import typer

from cli.admin import AsJson, Tenant, ask, given
from cli.api import ApiClient, Json
from cli.render import console, show_objects
from cli.stack_commands import fail

texts = typer.Typer(help="Keep texts of requests, redacted; off by default.", no_args_is_help=True)

_SETTINGS = ("is_on", "share_percent", "retention_days", "redacted", "words")
_SHOWN = ("id", *_SETTINGS)


@texts.command("set")
def set_policy(
    tenant: Tenant,
    *,
    is_on: Annotated[
        bool | None, typer.Option("--on/--off", help="Keep texts, or keep no more.")
    ] = None,
    percent: Annotated[
        float | None, typer.Option(min=0, max=100, help="Percent of its requests. Default: 100.")
    ] = None,
    days: Annotated[
        int | None, typer.Option(min=1, max=365, help="Days until texts are deleted. Default: 30.")
    ] = None,
    redact: Annotated[
        list[str] | None,
        typer.Option(
            help="Class to remove (repeat): email, phone, iban, ip; cards and secrets always are."
            " Default: all."
        ),
    ] = None,
    word: Annotated[
        list[str] | None,
        typer.Option(help="Word to remove, too (repeat); replaces the list before."),
    ] = None,
    no_redact: Annotated[
        bool, typer.Option("--no-redact", help="Remove cards and secrets only.")
    ] = False,
    no_words: Annotated[bool, typer.Option("--no-words", help="Remove no words.")] = False,
    as_json: AsJson = False,
) -> None:
    """Opt a tenant in or out, or change the given fields. Gateways apply it within a second."""
    if (redact and no_redact) or (word and no_words):
        raise fail("give only one of --redact and --no-redact, and of --word and --no-words")
    changes = given(
        is_on=is_on,
        share_percent=percent,
        retention_days=days,
        redacted=[] if no_redact else redact or None,
        words=[] if no_words else word or None,
    )

    def change(known: Json) -> Json:
        return {field: known[field] for field in _SETTINGS if field in known} | changes

    made = ask(lambda api: api.edit(f"/v1/text-policies/{tenant}", change, {}))
    show_objects([made], _SHOWN, as_json=as_json)


@texts.command("show")
def show_policies(*, as_json: AsJson = False) -> None:
    """Show the tenants that have a policy for stored texts."""
    show_objects(ask(lambda api: api.list("/v1/text-policies")), _SHOWN, as_json=as_json)


@texts.command("remove")
def remove_policy(tenant: Tenant) -> None:
    """Remove a tenant's policy, so that no more texts are stored. Stored texts expire."""
    ask(lambda api: api.call("DELETE", f"/v1/text-policies/{tenant}"))
    typer.echo(f"removed the text policy of tenant {tenant}")


@texts.command("read")
def read_texts(
    tenant: Tenant,
    request_id: Annotated[str, typer.Argument(help="The answer's header x-request-id.")],
) -> None:
    """Show a request's stored text, and audit the read (see also: sluice trace --text)."""
    show_texts(tenant, request_id)


@texts.command("delete")
def delete_texts(
    tenant: Tenant,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Erase all stored texts of a tenant's requests for good. The tenant's policy stays."""
    if not yes and not typer.confirm(f"Erase all texts of tenant {tenant}?"):
        raise fail("nothing was erased")
    ask(lambda api: api.call("DELETE", f"/v1/tenants/{tenant}/texts"))
    typer.echo(f"erased the texts of tenant {tenant}; rows go from the disk within minutes")


def show_texts(tenant: str, request_id: str) -> None:
    """Show the stored texts of a request, latest first. The audit records the read."""
    out = console()
    for row in ask(lambda api: _read(api, tenant, request_id)):
        taken = ", ".join(f"{kind} {count}" for kind, count in sorted(row["redactions"].items()))
        cut = [name for name in ("prompt", "answer") if row[f"is_{name}_cut"]]
        out.print(f"\ntext of {row['event_id']}, kept until {row['expires_at']}", markup=False)
        out.print(f"  taken out: {taken or 'nothing'}; cut: {', '.join(cut) or 'nothing'}")
        for name in ("prompt", "answers"):
            out.print(f"  {name}: {row[name]}", markup=False, soft_wrap=True, highlight=False)


async def _read(api: ApiClient, tenant: str, request_id: str) -> list[dict[str, Any]]:
    return (await api.call("GET", f"/v1/tenants/{tenant}/texts/{request_id}"))["data"]
