"""`sluice fleet nodes`: lists nodes, cordons or drains them, and returns them to service."""

import asyncio
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli.admin import AsJson, ask, show_one
from cli.api import ApiClient, Json
from cli.render import show_objects

nodes = typer.Typer(help="Nodes: list, cordon, drain.", invoke_without_command=True)

_COLUMNS = (
    *("id", "engines", "accelerators", "replicas", "seen_at", "is_lost", "is_cordoned"),
    *("is_unschedulable", "is_draining", "drain_note"),
)
_ORDERS = ("id", "is_unschedulable", "is_draining", "reason")
_POLL_S = 1.0
_GIB = 1 << 30

Node = Annotated[str, typer.Argument(help="Id of a node.")]
Reason = Annotated[str, typer.Option(help="Reason in words, shown to others.")]


@nodes.callback()
def list_by_default(context: typer.Context, *, as_json: AsJson = False) -> None:
    """List the nodes, as their agents last described them."""
    if context.invoked_subcommand is None:
        list_nodes(as_json=as_json)


@nodes.command("list")
def list_nodes(*, as_json: AsJson = False) -> None:
    """List the nodes, as their agents last described them."""
    show_objects(ask(lambda api: api.list("/v1/nodes")), _COLUMNS, as_json=as_json)


@nodes.command("show")
def show_node(node: Node, *, as_json: AsJson = False) -> None:
    """Show the present and the desired state of a node, and its accelerators' cordons."""
    show_one(f"/v1/nodes/{node}", as_json=as_json, readable=_readable)


@nodes.command("cordon")
def cordon_node(node: Node, *, reason: Reason = "", as_json: AsJson = False) -> None:
    """Place no new replicas on a node. Its running replicas continue."""
    _order(node, {"is_unschedulable": True, "reason": reason}, as_json=as_json)


@nodes.command("uncordon")
def uncordon_node(node: Node, *, as_json: AsJson = False) -> None:
    """Allow new replicas on a node again, after a cordon or a drain."""
    orders = {"is_unschedulable": False, "is_draining": False, "reason": ""}
    _order(node, orders, as_json=as_json)


@nodes.command("drain")
def drain_node(
    node: Node,
    *,
    reason: Reason = "",
    wait: Annotated[bool, typer.Option(help="Wait until the node is empty.")] = True,
    as_json: AsJson = False,
) -> None:
    """Empty a node. Replacements start elsewhere first, then its replicas finish their requests.

    The node stays out of service until it is uncordoned. Ctrl-C does not end the drain.
    """
    orders = {"is_unschedulable": True, "is_draining": True, "reason": reason}
    _order(node, orders, as_json=as_json)
    if wait:
        ask(lambda api: _until_empty(api, node))


@nodes.command("lift")
def lift_cordons(
    node: Node,
    cordon: Annotated[str, typer.Argument(help="Id of a cordon; default: all of the node.")] = "",
) -> None:
    """Return accelerators to service that the node's agent has cordoned."""

    async def lift(api: ApiClient) -> list[str]:
        found: list[str] = [cordon] if cordon else _cordons(await api.call("GET", _path(node)))
        for one in found:
            await api.call("DELETE", f"{_path(node)}/cordons/{quote(one, safe='@')}")
        return found

    lifted = ask(lift)
    for one in lifted:
        typer.echo(f"lifted {one}: the agent gets it with its next heartbeats")
    if not lifted:
        typer.echo(f"no accelerator of {node} is cordoned")


@nodes.command("forget")
def forget_node(node: Node) -> None:
    """Delete the record of a node that was removed for good."""
    ask(lambda api: api.call("DELETE", _path(node)))
    typer.echo(f"forgot node {node}")


def _path(node: str) -> str:
    return f"/v1/nodes/{node}"


def _order(node: str, orders: Json, *, as_json: bool) -> None:
    def change(known: Json) -> Json:
        known.pop("id", None)
        return known | orders

    made = ask(lambda api: api.edit(f"{_path(node)}/desired", change))
    show_objects([made], _ORDERS, as_json=as_json)


async def _until_empty(api: ApiClient, node: str) -> None:
    """Print changes of a node's drain on stderr, until the node has no replicas."""
    said = ""
    while True:
        found = await api.call("GET", _path(node))
        if not found["replicas"] or not found["is_draining"]:
            break
        note = f"{found['replicas']} left: {found['drain_note'] or 'not planned yet'}"
        if note != said:
            typer.echo(note, err=True)
            said = note
        await asyncio.sleep(_POLL_S)
    what = "is empty" if found["is_draining"] else "no longer drains"
    typer.echo(f"node {node} {what}", err=True)


def _cordons(node: Json) -> list[str]:
    return [fact["cordon"]["id"] for fact in node["accelerator_facts"] if "cordon" in fact]


def _readable(node: Json) -> Json:
    """Return a node with its accelerators described in words."""

    def told(fact: dict[str, Any]) -> str:
        line = f"{fact['index']}: {fact['name']} {fact['memory_bytes'] / _GIB:.4g} GiB"
        cordon = fact.get("cordon")
        return line if cordon is None else f"{line}, cordoned ({cordon['reason']}; {cordon['id']})"

    facts = [told(fact) for fact in node["accelerator_facts"]]
    return node | {"accelerator_facts": facts}
