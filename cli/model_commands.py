"""`sluice models`: commands for the models, aliases and releases that requests can name."""

from pathlib import Path
from typing import Annotated

import typer

from cli.admin import AsJson, ask, delete_one, given, show_one
from cli.api import Json
from cli.artifact_commands import publish
from cli.render import show_objects

models = typer.Typer(help="Models, by public name.", no_args_is_help=True)
alias = typer.Typer(help="Other public names of models and releases.", no_args_is_help=True)
base = typer.Typer(help="Weights of models.", no_args_is_help=True)
pools = typer.Typer(help="Several pools behind one model.", no_args_is_help=True)
warm = typer.Typer(help="System prompts that stay in the caches.", no_args_is_help=True)
models.add_typer(alias, name="alias")
models.add_typer(base, name="base")
models.add_typer(warm, name="warm")
models.add_typer(pools, name="pools")

_SHOWN = ("id", "pool_id", "release", "owner_tenant_id", "base_digest")
_READ_ONLY = ("id", "previous_release", "created_at_unix_s")
_BASE = ("digest", "name", "context_tokens_max")

Model = Annotated[str, typer.Argument(help="Public name of a model.")]
Digest = Annotated[str, typer.Argument(help="SHA-256 of the base's files.")]
Pool = Annotated[str | None, typer.Option(help="Id of the pool that serves it.")]
Adapter = Annotated[
    str | None, typer.Option(help="Digest of the adapter on the base; '' for none.")
]
Release = Annotated[
    str | None, typer.Option(help="Name of the release; default: after the digests.")
]

AliasName = Annotated[str, typer.Argument(metavar="NAME", help="The public name.")]


@models.command("list")
def list_models(*, as_json: AsJson = False) -> None:
    """List the models with their pools and artifacts."""
    show_objects(ask(lambda api: api.list("/v1/models")), _SHOWN, as_json=as_json)


