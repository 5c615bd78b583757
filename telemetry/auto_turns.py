"""Reads logged choices of `auto` and the feedback on their answers, to compute quality tables."""

from typing import Any

from telemetry.store import Store

TURNS_MAX = 50_000
# Choices with feedback are first, because choices without feedback only show costs. Feedback names
# its `answer` by an event id or a request id.
_TURNS = """
SELECT
    toUnixTimestamp64Milli(received_at) AS received_at_unix_ms,
    event_id, request_id, scheme, cluster, model, reason, models, releases, costs, propensities,
    if(by_event.answer != '', by_event.good, by_request.good) AS good,
    by_event.answer != '' OR by_request.answer != '' AS is_judged
FROM (
    SELECT * FROM auto_choices FINAL
    WHERE tenant_id = {tenant:String}
        AND received_at >= fromUnixTimestamp64Milli({since_ms:Int64}, 'UTC')
) AS choices
LEFT JOIN (
    SELECT answer, good FROM feedback FINAL WHERE tenant_id = {tenant:String}
) AS by_event ON by_event.answer = choices.event_id
LEFT JOIN (
    SELECT answer, good FROM feedback FINAL WHERE tenant_id = {tenant:String}
) AS by_request ON by_request.answer = choices.request_id
ORDER BY is_judged DESC, received_at_unix_ms DESC
LIMIT {limit:UInt32}
SETTINGS max_execution_time = 20, join_use_nulls = 0
"""


async def logged_turns(
    store: Store, tenant_id: str, since_ms: int, limit: int
) -> list[dict[str, Any]]:
    """Return choices of a tenant: first those with feedback, then the others, each newest first."""
    found = await store.query(_TURNS, {"tenant": tenant_id, "since_ms": since_ms, "limit": limit})
    for row in found:
        row["good"] = row["good"] if row.pop("is_judged") else None
    return found
