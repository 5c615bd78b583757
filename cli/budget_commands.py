"""`sluice tenants budget`: commands for a tenant's budgets per day or month, and their use."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.admin import AsJson, Tenant, ask, given
from cli.api import Json
from cli.render import console, duration, show_json, show_objects, table

if TYPE_CHECKING:  # imported only when a bar is drawn
    from rich.progress_bar import ProgressBar
    from rich.text import Text

budget = typer.Typer(help="Budgets of a tenant for a day or a month.", no_args_is_help=True)

_SETTINGS = (
    *("unit", "amount", "period", "model_id"),
    *("cached_percent", "soft_percents", "on_exhausted"),
)
_SHOWN = ("tenant_id", "name", *_SETTINGS)
_BAR_CELLS = 20
_STYLES = {"exhausted": "red", "soft": "yellow"}


class BudgetPeriodOption(StrEnum):
    """The period of a budget, in UTC."""

    DAY = "day"
    MONTH = "month"


class OnExhaustedOption(StrEnum):
    """The action of gateways when a budget is exhausted."""

    STOP = "stop"
    ALERT = "alert"


class BudgetStateOption(StrEnum):
    """The state of a budget."""

    OK = "ok"
    SOFT = "soft"
    EXHAUSTED = "exhausted"
    UNKNOWN = "unknown"


Name = Annotated[str, typer.Argument(help="Name of the budget.")]


@budget.command("set")
def set_budget(
    tenant: Tenant,
    name: Name,
    *,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts and answers in each period.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Instead of tokens.")] = None,
    per: Annotated[
        BudgetPeriodOption | None, typer.Option(help="Period in UTC. Default: month.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Only answers of this model; '' is any, the default.")
    ] = None,
    soft: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=99, help="Percent of the budget at which to report (repeat). Default: 80."
        ),
    ] = None,
    on_exhausted: Annotated[
        OnExhaustedOption | None,
        typer.Option(
            help="At the end of the budget, refuse new requests, or only report. Default: stop."
        ),
    ] = None,
    cached_percent: Annotated[
        int | None,
        typer.Option(min=0, max=100, help="Percent of cached prompt tokens that count."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a budget, or change its given fields. A larger amount acts within a second."""
    if tokens is not None and requests is not None:
        raise typer.BadParameter("choose one of --tokens and --requests")
    amount, unit = (requests, "requests") if tokens is None else (tokens, "tokens")
    changes = given(
        unit=None if amount is None else unit,
        amount=amount,
        period=None if per is None else per.value,
        model_id=model,
        soft_percents=soft or None,
        on_exhausted=None if on_exhausted is None else on_exhausted.value,
        cached_percent=cached_percent,
    )

    def change(known: Json) -> Json:
        if amount is None and "amount" not in known:
            message = f"tenant {tenant} has no budget {name} yet: give --tokens or --requests"
            raise typer.BadParameter(message)
        return {field: known[field] for field in _SETTINGS if field in known} | changes

    made = ask(lambda api: api.edit(f"/v1/tenants/{tenant}/budgets/{name}", change, {}))
    show_objects([made], _SHOWN, as_json=as_json)


@budget.command("show")
def show_budgets(
    tenant: Annotated[str | None, typer.Argument(help="Id of a tenant; else all.")] = None,
    *,
    state: Annotated[
        BudgetStateOption | None, typer.Option(help="Only budgets in this state.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show budgets and their used part, as of the last read of the ledger."""
    query = given(tenant_id=tenant, state=None if state is None else state.value)
    found = ask(lambda api: api.list("/v1/budgets", **query))
    if as_json:
        show_json(found)
        return
    columns = ("tenant", "budget", "", "used", "of", "per", "model", "state", "ends", "looked at")
    made = table(columns, (), right="used of")
    for row in found:
        made.add_row(*_cells(row))
    console().print(made)
    stops = [row for row in found if row["on_exhausted"] == OnExhaustedOption.STOP]
    if delays := [row["stop_delay_s"] for row in stops if row["stop_delay_s"] is not None]:
        late = duration(max(delays))
        message = f"A stop comes up to {late} after the request that uses the budget up has ended;"
        console().print(f"{message} running requests go on.")


@budget.command("remove")
def remove_budget(tenant: Tenant, name: Name) -> None:
    """Remove a budget. Gateways accept requests that it stopped again within a second."""
    ask(lambda api: api.call("DELETE", f"/v1/tenants/{tenant}/budgets/{name}"))
    typer.echo(f"removed budget {name} of tenant {tenant}")


def _cells(row: Mapping[str, Any]) -> list["Text | ProgressBar"]:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    used, state = row["used"], row["state"]
    style = _STYLES.get(state, "")
    bar = ProgressBar(
        total=row["amount"],
        completed=min(used or 0, row["amount"]),
        width=_BAR_CELLS,
        complete_style=style or "green",
        finished_style=style or "green",
    )
    percent = "-" if used is None else f"{used} ({100 * used / row['amount']:.0f} %)"
    is_counted = f"{row['amount']} {row['unit']}"
    ends, age_s = (row["period_end"] or "-")[:16], row["age_s"]
    age = "not yet" if age_s is None else f"{duration(age_s)} ago"
    told = state if state != "exhausted" or row["on_exhausted"] == "alert" else "stopped"
    texts = [is_counted, row["period"], row["model_id"] or "any", told, ends, age]
    before: list[Text | ProgressBar] = [Text(row["tenant_id"]), Text(row["name"]), bar]
    return [*before, Text(percent), *(Text(text, style if text == told else "") for text in texts)]