@models.command("show")
def show_model(
    model: Annotated[str, typer.Argument(metavar="MODEL[@RELEASE]", help="Public name.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Show a model, or one of its releases."""
    kind = "releases" if "@" in model else "models"
    show_one(f"/v1/{kind}/{model}", as_json=as_json)


@models.command("create")
def create_model(
    model: Model,
    *,
    base_digest: Annotated[
        str, typer.Option("--base", help="Digest of its base; see: sluice models base list.")
    ],
    pool: Annotated[str, typer.Option(help="Id of the pool that serves it.")],
    adapter: Adapter = None,
    release: Release = None,
    tenant: Annotated[
        str | None, typer.Option(help="Tenant that may use it; default: all tenants.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a model, or change its artifacts. The new artifacts become a release."""
    changes = given(base_digest=base_digest, pool_id=pool, owner_tenant_id=tenant)
    _put(model, changes, adapter, release, as_json=as_json, new={})


@models.command("update")
def update_model(
    model: Model,
    *,
    base_digest: Annotated[str | None, typer.Option("--base", help="Digest of its base.")] = None,
    pool: Pool = None,
    adapter: Adapter = None,
    release: Release = None,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a model. Its present artifacts become a release."""
    changes = given(base_digest=base_digest, pool_id=pool)
    _put(model, changes, adapter, release, as_json=as_json)


@models.command("delete")
def delete_model(model: Model) -> None:
    """Delete a model with its releases, unless aliases name it."""
    delete_one(f"/v1/models/{model}", f"model {model}")


@models.command("forget")
def forget_release(
    release: Annotated[str, typer.Argument(metavar="MODEL@RELEASE", help="Name of the release.")],
) -> None:
    """Delete a release, unless its model serves it or an alias names it."""
    delete_one(f"/v1/releases/{release}", f"release {release}")


@models.command("releases")
def list_releases(
    model: Annotated[str, typer.Argument(help="Only releases of this model; default: all.")] = "",
    *,
    as_json: AsJson = False,
) -> None:
    """List the releases of models. Requests can name each of them."""
    only = {"model_id": model} if model else {}
    found = ask(lambda api: api.list("/v1/releases", **only))
    columns = ("id", "pool_id", "adapter_digest", "base_digest")
    show_objects(found, columns, as_json=as_json)


@alias.command("list")
def list_aliases(*, as_json: AsJson = False) -> None:
    """List the aliases."""
    found = ask(lambda api: api.list("/v1/aliases"))
    show_objects(found, ("id", "target", "owner_tenant_id"), as_json=as_json)


@alias.command("show")
def show_alias(name: AliasName, *, as_json: AsJson = False) -> None:
    """Show the target of an alias."""
    show_one(f"/v1/aliases/{name}", as_json=as_json)


@alias.command("set")
def set_alias(
    name: AliasName,
    target: Annotated[str, typer.Argument(help="A model, or model@release.")],
    *,
    tenant: Annotated[str, typer.Option(help="Tenant that may use it; default: all tenants.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create an alias, or change its target. Running requests are not affected."""
    body = {"target": target, "owner_tenant_id": tenant}
    made = ask(lambda api: api.call("PUT", f"/v1/aliases/{name}", body))
    show_objects([made], ("id", "target", "owner_tenant_id"), as_json=as_json)


@alias.command("remove")
def remove_alias(name: AliasName) -> None:
    """Remove an alias."""
    ask(lambda api: api.call("DELETE", f"/v1/aliases/{name}"))
    typer.echo(f"removed {name}")


@warm.command("list")
def list_warm_prompts(*, as_json: AsJson = False) -> None:
    """List the models with warm prompts."""
    show_objects(ask(lambda api: api.list("/v1/warm-prompts")), ("id", "prompts"), as_json=as_json)


@warm.command("show")
def show_warm_prompts(model: Model, *, as_json: AsJson = False) -> None:
    """Show the warm prompts of a model."""
    show_one(f"/v1/warm-prompts/{model}", as_json=as_json)


@warm.command("set")
def set_warm_prompts(
    model: Model,
    file: Annotated[
        list[Path],
        typer.Option(exists=True, dir_okay=False, help="Text of a system prompt; may be repeated."),
    ],
) -> None:
    """Cache system prompts of a model in its engines, each for an hour after its last use."""
    body = {"prompts": [it.read_text() for it in file]}
    ask(lambda api: api.call("PUT", f"/v1/warm-prompts/{model}", body))
    typer.echo(f"{len(file)} warm prompt{'s' * (len(file) > 1)} of {model}")


@warm.command("remove")
def remove_warm_prompts(model: Model) -> None:
    """Let the caches evict the system prompts of a model like any other prompt."""
    delete_one(f"/v1/warm-prompts/{model}", f"the warm prompts of {model}")


@pools.command("list")
def list_model_pools(*, as_json: AsJson = False) -> None:
    """List the models that several pools serve."""
    show_objects(ask(lambda api: api.list("/v1/model-pools")), ("id", "pools"), as_json=as_json)


@pools.command("show")
def show_model_pools(model: Model, *, as_json: AsJson = False) -> None:
    """Show the pools of a model."""
    show_one(f"/v1/model-pools/{model}", as_json=as_json)


@pools.command("set")
def set_model_pools(
    model: Model,
    pool: Annotated[
        list[str],
        typer.Argument(
            metavar="POOL[=WEIGHT[,PRICE]]...", help="All pools of the model, including its own."
        ),
    ],
    *,
    other_base: Annotated[
        list[str] | None,
        typer.Option(help="A pool of another quantisation of the model's base; may be repeated."),
    ] = None,
) -> None:
    """Let several pools serve a model, chosen by predicted wait, price and weight.

    Requests of one session stay in one pool.
    """
    entries = [_model_pool(text) for text in pool]
    entries += [_model_pool(text) | {"is_other_base": True} for text in other_base or ()]
    ask(lambda api: api.call("PUT", f"/v1/model-pools/{model}", {"pools": entries}))
    typer.echo(f"{len(entries)} pools serve {model}")


@pools.command("remove")
def remove_model_pools(model: Model) -> None:
    """Let only a model's own pool serve the model again."""
    delete_one(f"/v1/model-pools/{model}", f"the pools of {model}")


def _model_pool(text: str) -> Json:
    """Return the pool entry that `POOL[=WEIGHT[,PRICE]]` denotes."""
    name, _, factors = text.partition("=")
    try:
        weight, _, price = factors.partition(",")
        numbers = given(weight=float(weight or 1), price=float(price or 1))
    except ValueError:
        message = f"{text}: POOL=WEIGHT or POOL=WEIGHT,PRICE is expected"
        raise typer.BadParameter(message) from None
    return {"pool_id": name, **numbers}


@base.command("list")
def list_bases(*, as_json: AsJson = False) -> None:
    """List the bases."""
    show_objects(ask(lambda api: api.list("/v1/bases")), _BASE, as_json=as_json)


@base.command("show")
def show_base(digest: Digest, *, as_json: AsJson = False) -> None:
    """Show a base."""
    show_one(f"/v1/bases/{digest}", as_json=as_json)


@base.command("set")
def set_base(
    digest: Digest,
    *,
    context_tokens_max: Annotated[
        int, typer.Option(min=0, help="Tokens of prompt and answer together.")
    ],
    name: Annotated[str, typer.Option(help="Name, for people.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a base, whose files the nodes already have, or change its description."""
    body = {"name": name, "context_tokens_max": context_tokens_max}
    made = ask(lambda api: api.call("PUT", f"/v1/bases/{digest}", body))
    show_objects([made], _BASE, as_json=as_json)


@base.command("delete")
def delete_base(digest: Digest) -> None:
    """Delete a base, unless pools or models use it."""
    delete_one(f"/v1/bases/{digest}", f"base {digest}")


def _put(
    model: str,
    changes: Json,
    adapter: str | None,
    release: str | None,
    *,
    as_json: bool,
    new: Json | None = None,
) -> None:
    """Write a model with changed fields, or create it from `new` if it is missing."""
    changes = changes | given(adapter_digest=adapter)

    def change(known: Json) -> Json:
        kept = {name: known[name] for name in known if name not in _READ_ONLY}
        changed = kept | changes
        # A release never changes its digests, so a model with other digests needs another release.
        is_same = all(
            changed.get(part) == known.get(part) for part in ("base_digest", "adapter_digest")
        )
        named = release if release is not None else (known.get("release", "") if is_same else "")
        return changed | {"release": named}

    made = ask(lambda api: api.edit(f"/v1/models/{model}", change, new))
    show_objects([made], _SHOWN, as_json=as_json)


models.command("publish")(publish)
