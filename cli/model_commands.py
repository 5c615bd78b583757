"""`sluice models`: what can be asked for, under which names."""

from typing import Annotated

import typer

from cli.admin import AsJson, ask
from cli.render import show_objects

models = typer.Typer(help="What can be asked for.", no_args_is_help=True)
alias = typer.Typer(help="Other public names of models and releases.", no_args_is_help=True)
models.add_typer(alias, name="alias")

AliasName = Annotated[str, typer.Argument(metavar="NAME", help="The public name.")]


@models.command("list")
def list_models(*, as_json: AsJson = False) -> None:
    """List the models and what serves them."""
    found = ask(lambda api: api.list("/v1/models"))
    columns = ("id", "pool_id", "release", "owner_tenant_id", "base_digest")
    show_objects(found, columns, as_json=as_json)


@models.command("releases")
def list_releases(
    model: Annotated[str, typer.Argument(help="Only this model's; default: all.")] = "",
    *,
    as_json: AsJson = False,
) -> None:
    """List what models have stood for; each can be asked for by this name."""
    only = {"model_id": model} if model else {}
    found = ask(lambda api: api.list("/v1/releases", **only))
    columns = ("id", "pool_id", "adapter_digest", "base_digest")
    show_objects(found, columns, as_json=as_json)


@alias.command("list")
def list_aliases(*, as_json: AsJson = False) -> None:
    """List the aliases."""
    found = ask(lambda api: api.list("/v1/aliases"))
    show_objects(found, ("id", "target", "owner_tenant_id"), as_json=as_json)


@alias.command("set")
def set_alias(
    name: AliasName,
    target: Annotated[str, typer.Argument(help="A model, or model@release.")],
    *,
    tenant: Annotated[str, typer.Option(help="Who may use it; default: everybody.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create an alias, or let it name something else; requests that run are not touched."""
    body = {"target": target, "owner_tenant_id": tenant}
    made = ask(lambda api: api.call("PUT", f"/v1/aliases/{name}", body))
    show_objects([made], ("id", "target", "owner_tenant_id"), as_json=as_json)


@alias.command("remove")
def remove_alias(name: AliasName) -> None:
    """Remove an alias."""
    ask(lambda api: api.call("DELETE", f"/v1/aliases/{name}"))
    typer.echo(f"removed {name}")
