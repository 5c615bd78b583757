"""Usage of whole days from their sums: for pages that look at all tenants at once.

A page reads a row per day, tenant, key and model, however many requests there were. The sums are as
old as the last round of `telemetry.day_sums`. Bills and budgets ask `telemetry.usage`, which misses
nothing.
"""

from enum import StrEnum
from typing import Any

from telemetry import params
from telemetry.rollup_progress import progress
from telemetry.rollups import DAY_MS
from telemetry.store import Store
from telemetry.usage import UsageQuery, usage

ROWS_MAX = 1_000
_SHOWN = {
    "requests": "requests",
    "failed": "failed_requests",
    "prompt": "prompt_tokens",
    "cached": "cached_tokens",
    "output": "output_tokens",
}
_SHOW = f"""
SELECT *, {", ".join(f"sum({it}) OVER () AS total_{it}" for it in _SHOWN.values())}
FROM (
    SELECT {{group}} AS name, {{tenant}} AS tenant,
        {", ".join(f"sum(summed.{name}) AS {shown}" for name, shown in _SHOWN.items())}
    FROM usage_days AS summed FINAL
    WHERE (__scope__) AND start >= fromUnixTimestamp64Milli({{{{from_ms:Int64}}}}, 'UTC')
        AND start < fromUnixTimestamp64Milli({{{{to_ms:Int64}}}}, 'UTC')
        AND ({{{{key:String}}}} = '' OR key_id = {{{{key:String}}}})
        AND ({{{{model:String}}}} = '' OR model = {{{{model:String}}}})
    GROUP BY name, tenant
    HAVING requests > 0
)
ORDER BY {{order}}, name
LIMIT {ROWS_MAX}
SETTINGS max_execution_time = 25, do_not_merge_across_partitions_select_final = 1
"""  # noqa: S608 - our own words; values are parameters


class UsageGroup(StrEnum):
    """The rows of a page."""

    TENANT = "tenant_id"
    KEY = "key_id"
    MODEL = "model"
    DAY = "start"


async def usage_sums(store: Store, query: UsageQuery, group: UsageGroup) -> dict[str, Any]:
    """Return the sums of whole days by one column: the largest 1,000 rows, the total, their time.

    Where sums of days are missing, the ledger is summed. The latest day comes first.

    Raises:
        BadRequestError: Without sums of days, and with more rows than the ledger gives.
        STORE_ERRORS: ClickHouse is away.
    """
    known = await progress(store)
    if known.days_ms is None:
        found = _grouped(await usage(store, query), group)
        return {"as_of": params.iso(known.now_ms), **found}
    from_ms, to_ms = query.span_ms
    is_day = group is UsageGroup.DAY
    sql = _SHOW.format(
        group="formatDateTime(start, '%Y-%m-%dT%H:%i:%SZ')" if is_day else str(group),
        tenant="tenant_id" if group is UsageGroup.KEY else "''",
        order="name DESC" if is_day else "prompt_tokens + output_tokens DESC",
    ).replace("__scope__", query.scope.sql)
    span = {"from_ms": from_ms // DAY_MS * DAY_MS, "to_ms": to_ms}
    rows = await store.query(sql, query.parameters | span)
    total = {it: rows[0][f"total_{it}"] if rows else 0 for it in _SHOWN.values()}
    shown = [
        {"name": row["name"], "tenant_id": row["tenant"], **{it: row[it] for it in total}}
        for row in rows
    ]
    return {"as_of": params.iso(known.days_ms), "total": total, "data": shown}


def _grouped(rows: list[dict[str, Any]], group: UsageGroup) -> dict[str, Any]:
    """Return the sums of ledger rows in the form of `_SHOW`."""
    is_key, is_day = group is UsageGroup.KEY, group is UsageGroup.DAY
    total = dict.fromkeys(_SHOWN.values(), 0)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        name, tenant = row[group], row["tenant_id"] if is_key else ""
        empty = {"name": name, "tenant_id": tenant, **dict.fromkeys(total, 0)}
        one = found.setdefault((name, tenant), empty)
        for measure in total:
            one[measure] += row[measure]
            total[measure] += row[measure]
    shown = sorted(found.values(), key=lambda it: it["name"], reverse=is_day)
    if not is_day:
        shown.sort(key=lambda it: -it["prompt_tokens"] - it["output_tokens"])
    return {"total": total, "data": shown[:ROWS_MAX]}
