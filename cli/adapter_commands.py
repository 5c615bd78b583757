"""`sluice adapters`: commands for the adapters of all models, their releases and their nodes."""

import asyncio
import json
import re
from typing import Annotated, Any

import typer

from cli.admin import AsJson, ask, given
from cli.api import ApiClient, ApiError, Json
from cli.artifact_commands import publish
from cli.downloads import fetch_file, find_manifest
from cli.render import show_fields, show_json, show_objects, size_text

adapters = typer.Typer(help="Adapters across models, and their nodes.", no_args_is_help=True)

_LISTED = (
    *("adapter", "base", "rank", "size", "releases", "promoted", "tenants", "nodes"),
    "is_pinned",
)
_CONFIG = "adapter_config.json"
_SHORT = 12  # digits of a digest in tables, enough to distinguish the adapters of a platform
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{4,63}")
_JOBS = 8

Adapter = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER",
        help="Digest or its first 4 digits or more, MODEL@VERSION, or MODEL.",
    ),
]


@adapters.command("list")
def list_adapters(
    *,
    model: Annotated[
        str | None, typer.Option(help="Only adapters of this model's releases.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Only adapters for this base (digest).")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only adapters of this tenant.")] = None,
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks", help="Also read the configuration of each: 2 requests per adapter."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the adapters with their bases, sizes, releases, tenants and numbers of nodes.

    Column `promoted` names the models that serve the adapter now. Column `nodes` counts the nodes
    that have a complete copy on disk.
    """
    query = given(model_id=model, base_digest=base, tenant_id=tenant)

    async def work(api: ApiClient) -> list[Json]:
        found = await api.list("/v1/adapters", **query)
        return await _with_configs(api, found) if ranks else found

    found = ask(work)
    columns = _LISTED if ranks else tuple(name for name in _LISTED if name != "rank")
    show_objects(found if as_json else [_row(row) for row in found], columns, as_json=as_json)


@adapters.command("show")
def show_adapter(adapter: Adapter, *, as_json: AsJson = False) -> None:
    """Show the configuration of an adapter, its releases, and the nodes that have a copy."""

    async def work(api: ApiClient) -> Json:
        digest = await _digest(api, adapter)
        found = await api.call("GET", f"/v1/adapters/{digest}")
        (found,) = await _with_configs(api, [found])
        return found | {"nodes": await _nodes(api, digest)}

    found = ask(work)
    if as_json:
        show_json(found)
        return
    nodes = found["nodes"]
    told = "hidden from this key" if nodes is None else [row["id"] for row in nodes]
    tenants = ["everybody"] * found["is_public"] + found["tenant_ids"]
    shown = {name: found[name] for name in found if name not in ("is_public", "node_count")}
    size = size_text(found["size_bytes"])
    show_fields(shown | {"size_bytes": size, "tenant_ids": tenants, "nodes": told})


@adapters.command("remove")
def remove_adapter(
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="MODEL@VERSION|DIGEST",
            help="A version; or an adapter that no version uses any more.",
        ),
    ],
    *,
    tenant: Annotated[
        str, typer.Option(help="Owner of a DIGEST; default: the key's tenant, else all tenants.")
    ] = "",
) -> None:
    """Remove a version of a model, or an uploaded adapter that no version uses.

    The command is refused while a model serves the version, an alias names it or a rollout has it.
    The bytes are deleted when no object needs them any more (see: sluice artifacts gc).
    """
    if "@" in adapter:
        ask(lambda api: api.call("DELETE", f"/v1/releases/{adapter}"))
    else:

        async def work(api: ApiClient) -> None:
            digest = await _digest(api, adapter)
            query = {"tenant_id": tenant} if tenant else None
            await api.call("DELETE", f"/v1/artifacts/{digest}", query=query)

        ask(work)
    typer.echo(f"removed {adapter}")


async def _digest(api: ApiClient, adapter: str) -> str:
    """Return the digest of an adapter, which is named by model, by release or by digest.

    Raises:
        ApiError: There is no such adapter, or the name is ambiguous.
    """
    if _DIGEST.fullmatch(adapter):
        return adapter
    if "@" in adapter:
        found = await api.call("GET", f"/v1/releases/{adapter}")
    elif (model := await api.find(f"/v1/models/{adapter}")) is not None:
        found = model
    else:
        return await _of_prefix(api, adapter)
    if not found["adapter_digest"]:
        raise ApiError(f"{adapter} has no adapter: it is its base alone")
    return found["adapter_digest"]


async def _of_prefix(api: ApiClient, prefix: str) -> str:
    if not _PREFIX.fullmatch(prefix):
        message = f"there is no model {prefix}, and it is no digest of 4 digits or more"
        raise ApiError(f"{message}; see: sluice adapters list")
    every = await api.list("/v1/adapters")
    digests = [row["digest"] for row in every if row["digest"].startswith(prefix)]
    if not digests:
        raise ApiError(f"no adapter begins with {prefix}; see: sluice adapters list")
    if len(digests) > 1:
        raise ApiError(f"give more digits: {prefix} are the first of {', '.join(digests)}")
    return digests[0]


async def _nodes(api: ApiClient, digest: str) -> list[Json] | None:
    """Return the nodes that have an artifact, or None if the key may not list them."""
    try:
        return await api.list(f"/v1/artifacts/{digest}/nodes")
    except ApiError as error:
        if error.status != 403:
            raise
        return None


async def _with_configs(api: ApiClient, found: list[Json]) -> list[Json]:
    """Return adapters with rank, alpha and targets, which are None without an upload."""
    waiting = list(enumerate(found))
    made = list(found)

    async def work() -> None:
        while waiting:
            index, row = waiting.pop()
            config = await _config(api, row["digest"]) if row["is_uploaded"] else {}
            names = {"rank": "r", "alpha": "lora_alpha", "target_modules": "target_modules"}
            made[index] = row | {name: config.get(key) for name, key in names.items()}

    # gather instead of a TaskGroup, which would hide the error's message in an ExceptionGroup.
    for outcome in await asyncio.gather(*(work() for _ in range(_JOBS)), return_exceptions=True):
        if outcome is not None:
            raise outcome
    return made


async def _config(api: ApiClient, digest: str) -> dict[str, Any]:
    manifest = await find_manifest(api, digest)
    return json.loads(await fetch_file(api, manifest, _CONFIG))


def _row(row: Json) -> Json:
    """Return an adapter in the form for people, with only the first digits of digests."""
    tenants = ["everybody"] * row["is_public"] + row["tenant_ids"]
    return row | {
        "adapter": row["digest"][:_SHORT],
        "base": [digest[:_SHORT] for digest in row["base_digests"]],
        "size": size_text(row["size_bytes"]),
        "tenants": tenants,
        "nodes": row["node_count"],
    }


adapters.command("publish")(publish)
