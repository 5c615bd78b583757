"""Builds the trace of one request from the rows of its event, its copies and its closings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from telemetry.attempts import ATTEMPTS_MAX, shown
from telemetry.queries import iso, readable
from telemetry.store import Store
from telemetry.tool_calls import calls_of

# Largest number of requests with one id, which a client may use repeatedly. The table `request_ids`
# has the keys of rows in `requests`. A skipping index finds rows that are older than that table.
# `closings` has few rows, so it is scanned.
_ROWS_MAX = 50
_COPY = "-copy"  # end of the request id of a copy for a shadow stage

_EVENTS = """
SELECT *
FROM requests
WHERE request_id IN ({id:String}, {copy:String}) AND (request_id = {id:String} OR is_copy)
  AND ({tenant:String} = '' OR tenant_id = {tenant:String})
  AND (__places__)
ORDER BY ingested_at DESC
LIMIT 1 BY event_id
LIMIT {limit:UInt32}
"""
_PLACES = """(tenant_id, received_at, event_id) IN (
    SELECT tenant_id, received_at, event_id FROM request_ids
    WHERE request_id IN ({id:String}, {copy:String})
)"""
PLACED_EVENTS, _OLD_EVENTS = (_EVENTS.replace("__places__", it) for it in (_PLACES, "1"))
_CLOSINGS = """
SELECT *
FROM closings
WHERE request_id = {id:String}
  AND ({tenant:String} = '' OR tenant_id = {tenant:String})
ORDER BY received_at DESC, part, output_tokens DESC
LIMIT 1 BY event_id, part, router_id
LIMIT {limit:UInt32}
"""
_ATTEMPTS = """
SELECT * REPLACE (base64Encode(decision) AS decision)
FROM attempts
WHERE event_id = {event:String}
  AND tenant_id = {tenant:String} AND received_at = fromUnixTimestamp64Milli({received_ms:Int64})
ORDER BY part, number, ingested_at DESC
LIMIT 1 BY part, number
LIMIT {limit:UInt32}
"""
_RELEASED_FIELDS = (
    "event_id",
    "part",
    "router_id",
    "replica_id",
    "output_tokens",
    "queue_us",
    "outcome",
)
_SAME = ("event_id", "received_at", "tenant_id", "model", "outcome", "status", "total_us")


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """All stored data on one request.

    Attributes:
        request: Event of the request. Until it arrives, the first closing by a router.
        is_settled: Whether the event has arrived. Otherwise there are only closings.
        closings: Reports of routers on this request after its gateway's stream broke.
        copies: Events of the request's copies for shadow stages.
        attempts: Placements of the request's answers, or empty if `request` contains them.
        tool_calls: Tool calls that the gateway ran for the request.
        others: Other requests with the same id, latest first. Ids may repeat, because clients
            choose them.
    """

    request: dict[str, Any]
    is_settled: bool
    closings: Sequence[dict[str, Any]]
    copies: Sequence[dict[str, Any]]
    others: Sequence[dict[str, Any]]
    attempts: Sequence[dict[str, Any]] = ()
    tool_calls: Sequence[dict[str, Any]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the trace in the form of the API."""
        return {
            "request": self.request,
            "is_settled": self.is_settled,
            "attempts": list(self.attempts),
            "tool_calls": list(self.tool_calls),
            "closings": list(self.closings),
            "copies": list(self.copies),
            "others": list(self.others),
        }


async def find_trace(store: Store, request_id: str, *, tenant_id: str = "") -> RequestTrace | None:
    """Return the trace of the latest request with this id, or None if no request has it.

    Args:
        store: The trace store.
        request_id: Id of the request.
        tenant_id: Tenant of the request, or empty to search the requests of all tenants.

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    parameters = {
        "id": request_id,
        "copy": request_id + _COPY,
        "tenant": tenant_id,
        "limit": _ROWS_MAX,
    }
    events = await store.query(PLACED_EVENTS, parameters)
    closings = await store.query(_CLOSINGS, parameters)
    if not events and not closings:
        events = await store.query(_OLD_EVENTS, parameters)
    trace = build(events, closings)
    if trace is None:
        return None
    return replace(
        trace,
        attempts=await _attempts(store, trace.request),
        tool_calls=await calls_of(store, request_id, trace.request["tenant_id"]),
    )


async def _attempts(store: Store, request: dict[str, Any]) -> list[dict[str, Any]]:
    received_at = datetime.fromisoformat(request["received_at"])
    parameters = {
        "event": request["event_id"],
        "tenant": request["tenant_id"],
        "received_ms": round(received_at.timestamp() * 1000),
        "limit": ATTEMPTS_MAX,
    }
    return [shown(row) for row in await store.query(_ATTEMPTS, parameters)]


def build(
    events: Sequence[dict[str, Any]], closings: Sequence[dict[str, Any]]
) -> RequestTrace | None:
    """Return the trace from rows of `requests` and `closings`, or None if there are no rows."""
    told = [_row(row) for row in closings]
    rows = sorted((_row(row) for row in events), key=lambda row: row["received_at"], reverse=True)
    own = [row for row in rows if not row["is_copy"]]
    latest = next(iter(own or told or rows), None)
    if latest is None:
        return None
    return RequestTrace(
        request={name: value for name, value in latest.items() if name != "part"},
        is_settled=latest in rows,
        closings=[
            {name: row[name] for name in (*_RELEASED_FIELDS, "ingested_at")}
            for row in told
            if row["event_id"] == latest["event_id"]
        ],
        copies=[row for row in rows if row["is_copy"] and row is not latest],
        others=[{name: row[name] for name in _SAME} for row in own if row is not latest],
    )


def missing(request_id: str, tenant_id: str, ingested_until: str | None) -> str:
    """Return a text with the reasons why a request may be missing."""
    whose = f" of tenant {tenant_id}" if tenant_id else ""
    until = ingested_until or "an unknown moment: the broker has not been asked yet"
    return (
        f"there is no request {request_id}{whose} in the trace store: it has not ended; or its "
        f"event is on the way (all that was sent is there until {until}); or it was refused before "
        "any queue, which leaves no event; or it was deleted from the store"
    )


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return readable(row) | {"ingested_at": iso(row["ingested_at"])}
