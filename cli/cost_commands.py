"""`sluice cost`: shows the fleet's cost by pool, model, tenant or hour."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import cost_chart
from cli.admin import AsJson, ask, given
from cli.audit_commands import since_moment
from cli.render import console, show_json, show_table
from cli.stack_commands import fail
from telemetry.costs.prices import Prices, PricesError, read_prices
from telemetry.costs.report import CostQuery, Measured, answer

_URL = "SLUICE_TELEMETRY_URL"
_PATH = "/v1/costs"
_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
_ROUNDING = 0.005  # half a hundredth, because hours are shown in hundredths
_PAID_BY = {
    "list": "by the replicas of the price list",
    "given": "as given",
    "recorded": "as the control plane recorded them",
}
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class CostGroup(StrEnum):
    """The object, or the hour, of one row."""

    POOL = "pool"
    MODEL = "model"
    TENANT = "tenant"
    HOUR = "hour"


def cost(
    *,
    by: Annotated[CostGroup, typer.Option(help="Group of a row.")] = CostGroup.MODEL,
    since: Annotated[
        str | None,
        typer.Option("--from", "--since", help="30d ago, as 30d; or a moment. Default: 1d."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--to", "--until", help="Like --from. Default: now.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only the share of this tenant.")] = None,
    prices: Annotated[
        Path | None, typer.Option(help="Price list to use instead of telemetry's.", dir_okay=False)
    ] = None,
    accelerator_hours: Annotated[
        list[str] | None,
        typer.Option(
            "--accelerator-hours",
            "--gpu-hours",
            help="POOL=HOURS paid in this time, instead of the hours in the list of --prices.",
        ),
    ] = None,
    is_idle_spread: Annotated[
        bool, typer.Option("--spread-idle", help="Give idle cost to the users of the pool.")
    ] = False,
    utilisation: Annotated[
        int, typer.Option(help="Percent busy, for break-even.", min=1, max=100)
    ] = 60,
    volume: Annotated[
        str | None, typer.Option(help="Tokens per month to compare both at, as 500M.")
    ] = None,
    as_json: AsJson = False,
    svg: Annotated[Path | None, typer.Option(help="Draw the rows.", dir_okay=False)] = None,
) -> None:
    """Show the cost of the fleet by pool, model, tenant or hour, and when self-hosting pays."""
    now = datetime.now(UTC)
    query = given(
        by=by.value,
        tenant=tenant,
        spread_idle="true" if is_idle_spread else None,
        utilisation_percent=utilisation,
        volume_tokens=_volume(volume) if volume else None,
        **{
            "from": since_moment(since or "1d", now, "--from"),
            "to": since_moment(until, now, "--to") if until else None,
        },
    )
    if accelerator_hours and prices is None:
        raise typer.BadParameter("give the price list, too", param_hint="--accelerator-hours")
    if prices is None:
        found = ask(lambda api: api.call("GET", _PATH, query=query), _URL)
    else:
        found = _priced(prices, query, _hours(accelerator_hours or []))
    if svg is not None:
        _draw(svg, found)
    if as_json:
        show_json(found)
    else:
        _show(found)


def _priced(path: Path, query: Mapping[str, Any], paid_hours: Mapping[str, float]) -> Any:
    """Return the answer of telemetry, computed with the price list of a local file."""
    try:
        prices = read_prices(path)
    except PricesError as error:
        raise fail(str(error)) from None
    _check_pools(prices, paid_hours)
    asked = given(**{name: query.get(name) for name in ("from", "to")}) | {"format": "work"}
    if set(prices.recorded_pools) - paid_hours.keys():
        asked["hours"] = "recorded"
    found = ask(lambda api: api.call("GET", _PATH, query=asked), _URL)
    from_ms, to_ms = found["span_ms"]
    wanted = CostQuery(
        (from_ms, to_ms),
        query["by"],
        query.get("tenant", ""),
        "spread_idle" in query,
        query["utilisation_percent"] / 100,
        query.get("volume_tokens", 0),
        paid_hours,
    )
    return answer(prices, Measured.from_json(found), wanted)


def _check_pools(prices: Prices, paid_hours: Mapping[str, float]) -> None:
    for name in paid_hours:
        if name not in prices.pools:
            known = ", ".join(sorted(prices.pools))
            raise fail(f"--accelerator-hours: pool {name} is not in the price list ({known})")


def _hours(texts: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in texts:
        name, _, hours = text.rpartition("=")
        if not name or not re.fullmatch(r"\d{1,9}(\.\d{1,6})?", hours):
            message = f"{text!r} is not POOL=HOURS, such as my-pool=730.5"
            raise typer.BadParameter(message, param_hint="--accelerator-hours")
        found[name] = float(hours)
    return found


def _volume(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kMGT]?)", text)
    tokens = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 0 < tokens < 10**15:
        message = f"{text!r} is no number of tokens; write it as 500M"
        raise typer.BadParameter(message, param_hint="--volume")
    return tokens


def _draw(path: Path, found: Mapping[str, Any]) -> None:
    if len(found["data"]) > cost_chart.ROWS_MAX:
        message = f"{len(found['data'])} rows are too many to draw: at most {cost_chart.ROWS_MAX}"
        raise fail(message)
    title = f"{found['currency']} by {found['by']}, {found['from']} to {found['to']}"
    try:
        path.write_text(cost_chart.svg(found["data"], title), encoding="utf-8")
    except OSError as error:
        raise fail(f"{path} cannot be written: {error.strerror}") from None


def _show(found: Mapping[str, Any]) -> None:
    currency, rows = found["currency"], found["data"]
    texts = cost_chart.amounts([row["cost_micros"] for row in rows])
    most = max((row["cost_micros"] for row in rows), default=0)
    cells = [
        (
            cost_chart.label(row),
            *(f"{row[name]:,.0f}" if row["kind"] != "idle" else "" for name in _COUNTS),
            text,
            cost_chart.text_bar(row["cost_micros"], most),
            _money(row["cost_per_million"]),
            _money(row["cost_per_million_output"]),
        )
        for row, text in zip(rows, texts, strict=False)
    ]
    cells.append(("total", "", "", "", "", texts[-1], "", "", ""))
    columns = (found["by"], *_COUNTS, currency, "", "per_1M", "per_1M_output")
    right = " ".join((*_COUNTS, currency, "per_1M", "per_1M_output"))
    show_table(columns, cells, right=right)
    if "pools" in found:
        _show_pools(found)
    for even in found.get("break_even", ()):
        console().print(_sentence(even, currency), soft_wrap=True)
    for name, requests in found.get("unpriced_requests", {}).items():
        text = f"not in the price list: pool {name}, {requests:,.0f} requests"
        console().print(text, markup=False)
    console().print(f"from {found['from']} to {found['to']}")


def _show_pools(found: Mapping[str, Any]) -> None:
    cells = [
        (
            pool["pool_id"],
            f"{pool['paid_hours']:,.2f}",
            f"{pool['busy_hours']:,.2f}",
            _percent(pool["busy_share"]) + ("!" if pool["unpaid_hours"] > _ROUNDING else ""),
            _percent(pool["bound_share"]),
            f"{pool['batch']:.1f}",
            *cost_chart.amounts([pool["idle_micros"]])[:1],
            _money(pool["cost_per_million"]),
        )
        for pool in found["pools"]
    ]
    columns = (
        *("pool", "paid_hours", "busy_hours", "busy", "of_bound", "batch", "idle"),
        "per_1M_with_idle",
    )
    show_table(columns, cells, right=" ".join(columns[1:]))
    for paid_by, words in _PAID_BY.items():
        named = [pool["pool_id"] for pool in found["pools"] if pool["paid_by"] == paid_by]
        if named:
            console().print(f"paid hours {words}: {', '.join(named)}", markup=False)
    if any(pool["unpaid_hours"] > _ROUNDING for pool in found["pools"]):
        text = "!: more accelerators were busy than are paid: the price list lacks replicas"
        console().print(text)


def _sentence(even: Mapping[str, Any], currency: str) -> str:
    """Return a comparison with other prices as a sentence."""
    own = f"{even['pool_id']} at {_percent(even['utilisation'])} busy: {currency} "
    own += (
        f"{_money(even['own_per_million'])} per 1M, {even['api']} {_money(even['api_per_million'])}"
    )
    if even["first_tokens"] is None:
        own += "; the API is cheaper at any volume"
    else:
        own += f"; one replica pays from {_tokens(even['first_tokens'])} tokens a month"
        own += f", the fleet at every volume from {_tokens(even['always_tokens'])}"
    at = even.get("at_volume")
    if at:
        own += f"; at {_tokens(at['tokens'])}: {at['replicas']} replicas for {at['own']:,.2f}, "
        own += f"the API {at['api']:,.2f}"
    return own


def _tokens(count: float) -> str:
    unit = next((it for it in reversed(_UNITS) if count >= _UNITS[it]), "")
    return f"{count / _UNITS[unit]:.3g}{unit}"


def _money(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:,.2f}" if amount >= 1 else f"{amount:.4f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
