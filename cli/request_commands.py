"""`sluice requests`."""

from typing import Annotated

import typer

from cli.admin import AsJson, ask
from cli.render import show_objects


def requests(
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="How many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the latest requests, as the trace store has them."""
    found = ask(lambda api: api.list("/v1/requests", limit=limit), "SLUICE_TELEMETRY_URL")
    columns = (
        "received_at",
        "request_id",
        "tenant_id",
        "model",
        "prompt_tokens",
        "output_tokens",
        "ttft_us",
        "total_us",
        "outcome",
    )
    show_objects(found, columns, as_json=as_json)
