"""Defines SQL queries that several modules share, and the tenants that a query may read."""

import datetime
from dataclasses import dataclass
from typing import Any, Self

from sluice.wire.telemetry.v1 import telemetry_pb2 as wire
from telemetry.store import Store


@dataclass(frozen=True, slots=True)
class TenantScope:
    """The tenants whose rows a query may read, which are some tenants or the whole fleet.

    Every query of tenants' rows requires a scope and includes the scope's `sql` in its conditions.

    Attributes:
        tenant_ids: Ids of the tenants, or None for the whole fleet, which only operators may read.
    """

    tenant_ids: tuple[str, ...] | None

    @classmethod
    def tenants(cls, *tenant_ids: str) -> Self:
        """Return the scope of some tenants. Raises ValueError if an id is empty."""
        if not all(tenant_ids):
            raise ValueError("a tenant's scope needs a tenant")
        return cls(tenant_ids)

    @classmethod
    def asked(cls, tenant_id: str) -> Self:
        """Return the scope of an operator's query. An empty id means the whole fleet."""
        return cls((tenant_id,) if tenant_id else None)

    @property
    def sql(self) -> str:
        """The SQL condition. It has no OR, so that ClickHouse can use the primary key."""
        return "1" if self.tenant_ids is None else "tenant_id IN {tenants:Array(String)}"

    @property
    def parameters(self) -> dict[str, Any]:
        """The values of the parameters in `sql`."""
        return {} if self.tenant_ids is None else {"tenants": list(self.tenant_ids)}


# Returns one row per event, even if duplicates are not merged yet. The newest requests of all
# tenants are read from `recent_requests`, whose key has that order. Other queries read `requests`,
# where the time window bounds the rows to read. The inner query selects only keys. The other
# columns are then read only for the returned rows.
_RECENT = """
SELECT * EXCEPT (ingested_at)
FROM requests
WHERE (__scope__) AND (tenant_id, received_at, event_id) IN (
    SELECT tenant_id, received_at, event_id
    FROM requests
    WHERE received_at >= now64(3) - toIntervalHour({hours:UInt32})
      AND received_at >= fromUnixTimestamp64Milli({since_ms:Int64})
      AND (__scope__)
      AND ({key:String} = '' OR key_id = {key:String})
      AND ({model:String} = '' OR model = {model:String})
      AND status BETWEEN {status_least:UInt16} AND {status_most:UInt16}
      AND is_copy = {copies:Bool}
    ORDER BY received_at DESC, event_id
    LIMIT 1 BY event_id
    LIMIT {limit:UInt32}
)
ORDER BY received_at DESC, event_id
LIMIT 1 BY event_id
LIMIT {limit:UInt32}
"""
_RECENT_OF_ALL = """
SELECT * EXCEPT (ingested_at)
FROM recent_requests
WHERE received_at >= now64(3) - toIntervalHour({hours:UInt32})
  AND received_at >= fromUnixTimestamp64Milli({since_ms:Int64})
  AND ({key:String} = '' OR key_id = {key:String})
  AND ({model:String} = '' OR model = {model:String})
  AND status BETWEEN {status_least:UInt16} AND {status_most:UInt16}
  AND is_copy = {copies:Bool}
ORDER BY received_at DESC, event_id, ingested_at DESC
LIMIT 1 BY event_id
LIMIT {limit:UInt32}
"""
# Time windows in hours. A query tries them in order until one has enough rows. The last window has
# all rows.
_WINDOWS_HOURS = (1, 24, 24 * 31, 24 * 366 * 100)
_BY_TIME_HOURS_MAX = 24  # age in hours up to which `recent_requests` has all rows
LIMIT_MAX = 1000
_ARMS = {wire.ARM_CONTROL: "control", wire.ARM_CANARY: "canary"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Conditions on the requests of a list. An empty string means no condition.

    Attributes:
        tenant_id: Tenant of the requests.
        key_id: API key of the requests.
        model: Name of the model in the request.
        statuses: Lowest and highest HTTP status.
        since_ms: Earliest arrival, in Unix milliseconds.
        are_copies: Whether to list copies for shadow stages of rollouts. Otherwise, clients'
            requests are listed.
    """

    tenant_id: str = ""
    key_id: str = ""
    model: str = ""
    statuses: tuple[int, int] = (0, 65535)
    since_ms: int = 0
    are_copies: bool = False


async def recent_requests(
    store: Store, wanted: RequestFilter, *, limit: int
) -> list[dict[str, Any]]:
    """Return at most `limit` requests, newest first, with times as ISO 8601 text.

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    scope = TenantScope.asked(wanted.tenant_id)
    sql = _RECENT.replace("__scope__", scope.sql)
    parameters = scope.parameters | {
        "limit": limit,
        "copies": wanted.are_copies,
        "key": wanted.key_id,
        "model": wanted.model,
        "status_least": wanted.statuses[0],
        "status_most": wanted.statuses[1],
        "since_ms": wanted.since_ms,
    }
    rows: list[dict[str, Any]] = []
    for hours in _WINDOWS_HOURS:
        is_by_time = not wanted.tenant_id and hours <= _BY_TIME_HOURS_MAX
        asked = _RECENT_OF_ALL if is_by_time else sql
        rows = await store.query(asked, parameters | {"hours": hours})
        if len(rows) >= limit:
            break
    return [readable(row) for row in rows]


def readable(row: dict[str, Any]) -> dict[str, Any]:
    """Return an event's row with all values in types that JSON can represent."""
    return row | {
        "received_at": iso(row["received_at"]),
        # The hash is sent as text, because JavaScript would round a 64-bit number.
        "session_hash": f"{row['session_hash']:016x}",
        "arm": _ARMS.get(row["arm"], ""),
    }


def iso(moment: datetime.datetime) -> str:
    """Return a time from the store as ISO 8601 with milliseconds."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.isoformat(timespec="milliseconds")
