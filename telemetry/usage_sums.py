"""Reads usage of whole days or hours from precomputed sums, for web pages over all tenants.

A page reads one row per day or hour, tenant, key and model, independently of the number of
requests. The sums are as old as the last round of `telemetry.day_sums`. Bills and budgets use
`telemetry.usage`, which includes all events.
"""

from enum import StrEnum
from typing import Any

from telemetry import params
from telemetry.day_sums import HOUR_SUMS
from telemetry.rollup_progress import progress
from telemetry.rollups import DAYS
from telemetry.store import Store
from telemetry.usage import Granularity, UsageQuery, usage

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
    FROM {{table}} AS summed FINAL
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
"""  # noqa: S608 - our own words, with values as parameters


class UsageGroup(StrEnum):
    """The column by which the rows of a page are grouped."""

    TENANT = "tenant_id"
    KEY = "key_id"
    MODEL = "model"
    START = "start"


async def usage_sums(store: Store, query: UsageQuery, group: UsageGroup) -> dict[str, Any]:
    """Return usage of whole days or hours, grouped by one column.

    The result also has the total, and the time when the sums were computed. At most 1,000 rows are
    returned. They are the largest ones, or the latest ones if the column is the time. If the
    precomputed sums are missing, the rows of the ledger are summed instead.

    Raises:
        BadRequestError: The sums are missing, and the ledger's result has too many rows.
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    known = await progress(store)
    is_by_hour = query.granularity is Granularity.HOUR
    made_ms = known.made_ms(HOUR_SUMS if is_by_hour else DAYS)
    if made_ms is None:
        found = _grouped(await usage(store, query), group)
        return {"as_of": params.iso(known.now_ms), **found}
    from_ms, to_ms = query.span_ms
    is_day = group is UsageGroup.START
    sql = _SHOW.format(
        group="formatDateTime(start, '%Y-%m-%dT%H:%i:%SZ')" if is_day else str(group),
        tenant="tenant_id" if group is UsageGroup.KEY else "''",
        table="usage_hour_sums" if is_by_hour else "usage_days",
        order="name DESC" if is_day else "prompt_tokens + output_tokens DESC",
    ).replace("__scope__", query.scope.sql)
    span = {"from_ms": from_ms, "to_ms": to_ms}
    rows = await store.query(sql, query.parameters | span)
    total = {it: rows[0][f"total_{it}"] if rows else 0 for it in _SHOWN.values()}
    shown = [
        {"name": row["name"], "tenant_id": row["tenant"], **{it: row[it] for it in total}}
        for row in rows
    ]
    return {"as_of": params.iso(made_ms), "total": total, "data": shown}


def _grouped(rows: list[dict[str, Any]], group: UsageGroup) -> dict[str, Any]:
    """Return sums of ledger rows, in the same form as the rows of `_SHOW`."""
    is_key, is_day = group is UsageGroup.KEY, group is UsageGroup.START
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
