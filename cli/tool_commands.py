"""`sluice tools`: commands for the tools that gateways call for a tenant's models."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.admin import AsJson, ask, delete_one, given, show_one
from cli.api import Json
from cli.render import show_objects
from cli.stack_commands import fail

tools = typer.Typer(help="Tools that the gateway runs for models.", no_args_is_help=True)

_SETTINGS = (
    *("owner_tenant_id", "kind", "name", "description", "parameters", "url", "method"),
    *("timeout_ms", "result_bytes_max", "secret_headers", "is_idempotent", "approval"),
    *("allowed_tools", "models", "keys", "price_micros"),
)
_SHOWN = ("id", "owner_tenant_id", "kind", "name", "url", "approval", "is_idempotent")
ToolId = Annotated[str, typer.Argument(help="Id of the tool, unique in the installation.")]
Names = list[str] | None
Name = Annotated[str | None, typer.Option(help="Name of the function, or label of the server.")]
Schema = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="JSON schema of its arguments (http)."),
]
SecretHeader = Annotated[
    Names,
    typer.Option(
        metavar="NAME=VARIABLE",
        help="Header whose text is in a variable of the environment (repeat).",
    ),
]


@tools.command("set")
def set_tool(
    tool: ToolId,
    *,
    tenant: Annotated[str | None, typer.Option(help="Id of its tenant.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="http: an address; mcp: a server. Default: http.")
    ] = None,
    name: Name = None,
    url: Annotated[str | None, typer.Option(help="URL of the tool.")] = None,
    description: Annotated[str | None, typer.Option(help="Description for models.")] = None,
    parameters: Schema = None,
    method: Annotated[str | None, typer.Option(help="HTTP method. Default: POST.")] = None,
    timeout_ms: Annotated[
        int | None, typer.Option(help="Time-out of one attempt, in milliseconds. Default: 10000.")
    ] = None,
    result_bytes_max: Annotated[
        int | None, typer.Option(help="Bytes of output that models see. Default: 32768.")
    ] = None,
    secret_header: SecretHeader = None,
    idempotent: Annotated[
        bool | None, typer.Option("--idempotent/--once", help="A failed call may be repeated.")
    ] = None,
    approval: Annotated[
        str | None, typer.Option(help="Approval of calls: always or never. Default: always.")
    ] = None,
    allow: Annotated[Names, typer.Option(help="Tool of the server (repeat). Default: all.")] = None,
    model: Annotated[Names, typer.Option(help="For this model alone (repeat).")] = None,
    key: Annotated[Names, typer.Option(help="For this key's id alone (repeat).")] = None,
    price_micros: Annotated[int | None, typer.Option(help="Price per call, in millionths.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create a tool, or change its given fields. Gateways apply them within a second."""
    changes = given(
        owner_tenant_id=tenant,
        kind=kind,
        name=name,
        url=url,
        description=description,
        parameters=None if parameters is None else _schema(parameters),
        method=method,
        timeout_ms=timeout_ms,
        result_bytes_max=result_bytes_max,
        is_idempotent=idempotent,
        approval=approval,
        allowed_tools=allow,
        models=model,
        keys=key,
        price_micros=price_micros,
    )
    headers = _headers(secret_header or [])

    def change(known: Json) -> Json:
        kept = {field: known[field] for field in _SETTINGS if field in known} | changes
        return kept | {"secret_headers": kept.get("secret_headers", {}) | headers}

    new = {"kind": "http", "name": tool}
    made = ask(lambda api: api.edit(f"/v1/tools/{tool}", change, new))
    show_objects([made], _SHOWN, as_json=as_json)


@tools.command("list")
def list_tools(*, as_json: AsJson = False) -> None:
    """List the tools, without their secrets."""
    show_objects(ask(lambda api: api.list("/v1/tools")), _SHOWN, as_json=as_json)


@tools.command("show")
def show_tool(tool: ToolId, *, as_json: AsJson = False) -> None:
    """Show a tool."""
    show_one(f"/v1/tools/{tool}", as_json=as_json)


@tools.command("remove")
def remove_tool(tool: ToolId) -> None:
    """Remove a tool. Running calls continue."""
    delete_one(f"/v1/tools/{tool}", tool)


def _schema(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise fail(f"{file} holds no JSON: {error}") from None


def _headers(given_: list[str]) -> dict[str, str]:
    """Return headers with values from variables, because other users can read command lines."""
    headers: dict[str, str] = {}
    for one in given_:
        name, _, variable = one.partition("=")
        if not variable or variable not in os.environ:
            raise fail(f"{name}=VARIABLE: name a variable of the environment that has the text")
        headers[name] = os.environ[variable]
    return headers
