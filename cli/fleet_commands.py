"""`sluice fleet`: commands for pools, and for observed cells, replicas, nodes and routers."""

from typing import Annotated

import typer

from cli.admin import AsJson, ask, delete_one, given
from cli.api import ApiClient, Json
from cli.golden_commands import ejections, quarantines, release_replica, show_quarantine
from cli.hours_commands import hours
from cli.node_commands import nodes
from cli.render import show_fields, show_json, show_objects

fleet = typer.Typer(help="Pools, cells, replicas, nodes and routers.", no_args_is_help=True)
pool = typer.Typer(help="Replicas with one base and engine.", no_args_is_help=True)
fleet.add_typer(pool, name="pool")
fleet.add_typer(nodes, name="nodes")
fleet.command("hours")(hours)

_POOL = ("id", "engine", "replicas_wanted", "cell_replicas_max", "roles", "needs", "base_digest")
_GIB = 1 << 30
_VIEWS = {
    "cells": ("id", "pool_id", "router_id", "router_address", "epoch", "is_draining"),
    "replicas": (
        *("id", "pool_id", "cell_id", "node_id", "state", "role", "is_draining", "restarts"),
        "message",
    ),
    "routers": ("id", "address", "came_at", "seen_at", "left_at", "is_gone"),
}

Pool = Annotated[str, typer.Argument(help="Id of a pool.")]
Replicas = Annotated[int | None, typer.Option(min=0, help="Number of replicas.")]
CellReplicas = Annotated[
    int | None, typer.Option(min=0, help="Most replicas of a cell; 0: one cell.")
]
Role = Annotated[int | None, typer.Option(min=0, help="Number of replicas that do only this.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="NAME=VALUE", help="Option of the engine; 'NAME=' removes it."
    ),
]
MemoryGib = Annotated[
    float | None, typer.Option("--memory-gib", min=0, help="Memory of the node per replica.")
]
Accelerators = Annotated[int | None, typer.Option(min=0, help="Accelerators of a replica.")]
AcceleratorGib = Annotated[
    float | None, typer.Option("--accelerator-gib", min=0, help="Memory on each accelerator.")
]
Dedicated = Annotated[
    bool | None, typer.Option("--dedicated/--shared", help="Whether it shares accelerators.")
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
def list_replicas(
    *,
    pool: Annotated[str | None, typer.Option(help="Only replicas of this pool.")] = None,
    node: Annotated[str | None, typer.Option(help="Only replicas on this node.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the replicas, as their agents last reported them."""
    query = given(pool_id=pool, node_id=node)
    found = ask(lambda api: api.list("/v1/replicas", **query))
    show_objects(found, _VIEWS["replicas"], as_json=as_json)


@fleet.command("routers")
def list_routers(*, as_json: AsJson = False) -> None:
    """List the routers, including ended ones."""
    _list("routers", as_json=as_json)


@pool.command("show")
def show_pool(name: Pool, *, as_json: AsJson = False) -> None:
    """Show a pool, with its wanted and ready replicas."""

    async def both(api: ApiClient) -> Json:
        found = await api.call("GET", f"/v1/pools/{name}")
        return found | {"status": await api.call("GET", f"/v1/pools/{name}/status")}

    found = ask(both)
    if as_json:
        show_json(found)
    else:
        status = found.pop("status")
        show_fields(found | {key: status[key] for key in status if key not in found})


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
    memory_gib: MemoryGib = None,
    accelerators: Accelerators = None,
    accelerator_gib: AcceleratorGib = None,
    is_dedicated: Dedicated = None,
    as_json: AsJson = False,
) -> None:
    """Create a pool, or change its given fields."""
    changes = given(replicas_wanted=replicas, cell_replicas_max=cell_replicas)
    changes |= {"base_digest": base, "engine": engine}
    parts = {
        "roles": given(prefill=prefill, decode=decode),
        "engine_options": _options(option or []),
        "needs": _needs(memory_gib, accelerators, accelerator_gib, is_dedicated),
    }
    _put(name, changes, parts, as_json=as_json, new={})


@pool.command("update")
def update_pool(
    name: Pool,
    *,
    replicas: Replicas = None,
    cell_replicas: CellReplicas = None,
    prefill: Role = None,
    decode: Role = None,
    option: Options = None,
    memory_gib: MemoryGib = None,
    accelerators: Accelerators = None,
    accelerator_gib: AcceleratorGib = None,
    is_dedicated: Dedicated = None,
    as_json: AsJson = False,
) -> None:
    """Change the given fields of a pool. Another base or engine needs another pool."""
    changes = given(replicas_wanted=replicas, cell_replicas_max=cell_replicas)
    parts = {
        "roles": given(prefill=prefill, decode=decode),
        "engine_options": _options(option or []),
        "needs": _needs(memory_gib, accelerators, accelerator_gib, is_dedicated),
    }
    _put(name, changes, parts, as_json=as_json)


@pool.command("delete")
def delete_pool(name: Pool) -> None:
    """Delete a pool, unless models are in it."""
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


def _needs(
    memory_gib: float | None,
    accelerators: int | None,
    accelerator_gib: float | None,
    is_dedicated: bool | None,
) -> Json:
    return given(
        memory_bytes=None if memory_gib is None else round(memory_gib * _GIB),
        accelerators=accelerators,
        accelerator_memory_bytes=None if accelerator_gib is None else round(accelerator_gib * _GIB),
        is_dedicated=is_dedicated,
    )


def _put(
    name: str,
    changes: Json,
    parts: dict[str, Json],
    *,
    as_json: bool,
    new: Json | None = None,
) -> None:
    """Write a pool with changed fields, or create it from `new` if it is missing.

    Args:
        name: Id of the pool.
        changes: Fields that are replaced as a whole.
        parts: Fields of which only the named entries are replaced.
        as_json: Whether the pool is printed as JSON.
        new: First version of a missing pool. With None, the pool must exist.
    """

    def change(known: Json) -> Json:
        known.pop("id", None)
        merged = {part: known.get(part, {}) | values for part, values in parts.items()}
        options = merged["engine_options"]
        merged["engine_options"] = {option: value for option, value in options.items() if value}
        return known | merged | changes

    made = ask(lambda api: api.edit(f"/v1/pools/{name}", change, new))
    show_objects([made], _POOL, as_json=as_json)


fleet.command("ejections")(ejections)
fleet.command("quarantines")(quarantines)
fleet.command("quarantine")(show_quarantine)
fleet.command("release")(release_replica)
