"""Redacted texts of requests: found by whoever may read them, and erased for good.

An erasure is written down first. From then on no query shows what was received before it, also what
comes late from a spool or the broker; a loop deletes such rows until there are none.
"""

import re
from typing import Any

import structlog

from sluice.errors import BadRequestError, ErrorCode
from sluice.lifecycle import run_every
from telemetry.queries import iso
from telemetry.store import STORE_ERRORS, Store

log = structlog.get_logger(__name__)

_ROWS_MAX = 10  # a client may send one id again and again
_EVERY_S = 20.0
_STEP_S = 60.0
# What tenants are called; nothing else becomes part of a statement.
_TENANT = re.compile(r"[A-Za-z0-9._:@+-]{1,128}")

_FIND = """
SELECT * EXCEPT (ingested_at)
FROM texts
WHERE tenant_id = {tenant:String} AND request_id = {id:String} AND expires_at > now('UTC')
  AND received_at > (SELECT max(until) FROM text_erasures WHERE tenant_id = {tenant:String})
ORDER BY received_at DESC, ingested_at DESC
LIMIT 1 BY event_id
LIMIT {limit:UInt32}
"""
_ERASE = """
INSERT INTO text_erasures (tenant_id, until) SELECT {tenant:String}, now64(3, 'UTC')
"""
_UNTIL = """
SELECT max(until) AS until FROM text_erasures WHERE tenant_id = {tenant:String}
"""
_TO_ERASE = """
SELECT erased.tenant_id AS tenant, toUnixTimestamp64Milli(max(erased.until)) AS until_ms
FROM texts INNER JOIN (
    SELECT tenant_id, max(until) AS until FROM text_erasures GROUP BY tenant_id
) AS erased ON toString(texts.tenant_id) = erased.tenant_id
WHERE texts.received_at <= erased.until
GROUP BY tenant
LIMIT 100
"""
_RUNNING = """
SELECT count() AS running FROM system.mutations
WHERE database = {database:String} AND table = 'texts' AND NOT is_done
"""


async def find_texts(store: Store, tenant_id: str, request_id: str) -> list[dict[str, Any]]:
    """Return what is kept of a tenant's requests with this id, the latest first.

    Raises:
        STORE_ERRORS: ClickHouse is away.
    """
    parameters = {"tenant": tenant_id, "id": request_id, "limit": _ROWS_MAX}
    rows = await store.query(_FIND, parameters)
    times = ("received_at", "expires_at")
    return [row | {name: iso(row[name]) for name in times} for row in rows]


async def erase_texts(store: Store, tenant_id: str) -> str:
    """Let nobody see again what a tenant's requests said until now; return until when, in ISO 8601.

    Raises:
        BadRequestError: No tenant is called so.
        STORE_ERRORS: ClickHouse is away.
    """
    if not _TENANT.fullmatch(tenant_id):
        raise BadRequestError(ErrorCode.INVALID_REQUEST, "tenant must be an id", param="tenant")
    await store.write(_ERASE, {"tenant": tenant_id})
    [row] = await store.query(_UNTIL, {"tenant": tenant_id})
    return iso(row["until"])


class Eraser:
    """Deletes the rows of what was erased; `run` belongs into a TaskGroup."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        await run_every(
            _EVERY_S, self.step, name="text_erasures", expected=STORE_ERRORS, step_timeout_s=_STEP_S
        )

    async def step(self) -> None:
        """Delete what is there; STORE_ERRORS: do it again later.

        While ClickHouse is at it nothing new is begun: what comes meanwhile is found the next time.
        """
        rows = await self._store.query(_TO_ERASE, {})
        if not rows:
            return
        local = {"database": self._store.local_database}
        [running] = await self._store.query(_RUNNING, local)
        if running["running"]:
            return
        for row in rows:
            if _TENANT.fullmatch(row["tenant"]):
                await self._store.delete(
                    "texts",
                    f"tenant_id = '{row['tenant']}'"
                    f" AND received_at <= fromUnixTimestamp64Milli({row['until_ms']:d}, 'UTC')",
                )
                log.info("texts_erased", tenant=row["tenant"], until_ms=row["until_ms"])
