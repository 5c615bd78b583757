"""Writes events for requests whose gateway was killed, from the closings that routers report.

A closing is a router's report on a request after the stream of the request's gateway broke. The
router cannot know whether the gateway is dead. Two rules prevent wrong sums:

* The gateway's own event has precedence over a closing. If the event arrives first, no row is
  written for the closing. If the event arrives later, it replaces the row, because its ingestion
  time is later.
* An answer that was resumed on another router has several closings. The closing with the most
  tokens is used, because token counts only grow. Among closings with equal counts, the latest one
  with a placement is used.

The tokens of a request are the sum over its answers. If one answer was placed, the prompts of
answers without a placement do not count.

A closing waits for `closing_settle_s`, during which most gateways that are alive send their events.
The row has the ingestion time of its closing, even if it is written later. So an event that the
gateway sent meanwhile is newer than the row. The row also counts as late exactly if the closing was
late.
"""

from collections.abc import Iterable

from sluice.lifecycle import run_every
from telemetry.metrics import TelemetryMetrics
from telemetry.rows import COLUMNS
from telemetry.store import STORE_ERRORS, Store

OUTCOME = "gateway_lost"
_EVERY_S = 10.0
# longest time from an insert's timestamp until its rows are visible, in milliseconds
_WRITTEN_MS = 30_000
_STEP_S = 120.0

_KEY = "tenant_id, received_at, event_id"
_SUMS = ("prompt_tokens", "cached_tokens", "output_tokens")
_REST = [column for column in COLUMNS if column not in (*_KEY.split(", "), *_SUMS)]
_HAS_RUN = "(replica_id != '' OR output_tokens > 0)"


def _each(form: str, columns: Iterable[str]) -> str:
    return ", ".join(form.format(column) for column in columns)


_LATEST = "argMax({0}, (replica_id != '', output_tokens, ingested_at)) AS {0}"

# The setting `prefer_column_name_to_alias` is on, so a name always means the column, not an alias.
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
"""  # noqa: S608 - constants of the code, with values as parameters
# When rows are inserted, a view marks the changed intervals for the rollups. If the server died
# during an insert, the row may exist without its mark, and `_CLOSE` would not write it again. So
# this statement marks all intervals that may have such a row once more.
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
    """Writes rows for closings in the loop `run`, which the caller starts in a TaskGroup.

    Attributes:
        until_ms: Unix milliseconds. All closings that were ingested earlier have their rows. 0
            means unknown.
    """

    def __init__(self, store: Store, metrics: TelemetryMetrics, *, settle_s: float) -> None:
        self._store = store
        self._metrics = metrics
        self._settle_ms = round(settle_s * 1000)
        self.until_ms = 0

    async def run(self) -> None:
        """Process closings at intervals until cancelled."""
        await run_every(
            _EVERY_S, self.step, name="closings", expected=STORE_ERRORS, step_timeout_s=_STEP_S
        )

    async def step(self) -> None:
        """Write rows for closings that have waited long enough. Raises STORE_ERRORS."""
        [row] = await self._store.query(_NOW, {})  # all times are those of the store's clock
        to_ms = row["now_ms"] - self._settle_ms
        span = {"from_ms": self._from_ms, "to_ms": to_ms}
        rows = await self._store.write(_CLOSE, span)
        self._metrics.gateway_lost.inc(rows)
        await self._store.write(_MARK, span)
        self.until_ms = max(self.until_ms, to_ms - _WRITTEN_MS)

    @property
    def _from_ms(self) -> int:
        return max(0, self.until_ms - self._settle_ms)
