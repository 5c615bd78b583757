"""Computes service levels (TTFT, TPOT, queue time, goodput) of the last minutes from rollups.

A view computes the sums when events are inserted (`migrations/clickhouse/0012_slo.sql`). So a query
reads a few rows per minute and model, independently of the number of requests.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from telemetry.queries import iso
from telemetry.store import Store

MINUTES_MAX = 7 * 24 * 60
_POINTS = 60  # largest number of points in a chart over time
_MODELS_MAX = 100
_BUSIEST, _BUSIEST_MINUTES = 20, 5
_QUANTILES = "0.5, 0.95, 0.99"
_STATES = {
    "ttft_ms": f"quantilesTDigestIfMerge({_QUANTILES})(ttft)",
    "tpot_ms": f"quantilesTDigestIfMerge({_QUANTILES})(tpot)",
    "queue_ms": f"quantilesTDigestMerge({_QUANTILES})(queue)",
}
_FARED = f"""
SELECT {{group}} AS group,
    sum(s.requests) AS requests, sum(s.failed) AS failed, sum(s.judged) AS judged,
    sum(s.good) AS good, sum(s.output) AS output,
    {", ".join(f"{state} AS {name}" for name, state in _STATES.items())}
FROM slo_minutes AS s
WHERE minute >= now() - toIntervalMinute({{{{minutes:UInt32}}}})
GROUP BY group
ORDER BY {{order}}
LIMIT {{limit}}
"""  # noqa: S608 - our own words


async def fared(store: Store, minutes: int) -> dict[str, Any]:
    """Return the service levels of the last minutes in total, by model, and over time.

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    step = max(1, minutes // _POINTS)
    bucket = f"toStartOfInterval(minute, toIntervalMinute({step:d}))"
    parameters = {"minutes": minutes}
    whole = _FARED.format(group="''", order="group", limit=1)
    models = _FARED.format(group="model", order="requests DESC, group", limit=_MODELS_MAX)
    series = _FARED.format(group=bucket, order="group", limit=2 * _POINTS)
    total = [_shown(row) for row in await store.query(whole, parameters)]
    by_model = await store.query(models, parameters)
    over_time = await store.query(series, parameters)
    return {
        "minutes": minutes,
        "step_minutes": step,
        "objectives": {"ttft_ms": 500, "tpot_ms": 50},
        "total": total[0] if total else None,
        "models": [{"model": row["group"]} | _shown(row) for row in by_model],
        "series": [{"at": iso(row["group"])} | _shown(row) for row in over_time],
    }


async def busiest(store: Store) -> list[dict[str, Any]]:
    """Return the service levels of the 20 busiest models in the last five minutes.

    The rows have the same form as those of `fared`.

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    query = _FARED.format(group="model", order="requests DESC, group", limit=_BUSIEST)
    rows = await store.query(query, {"minutes": _BUSIEST_MINUTES})
    return [{"model": row["group"]} | _shown(row) for row in rows]


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for JSON. Quantiles are in milliseconds, or null without measurements."""
    judged = row["judged"]
    return {
        **{name: row[name] for name in ("requests", "failed", "output")},
        "goodput": row["good"] / judged if judged else None,
        **{
            name: [round(it / 1000, 2) if isfinite(it) else None for it in row[name]]
            for name in _STATES
        },
    }
