"""`sluice requests`: shows the latest requests in the trace store."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from cli.admin import AsJson, ask, given
from cli.audit_commands import since_moment
from cli.render import show_objects

_SHOWN = (
    *("received_at", "request_id", "tenant_id", "model", "prompt_tokens", "output_tokens"),
    *("ttft_us", "total_us", "status", "outcome"),
)


def requests(
    *,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="Number of rows.")
    ] = 20,
    tenant: Annotated[str | None, typer.Option(help="Only requests of this tenant.")] = None,
    key: Annotated[str | None, typer.Option(help="Only requests with the key of this id.")] = None,
    model: Annotated[str | None, typer.Option(help="Only requests for this public name.")] = None,
    status: Annotated[
        str | None,
        typer.Option(help="Only requests with this HTTP status, as 429, or class, as 5xx."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="2h ago, as 2h; or a moment, as 2030-12-31T12:00:00Z.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the latest requests, as the trace store has them."""
    moment = None if since is None else since_moment(since, datetime.now(UTC))
    query = given(tenant=tenant, key=key, model=model, status=status, since=moment)
    found = ask(lambda api: api.list("/v1/requests", limit=limit, **query), "SLUICE_TELEMETRY_URL")
    show_objects(found, _SHOWN, as_json=as_json)
