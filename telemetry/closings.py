"""Rows of requests whose gateway was killed, from routers' closings, where no event came.

A router closes a request when its gateway's stream is cut, dead or not, so:

* the gateway's own event wins, whenever it comes: before, then no row is made; later, then it
  replaces the row, because it is ingested later;
* of several closings of one answer (it was resumed on another router) the highest number of tokens
  counts, for they only grow, and else the latest that had a place; the tokens of a request are
  those of all its answers, but prompts that had no place are left out where another one had one.

A closing waits for a while (`closing_settle_s`): most gateways that live tell in that time. A row
carries the time at which the closing was ingested. So it is older than whatever its gateway told
meanwhile, although it may be written after that, and late exactly if the closing was.
"""

from collections.abc import Iterable

from sluice.lifecycle import run_every
from telemetry.metrics import TelemetryMetrics
from telemetry.rows import COLUMNS
from telemetry.store import STORE_ERRORS, Store

OUTCOME = "gateway_lost"
_EVERY_S = 10.0
_WRITTEN_MS = 30_000  # an insert may show its rows so long after the time that they carry
_STEP_S = 120.0

_KEY = "tenant_id, received_at, event_id"
_SUMS = ("prompt_tokens", "cached_tokens", "output_tokens")
_REST = [column for column in COLUMNS if column not in (*_KEY.split(", "), *_SUMS)]
_HAS_RUN = "(replica_id != '' OR output_tokens > 0)"


def _each(form: str, columns: Iterable[str]) -> str:
    return ", ".join(form.format(column) for column in columns)


_LATEST = "argMax({0}, (replica_id != '', output_tokens, ingested_at)) AS {0}"

# With `prefer_column_name_to_alias` a name means the column, also where an aggregate is called so.
_CLOSE = f"""
INSERT INTO requests ({", ".join(COLUMNS)}, ingested_at)
SELECT {", ".join(COLUMNS)}, last_at
FROM (
    SELECT {_KEY}, {_each("argMin({0}, (replica_id = '', part)) AS {0}", _REST)},
        if(max({_HAS_RUN}), sumIf(prompt_tokens, {_HAS_RUN}), sum(prompt_tokens)) AS prompt_tokens,
        {_each("sum({0}) AS {0}", _SUMS[1:])}, max(part_at) AS last_at
    FROM (
        SELECT {_KEY}, part, max(output_tokens) AS output_tokens, max(ingested_at) AS part_at,
            {_each(_LATEST, [*_REST, *_SUMS[:-1]])}
        FROM closings
        WHERE ({_KEY}) IN (
            SELECT {_KEY} FROM closings
            WHERE ingested_at >= fromUnixTimestamp64Milli({{from_ms:Int64}}, 'UTC')
        )
        GROUP BY {_KEY}, part
    )
    GROUP BY {_KEY}
    HAVING last_at < fromUnixTimestamp64Milli({{to_ms:Int64}}, 'UTC')
)
WHERE ({_KEY}) NOT IN (
    SELECT {_KEY} FROM requests
    WHERE outcome != '{OUTCOME}' AND ({_KEY}) IN (
        SELECT {_KEY} FROM closings
        WHERE ingested_at >= fromUnixTimestamp64Milli({{from_ms:Int64}}, 'UTC')
    )
) AND ({_KEY}, last_at) NOT IN (
    SELECT {_KEY}, ingested_at FROM requests
    WHERE outcome = '{OUTCOME}' AND ({_KEY}) IN (
        SELECT {_KEY} FROM closings
        WHERE ingested_at >= fromUnixTimestamp64Milli({{from_ms:Int64}}, 'UTC')
    )
)
SETTINGS prefer_column_name_to_alias = 1, max_execution_time = 60
"""  # noqa: S608 - constants of the code; values are parameters
# A view marks rows for the rollups when they are inserted, but a server that dies in the middle may
# have written the row alone, and then `_CLOSE` makes it no second time. So whatever may be a row is
# marked again.
_MARK = """
INSERT INTO rollup_marks (marked_at, tenant_id, minute)
SELECT DISTINCT now64(3, 'UTC'), tenant_id, toStartOfMinute(received_at, 'UTC')
FROM closings
WHERE ingested_at >= fromUnixTimestamp64Milli({from_ms:Int64}, 'UTC')
    AND ingested_at < fromUnixTimestamp64Milli({to_ms:Int64}, 'UTC')
SETTINGS max_execution_time = 30
"""
_NOW = "SELECT toUnixTimestamp64Milli(now64(3)) AS now_ms"


class Closer:
    """Turns closings into rows; `run` belongs into a TaskGroup.

    Attributes:
        until_ms: Unix milliseconds of ingestion before which all closings have their rows; 0:
            unknown.
    """

    def __init__(self, store: Store, metrics: TelemetryMetrics, *, settle_s: float) -> None:
        self._store = store
        self._metrics = metrics
        self._settle_ms = round(settle_s * 1000)
        self.until_ms = 0

    async def run(self) -> None:
        """Check at intervals until cancelled."""
        await run_every(
            _EVERY_S, self.step, name="closings", expected=STORE_ERRORS, step_timeout_s=_STEP_S
        )

    async def step(self) -> None:
        """Make rows of newly settled closings; STORE_ERRORS: try again later."""
        [row] = await self._store.query(_NOW, {})  # times are those of the store
        to_ms = row["now_ms"] - self._settle_ms
        span = {"from_ms": self._from_ms, "to_ms": to_ms}
        rows = await self._store.write(_CLOSE, span)
        self._metrics.gateway_lost.inc(rows)
        await self._store.write(_MARK, span)
        self.until_ms = max(self.until_ms, to_ms - _WRITTEN_MS)

    @property
    def _from_ms(self) -> int:
        return max(0, self.until_ms - self._settle_ms)
