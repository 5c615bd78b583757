"""`sluice usage`: shows requests and tokens by tenant, key and model, from the usage ledger."""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.admin import AsJson, ask, given
from cli.audit_commands import since_moment
from cli.render import console, show_json, show_table
from cli.stack_commands import fail

_IDS = ("start", "tenant_id", "key_id", "model")
_COUNTS = (
    *("requests", "failed_requests", "prompt_tokens", "cached_tokens"),
    *("output_tokens", "withheld_tokens", "unbilled_tokens", "late_requests"),
)
_CALLS = ("calls", "failed_calls", "seconds", "price_micros")
_PATH = "/v1/usage"
_COMPARED = (
    *("ledger_tokens", "engine_tokens", "uncertain_tokens", "discarded_tokens"),
    *("difference_tokens", "ledger_prompt_tokens", "engine_prompt_tokens"),
    *("uncertain_prompt_tokens", "resumed_prompt_tokens", "prompt_difference_tokens"),
)


class GranularityOption(StrEnum):
    """The time range of one row."""

    HOUR = "hour"
    DAY = "day"


def usage(
    *,
    tenant: Annotated[str | None, typer.Option(help="Id of a tenant; else all.")] = None,
    key: Annotated[str | None, typer.Option(help="Id of an API key.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model that answered.")] = None,
    since: Annotated[
        str | None, typer.Option(help="30d ago, as 30d; or a moment, as 2030-12-01. Default: 1d.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Like --since. Default: now.")] = None,
    by: Annotated[
        GranularityOption, typer.Option(help="Hours or days of UTC.")
    ] = GranularityOption.HOUR,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="For spreadsheets.")] = False,
    parquet: Annotated[Path | None, typer.Option(help="Write a file.", dir_okay=False)] = None,
    reconcile: Annotated[
        bool, typer.Option("--reconcile", help="Compare with the tokens that engines made.")
    ] = False,
    tools: Annotated[
        bool, typer.Option("--tools", help="Calls of tools that the gateway ran instead.")
    ] = False,
) -> None:
    """Show usage by tenant, key and model: requests and tokens."""
    if as_json + as_csv + (parquet is not None) > 1:
        raise typer.BadParameter("choose one of --json, --csv and --parquet")
    if (reconcile or tools) and (as_csv or parquet is not None):
        raise typer.BadParameter("--reconcile and --tools are tables, or --json")
    now = datetime.now(UTC)
    moments = {
        "from": since_moment(since or "1d", now, "--since"),
        "to": since_moment(until, now, "--until") if until else None,
    }
    if reconcile:
        _reconcile(given(tenant=tenant, key=key, model=model, **moments), as_json=as_json)
        return
    query = given(tenant=tenant, key=key, model=model, granularity=by.value, **moments)
    if tools:
        _tools(query, as_json=as_json)
        return
    if as_csv or parquet is not None:
        query["format"] = "csv" if as_csv else "parquet"
        body = ask(lambda api: api.read(_PATH, query), "SLUICE_TELEMETRY_URL")
        if parquet is None:
            sys.stdout.write(body.decode())
        else:
            try:
                parquet.write_bytes(body)
            except OSError as error:
                raise fail(f"{parquet} cannot be written: {error.strerror}") from None
        return
    found = ask(lambda api: api.call("GET", _PATH, query=query), "SLUICE_TELEMETRY_URL")
    if as_json:
        show_json(found)
        return
    _show(found["data"])
    closed = found["closed_until"] or "unknown: telemetry has not asked the broker yet"
    console().print(f"from {found['from']} to {found['to']}; hours are closed until {closed}")


def _reconcile(query: dict[str, Any], *, as_json: bool) -> None:
    path = f"{_PATH}/reconciliation"
    found = ask(lambda api: api.call("GET", path, query=query), "SLUICE_TELEMETRY_URL")
    if as_json:
        show_json(found)
        return
    cells = [
        (row["start"], row["model"], *(str(row[name]) for name in _COMPARED), row["state"])
        for row in found["data"]
    ]
    names = [name.replace("_tokens", "") for name in _COMPARED]
    show_table(("start", "model", *names, "state"), cells, right=" ".join(names))
    console().print(f"closed hours differ by {found['mismatch_tokens']} tokens")


def _tools(query: dict[str, Any], *, as_json: bool) -> None:
    found = ask(lambda api: api.call("GET", f"{_PATH}/tools", query=query), "SLUICE_TELEMETRY_URL")
    if as_json:
        show_json(found)
        return
    names = (*_IDS, "label", "name", *_CALLS)
    cells = [tuple(str(row[name]) or "-" for name in names) for row in found["data"]]
    show_table(names, cells, right=" ".join(_CALLS))


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [
        (*(row[name] or "-" for name in _IDS), *(str(row[name]) for name in _COUNTS))
        for row in rows
    ]
    totals = (str(sum(row[name] for row in rows)) for name in _COUNTS)
    cells.append(("total", "", "", "", *totals))
    columns = (*_IDS, *_COUNTS)
    show_table(columns, cells, right=" ".join(_COUNTS))
