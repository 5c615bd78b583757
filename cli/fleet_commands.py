"""`sluice fleet`: pools, and what is observed of cells, replicas, nodes and routers."""

from typing import Annotated

import typer

from cli.admin import AsJson, ask, delete_one, given, show_one
from cli.api import Json
from cli.render import show_objects

fleet = typer.Typer(help="Pools, cells, replicas, nodes and routers.", no_args_is_help=True)
pool = typer.Typer(help="Replicas with one base and engine.", no_args_is_help=True)
fleet.add_typer(pool, name="pool")

_POOL = ("id", "engine", "replicas_wanted", "cell_replicas_max", "roles", "base_digest")
_VIEWS = {
    "cells": ("id", "pool_id", "router_id", "router_address", "epoch", "is_draining"),
    "replicas": (
        *("id", "pool_id", "cell_id", "node_id", "state", "role", "is_draining", "restarts"),
        "message",
    ),
    "nodes": ("id", "cpu_count", "engines", "seen_at", "is_lost", "is_cordoned", "cordon_reason"),
    "routers": ("id", "address", "came_at", "seen_at", "left_at", "is_gone"),
}

Pool = Annotated[str, typer.Argument(help="Id of a pool.")]
Replicas = Annotated[int | None, typer.Option(min=0, help="How many replicas it shall have.")]
CellReplicas = Annotated[int | None, typer.Option(min=0, help="Of a cell at most; 0: one cell.")]
Role = Annotated[int | None, typer.Option(min=0, help="How many replicas do only this.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="Of the engine; 'NAME=' ends it."),
]


@fleet.command("pools")
def list_pools(*, as_json: AsJson = False) -> None:
    """List the pools."""
    show_objects(ask(lambda api: api.list("/v1/pools")), _POOL, as_json=as_json)


@fleet.command("cells")
def list_cells(*, as_json: AsJson = False) -> None:
    """List the cells and the routers that own them."""
    _list("cells", as_json=as_json)


@fleet.command("replicas")
def list_replicas(*, as_json: AsJson = False) -> None:
    """List the replicas, as their agents saw them last."""
    _list("replicas", as_json=as_json)


@fleet.command("nodes")
def list_nodes(*, as_json: AsJson = False) -> None:
    """List the nodes, as their agents described them last."""
    _list("nodes", as_json=as_json)


@fleet.command("routers")
def list_routers(*, as_json: AsJson = False) -> None:
    """List the routers, those that left included."""
    _list("routers", as_json=as_json)


@pool.command("show")
def show_pool(name: Pool, *, as_json: AsJson = False) -> None:
    """Show a pool."""
    show_one(f"/v1/pools/{name}", as_json=as_json)


@pool.command("create")
def create_pool(
    name: Pool,
    *,
    base: Annotated[str, typer.Option(help="Digest of the base; see: sluice models base list.")],
    engine: Annotated[str, typer.Option(help="sim, openvino, trtllm, ...")],
    replicas: Replicas = None,
    cell_replicas: CellReplicas = None,
    prefill: Role = None,
    decode: Role = None,
    option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Create a pool, or change what is given of it."""
    changes = given(replicas_wanted=replicas, cell_replicas_max=cell_replicas)
    changes |= {"base_digest": base, "engine": engine}
    roles = given(prefill=prefill, decode=decode)
    _put(name, changes, roles, _options(option or []), as_json=as_json, new={})


@pool.command("update")
def update_pool(
    name: Pool,
    *,
    replicas: Replicas = None,
    cell_replicas: CellReplicas = None,
    prefill: Role = None,
    decode: Role = None,
    option: Options = None,
    as_json: AsJson = False,
) -> None:
    """Change what is given of a pool; another base or engine needs another pool."""
    changes = given(replicas_wanted=replicas, cell_replicas_max=cell_replicas)
    roles = given(prefill=prefill, decode=decode)
    _put(name, changes, roles, _options(option or []), as_json=as_json)


@pool.command("delete")
def delete_pool(name: Pool) -> None:
    """Delete a pool; refused while models are in it."""
    delete_one(f"/v1/pools/{name}", f"pool {name}")


def _list(view: str, *, as_json: bool) -> None:
    show_objects(ask(lambda api: api.list(f"/v1/{view}")), _VIEWS[view], as_json=as_json)


def _options(options: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for option in options:
        name, mark, value = option.partition("=")
        if not (name and mark):
            raise typer.BadParameter(f"{option!r} is not NAME=VALUE", param_hint="--option")
        found[name] = value
    return found


def _put(
    name: str,
    changes: Json,
    roles: dict[str, int],
    options: dict[str, str],
    *,
    as_json: bool,
    new: Json | None = None,
) -> None:
    """Write a pool with the changes; one that is not there begins as `new`, if that is given."""

    def change(known: Json) -> Json:
        known.pop("id", None)
        engine_options = known.get("engine_options", {}) | options
        kept = {option: value for option, value in engine_options.items() if value}
        return known | {"roles": known.get("roles", {}) | roles, "engine_options": kept} | changes

    made = ask(lambda api: api.edit(f"/v1/pools/{name}", change, new))
    show_objects([made], _POOL, as_json=as_json)
