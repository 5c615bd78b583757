"""Builds the answer of `GET /v1/costs` from measured work and a price list. Pure.

The command line builds the same answer from its own price list, so this module reads no store.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from telemetry import params
from telemetry.costs.breakeven import at_volume, break_even
from telemetry.costs.model import (
    Busy,
    CostLine,
    Costs,
    PoolCost,
    Recorded,
    Work,
    costs,
    spread_idle,
)
from telemetry.costs.prices import MICRO, Prices


@dataclass(frozen=True, slots=True)
class CostQuery:
    """A query for costs: the time range, the grouping, and the options of break-even.

    Attributes:
        span_ms: Time range in Unix milliseconds, not rounded to hours.
        by: Grouping of the rows, one of `pool`, `model`, `tenant`, `hour`.
        tenant_id: The only tenant to show, or empty to show the whole fleet.
        is_idle_spread: Whether the idle cost of a pool is spread over the pool's users.
        utilisation: Busy share of paid time for break-even, or 0 for the measured share.
        volume_tokens: Tokens per month for which the bills are compared, or 0 for no comparison.
        paid_hours: Pool -> accelerator-hours that replace those of the price list.
    """

    span_ms: tuple[int, int]
    by: str = "model"
    tenant_id: str = ""
    is_idle_spread: bool = False
    utilisation: float = 0.0
    volume_tokens: int = 0
    paid_hours: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured busy time and work of the fleet, without prices.

    Attributes:
        busy: Busy times of pools, by hour.
        works: Work of requests, by hour, pool, tenant and model.
        recorded: Recorded replica-hours, or empty if the query does not need them.
    """

    busy: Sequence[Busy]
    works: Sequence[Work]
    recorded: Sequence[Recorded] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the measurements as a JSON object."""
        return {
            "busy": [asdict(it) for it in self.busy],
            "work": [asdict(it) for it in self.works],
            "recorded": [asdict(it) for it in self.recorded],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Measured":
        """Return the measurements in a JSON object that `as_json` returned."""
        return cls(
            [Busy(**it) for it in found["busy"]],
            [Work(**it) for it in found["work"]],
            [Recorded(**it) for it in found.get("recorded", ())],
        )


def answer(prices: Prices, found: Measured, query: CostQuery) -> dict[str, Any]:
    """Return the answer to a query for costs, as a JSON object."""
    all_costs = costs(
        *(prices, found.busy, found.works, query.span_ms, query.paid_hours), found.recorded
    )
    lines = spread_idle(all_costs.lines) if query.is_idle_spread else all_costs.lines
    told: dict[str, Any] = {
        "from": params.iso(query.span_ms[0]),
        "to": params.iso(query.span_ms[1]),
        "by": query.by,
        "currency": prices.currency,
    }
    if query.tenant_id:
        its_lines = [
            line
            for line in lines
            if line.work.tenant_id == query.tenant_id and not line.is_idle and not line.work.is_copy
        ]
        return told | _table(its_lines, query.by)
    return told | {
        **_table(lines, query.by),
        "pools": [_pool_json(pool) for pool in all_costs.pools],
        "unpriced_requests": {
            name: round(it, 3) for name, it in all_costs.unpriced_requests.items()
        },
        "break_even": _break_even(prices, all_costs, query),
    }


_NAMES: Mapping[str, Callable[[CostLine], str]] = {
    "pool": lambda line: line.work.pool_id,
    "model": lambda line: line.work.model,
    "tenant": lambda line: line.work.tenant_id,
    "hour": lambda line: params.iso(line.work.start_ms),
}


def _table(lines: Iterable[CostLine], by: str) -> dict[str, Any]:
    """Return a row per group of users, rows for copies and for idle time, and their total."""
    groups: dict[tuple[str, str], list[CostLine]] = defaultdict(list)
    for line in lines:
        kind = "idle" if line.is_idle else "copies" if line.work.is_copy else "use"
        name = _NAMES[by](line) if kind == "use" or by in ("pool", "hour") else ""
        groups[name, kind].append(line)
    rows = [_row(name, kind, its_lines) for (name, kind), its_lines in groups.items()]
    rows = [row for row in rows if row["cost_micros"] or row["kind"] == "use"]
    order = {"use": 0, "copies": 1, "idle": 2}
    if by in ("pool", "hour"):
        rows.sort(key=lambda row: (row["name"], order[row["kind"]]))
    else:
        rows.sort(key=lambda row: (order[row["kind"]], -row["cost_micros"], row["name"]))
    return {"data": rows, "total_micros": sum(row["cost_micros"] for row in rows)}


def _row(name: str, kind: str, lines: Sequence[CostLine]) -> dict[str, Any]:
    works = [line.work for line in lines]
    uncached, cached, output = _tokens(works)
    micros, tokens = sum(line.micros for line in lines), uncached + cached + output
    return {
        "name": name,
        "kind": kind,
        "requests": round(sum(work.requests for work in works), 3),
        "prompt_tokens": round(uncached + cached),
        "cached_tokens": round(cached),
        "output_tokens": round(output),
        "cost_micros": micros,
        "cost_per_million": _per_million(micros, tokens),
        "cost_per_million_output": _per_million(micros, output),
    }


def _pool_json(pool: PoolCost) -> dict[str, Any]:
    return {
        "pool_id": pool.pool_id,
        "paid_hours": pool.paid_hours,
        "paid_by": pool.paid_by,
        "busy_hours": pool.busy_hours,
        "unpaid_hours": pool.unpaid_hours,
        "least_hours": pool.least_hours,
        "busy_share": _share(pool.busy_hours, pool.paid_hours),
        "bound_share": _share(pool.least_hours, pool.busy_hours),
        "batch": pool.batch,
        "cost_micros": pool.micros,
        "idle_micros": pool.idle_micros,
        "cost_per_million": _per_million(pool.micros, pool.tokens),
    }


def _break_even(prices: Prices, found: Costs, query: CostQuery) -> list[dict[str, Any]]:
    """Compare each used pool with each API, at the measured and the queried share of busy time."""
    told: list[dict[str, Any]] = []
    for pool in found.pools:
        works = [it.work for it in found.lines if it.work.pool_id == pool.pool_id]
        uncached, cached, output = _tokens(work for work in works if not work.is_copy)
        if pool.tokens <= 0 or pool.busy_hours <= 0 or pool.paid_hours <= 0:
            continue
        size = prices.pools[pool.pool_id].accelerators_per_replica
        replica_hour = float(prices.accelerator_of(pool.pool_id).price_per_hour) * size
        served = pool.tokens / pool.busy_hours * size
        now = min(1.0, pool.busy_hours / pool.paid_hours)
        for name, api in prices.apis.items():
            per_million = api.cost_micros(uncached, cached, output) / pool.tokens
            for share in dict.fromkeys((now, query.utilisation or now)):
                even = break_even(served, share, replica_hour, per_million)
                row = {"pool_id": pool.pool_id, "api": name, **asdict(even)}
                if query.volume_tokens:
                    both = at_volume(even, query.volume_tokens)
                    row["at_volume"] = asdict(both) | {"is_own_cheaper": both.is_own_cheaper}
                told.append(row)
    return told


def _tokens(works: Iterable[Work]) -> tuple[float, float, float]:
    kept = list(works)
    return (
        sum(work.uncached_tokens for work in kept),
        sum(work.cached_tokens for work in kept),
        sum(work.output_tokens for work in kept),
    )


def _per_million(micros: int, tokens: float) -> float | None:
    return round(micros / MICRO / tokens * 1e6, 6) if tokens > 0 else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
