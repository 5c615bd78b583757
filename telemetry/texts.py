"""Reads redacted texts of requests, and erases all texts of a tenant permanently.

An erasure is recorded first. From then on, queries hide all texts that were received before the
erasure, even if they arrive later from a spool or the broker. A loop deletes such rows until none
are left. The time of receipt is from the clock of a gateway, which may be ahead. So texts whose
time of receipt is up to `SKEW_S` seconds after an erasure are also erased.
"""

import re
import time
from typing import Any

import structlog

from sluice.errors import BadRequestError, ErrorCode
from sluice.ids import ID_PATTERN
from sluice.lifecycle import run_every
from telemetry.metrics import TelemetryMetrics
from telemetry.queries import iso
from telemetry.store import STORE_ERRORS, Store

log = structlog.get_logger(__name__)

SKEW_S = 300
# largest number of returned texts, because a client may use one id for many requests
_ROWS_MAX = 10
_EVERY_S = 20.0
_STEP_S = 60.0
# Pattern of tenant ids. Only an id that matches may become part of a statement.
_TENANT = re.compile(ID_PATTERN)

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
INSERT INTO text_erasures (tenant_id, until)
SELECT {tenant:String}, now64(3, 'UTC') + toIntervalSecond({skew_s:UInt32})
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
_MUTATIONS = """
SELECT mutation_id, latest_fail_reason
FROM system.mutations
WHERE database = {database:String} AND table = 'texts' AND NOT is_done
"""


async def find_texts(store: Store, tenant_id: str, request_id: str) -> list[dict[str, Any]]:
    """Return the stored texts of a tenant's requests with this id, latest first.

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    parameters = {"tenant": tenant_id, "id": request_id, "limit": _ROWS_MAX}
    rows = await store.query(_FIND, parameters)
    times = ("received_at", "expires_at")
    return [row | {name: iso(row[name]) for name in times} for row in rows]


async def erase_texts(store: Store, tenant_id: str) -> str:
    """Hide a tenant's texts permanently. Returns the time of receipt up to which they are hidden.

    Raises:
        BadRequestError: The tenant's id is not valid.
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    if not _TENANT.fullmatch(tenant_id):
        raise BadRequestError(ErrorCode.INVALID_REQUEST, "tenant must be an id", param="tenant")
    await store.write(_ERASE, {"tenant": tenant_id, "skew_s": SKEW_S})
    [row] = await store.query(_UNTIL, {"tenant": tenant_id})
    return iso(row["until"])


class Eraser:
    """Deletes the rows of erased texts in the loop `run`, which runs in a TaskGroup."""

    def __init__(self, store: Store, metrics: TelemetryMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._began_s: float | None = None

    async def run(self) -> None:
        """Delete rows at intervals until cancelled."""
        await run_every(
            _EVERY_S, self.step, name="text_erasures", expected=STORE_ERRORS, step_timeout_s=_STEP_S
        )

    async def step(self) -> None:
        """Start to delete the rows of erased texts. Raises STORE_ERRORS if ClickHouse is down.

        Only one deletion is in progress at a time. Rows that arrive meanwhile are deleted by a
        later step. A deletion that fails is cancelled and started again.
        """
        rows = await self._store.query(_TO_ERASE, {})
        self._show_age(is_done=not rows)
        if not rows or await self._is_at_it():
            return
        for row in rows:
            if _TENANT.fullmatch(row["tenant"]):
                await self._store.delete(
                    "texts",
                    f"tenant_id = '{row['tenant']}'"
                    f" AND received_at <= fromUnixTimestamp64Milli({row['until_ms']:d}, 'UTC')",
                )
                log.info("texts_erased", tenant=row["tenant"], until_ms=row["until_ms"])

    async def _is_at_it(self) -> bool:
        """Return whether the server is deleting rows of the table. Cancels failing deletions."""
        local = {"database": self._store.local_database}
        mutations = await self._store.query(_MUTATIONS, local)
        failing = [it for it in mutations if it["latest_fail_reason"]]
        for it in failing:
            log.error(
                "texts_not_erased", mutation=it["mutation_id"], reason=it["latest_fail_reason"]
            )
        if failing:
            await self._store.end_failing_deletes("texts")
        return len(failing) < len(mutations)

    def _show_age(self, *, is_done: bool) -> None:
        now_s = time.monotonic()
        if is_done or self._began_s is None:
            self._began_s = None if is_done else now_s
        age_s = 0.0 if self._began_s is None else now_s - self._began_s
        self._metrics.text_erasure_age.set(age_s)
