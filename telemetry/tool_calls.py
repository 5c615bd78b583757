"""Reads calls of server tools: the calls of one request, and the usage of tools by tenant."""

from datetime import UTC, datetime
from typing import Any

from telemetry.store import Store
from telemetry.tool_rows import COPIED
from telemetry.usage import UsageQuery

CALLS_MAX = 1024  # largest number of calls that the trace of one request shows
_SHOWN = tuple(COPIED)
_OF_REQUEST = """
SELECT received_at, {columns}
FROM tool_calls FINAL
WHERE tenant_id = {{tenant:String}} AND request_id = {{request:String}}
ORDER BY received_at, event_id
LIMIT {{limit:UInt32}}
""".format(columns=", ".join(_SHOWN))
_USAGE = """
SELECT
    formatDateTime(toStartOfInterval(received_at, toIntervalMillisecond({bucket_ms:Int64})),
        '%Y-%m-%dT%H:%i:%SZ') AS start,
    tenant_id, key_id, model, label, name,
    count() AS calls,
    countIf(outcome != 'answered') AS failed_calls,
    round(sum(duration_us) / 1e6, 3) AS seconds,
    sum(price_micros) AS price_micros
FROM tool_calls FINAL
WHERE received_at >= fromUnixTimestamp64Milli({from_ms:Int64})
    AND received_at < fromUnixTimestamp64Milli({to_ms:Int64})
    AND ({tenant:String} = '' OR tenant_id = {tenant:String})
    AND ({key:String} = '' OR key_id = {key:String})
    AND ({model:String} = '' OR model = {model:String})
GROUP BY start, tenant_id, key_id, model, label, name
ORDER BY start, tenant_id, key_id, model, label, name
LIMIT 100000
"""


async def calls_of(store: Store, request_id: str, tenant_id: str) -> list[dict[str, Any]]:
    """Return the tool calls of a request, in the order of their start."""
    parameters = {"request": request_id, "tenant": tenant_id, "limit": CALLS_MAX}
    rows = await store.query(_OF_REQUEST, parameters)
    return [{"began_at": _iso(row["received_at"])} | {n: row[n] for n in _SHOWN} for row in rows]


async def tool_usage(store: Store, query: UsageQuery) -> list[dict[str, Any]]:
    """Return calls, seconds and prices of tools by hour or day, tenant, key, model and tool.

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    from_ms, to_ms = query.span_ms
    parameters = {
        "bucket_ms": query.granularity.ms,
        "from_ms": from_ms,
        "to_ms": to_ms,
        "tenant": query.tenant_id,
        "key": query.key_id,
        "model": query.model,
    }
    return await store.query(_USAGE, parameters)


def _iso(moment: datetime) -> str:
    return moment.replace(tzinfo=UTC).isoformat(timespec="milliseconds")
