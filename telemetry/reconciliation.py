"""Compares the ledger with the engines' token counts, by hour and model.

The ledger is the sum of the gateways' events. Independently, routers count the tokens that engines
generate, by the hour in which a request was received (`router.counting`). So ledger and routers
count a token in the same hour, however long its request ran. An event that is lost or counted twice
appears as a difference.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from sluice.lifecycle import run_every
from telemetry import params
from telemetry.closings import Closer
from telemetry.metrics import TelemetryMetrics
from telemetry.progress import IngestProgress
from telemetry.rollups import HOUR_MS, Range
from telemetry.rollups_worker import SETTLE_MS
from telemetry.store import STORE_ERRORS, Store
from telemetry.usage import Granularity, closed_until_ms

OTHER = "*"  # model name for tokens whose model the router cannot determine
_EVERY_S = 60.0
_STEP_S = 60.0
_WATCHED_MS = 2 * 86_400_000
# Seconds after a router's last report until the router counts as killed, unless the last report was
# marked as final. Routers report every 10 s.
_SILENT_S = 120
_SPAN = """BETWEEN fromUnixTimestamp64Milli({from_ms:Int64}, 'UTC')
            AND fromUnixTimestamp64Milli({to_ms:Int64} - 1, 'UTC')"""
# The sums include copies for shadow stages, because engines generated their tokens, too. They also
# include tokens that a model generated before a stand-in replaced the model. They exclude
# embeddings, which bypass the routers.
_LEDGER = f"""
SELECT hour_ms, told.1 AS model, sum(told.2) AS ledger, sum(told.3) AS ledger_prompt
FROM (
    SELECT toUnixTimestamp(toStartOfHour(received_at)) * 1000 AS hour_ms,
        arrayJoin([
            (toString(model), output_tokens,
                if(replica_id != '' OR output_tokens > 0, prompt_tokens, 0)),
            (toString(lost_model), lost_output_tokens, lost_prompt_tokens)
        ]) AS told
    FROM requests FINAL
    WHERE received_at {_SPAN}
)
WHERE model != ''
GROUP BY hour_ms, model
SETTINGS max_execution_time = 25, do_not_merge_across_partitions_select_final = 1
"""  # noqa: S608 - constants of the code, with values as parameters
_COUNTED = f"""
SELECT toUnixTimestamp64Milli(hour) AS hour_ms, model, sum(output_tokens) AS engines,
    sum(uncertain_tokens) AS uncertain, sum(discarded_tokens) AS discarded,
    sum(prompt_tokens) AS engines_prompt, sum(uncertain_prompt_tokens) AS uncertain_prompt,
    sum(resumed_prompt_tokens) AS resumed_prompt, min(has_prompts) AS has_prompts
FROM token_counts FINAL
WHERE model != '' AND hour {_SPAN}
GROUP BY hour_ms, model
"""  # noqa: S608 - constants of the code
# The last two hours in which a killed router reported. Its counts after the last report are lost.
# Most of these lost counts belong to requests that were received in these two hours.
_KILLED = f"""
SELECT DISTINCT arrayJoin([last_ms, last_ms - 3600000]) AS hour_ms
FROM (
    SELECT toUnixTimestamp64Milli(max(hour)) AS last_ms
    FROM token_counts FINAL
    WHERE model = ''
    GROUP BY router_id, epoch
    HAVING NOT max(is_last) AND max(ingested_at) < now64(3) - {_SILENT_S}
)
"""  # noqa: S608 - constants of the code


# Hours that have new rows. A view marks such hours (`telemetry.rollups`).
_TOUCHED = f"""
SELECT DISTINCT toUnixTimestamp(toStartOfHour(minute, 'UTC')) * 1000 AS hour_ms
FROM rollup_marks
WHERE marked_at >= fromUnixTimestamp64Milli({{since_ms:Int64}}, 'UTC') AND minute {_SPAN}
"""  # noqa: S608 - constants of the code
_NOW = "SELECT toUnixTimestamp64Milli(now64(3)) AS now_ms"
# Milliseconds after which all hours are read again, because a loss of rows leaves no mark.
_WHOLE_EVERY_MS = 3_600_000


class ReconciliationState(StrEnum):
    """The result of the comparison of one hour and model."""

    EQUAL = "equal"
    DIFFERS = "differs"
    OPEN = "open"  # further events of the hour may arrive
    # counts are lost because a router was killed, or counts are not split by model
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Compared:
    """The comparison of one hour and model.

    Attributes:
        start_ms: Unix time of the hour.
        ledger_tokens: Output tokens of the hour's requests in the ledger, including copies.
        engine_tokens: Output tokens of engines that gateways have certainly received.
        uncertain_tokens: Additional output tokens of broken streams. The ledger may have some of
            them, or all of them if the gateway was killed.
        discarded_tokens: Output tokens generated after a stop string or after the client left. They
            are neither in the ledger nor in `engine_tokens`.
        ledger_prompt_tokens: Prompt tokens of placed requests in the ledger.
        engine_prompt_tokens: Prompt tokens of requests that routers placed, once per request.
        uncertain_prompt_tokens: Additional prompt tokens of broken streams.
        resumed_prompt_tokens: Prompt tokens of later placements of resumed answers. The ledger does
            not count them.
        has_prompts: Whether all routers of the hour count prompt tokens. If not, prompt tokens are
            not compared.
        state: Result of the comparison.
    """

    start_ms: int
    model: str
    ledger_tokens: int
    engine_tokens: int
    uncertain_tokens: int
    discarded_tokens: int
    ledger_prompt_tokens: int
    engine_prompt_tokens: int
    uncertain_prompt_tokens: int
    resumed_prompt_tokens: int
    has_prompts: bool
    state: ReconciliationState

    @property
    def difference(self) -> int:
        """Output tokens by which the ledger certainly exceeds the engines, negative if fewer."""
        return difference(self.ledger_tokens, self.engine_tokens, self.uncertain_tokens)

    @property
    def prompt_difference(self) -> int:
        """Prompt tokens by which the ledger certainly exceeds the engines, 0 if not compared."""
        if not self.has_prompts:
            return 0
        ledger, engines = self.ledger_prompt_tokens, self.engine_prompt_tokens
        return difference(ledger, engines, self.uncertain_prompt_tokens)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as a JSON object."""
        fields = asdict(self)
        start = params.iso(fields.pop("start_ms"))
        return {
            "start": start,
            **fields,
            "difference_tokens": self.difference,
            "prompt_difference_tokens": self.prompt_difference,
        }


def difference(ledger: int, engines: int, uncertain: int) -> int:
    """Return the tokens by which the ledger certainly exceeds the engines, negative if fewer."""
    return max(0, ledger - engines - uncertain) - max(0, engines - ledger)


def compared(
    ledger: Iterable[Mapping[str, Any]],
    counted: Iterable[Mapping[str, Any]],
    killed_ms: Iterable[int],
    closed_ms: int,
) -> list[Compared]:
    """Return the comparison of every hour and model in the ledger or the counts, in order.

    Args:
        ledger: Rows of the ledger.
        counted: Rows of the routers' counts.
        killed_ms: Starts of the hours whose counts a killed router may have lost.
        closed_ms: Unix time of the end of the last closed hour.
    """
    ours = {(row["hour_ms"], row["model"]): row for row in ledger}
    theirs = {(row["hour_ms"], row["model"]): row for row in counted}
    unknown = frozenset(killed_ms)
    mixed = frozenset(hour_ms for hour_ms, model in theirs if model == OTHER)
    found: list[Compared] = []
    for hour_ms, model in sorted(ours.keys() | theirs.keys()):
        row = _compared(
            hour_ms, model, ours.get((hour_ms, model), {}), theirs.get((hour_ms, model), {})
        )
        if hour_ms + Granularity.HOUR.ms > closed_ms:
            state = ReconciliationState.OPEN
        elif hour_ms in unknown:
            state = ReconciliationState.UNKNOWN
        elif model != OTHER and not row.difference and not row.prompt_difference:
            state = ReconciliationState.EQUAL
        else:
            state = ReconciliationState.UNKNOWN if hour_ms in mixed else ReconciliationState.DIFFERS
        found.append(replace(row, state=state))
    return found


def _compared(
    hour_ms: int, model: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Compared:
    return Compared(
        start_ms=hour_ms,
        model=model,
        ledger_tokens=ours.get("ledger", 0),
        engine_tokens=theirs.get("engines", 0),
        uncertain_tokens=theirs.get("uncertain", 0),
        discarded_tokens=theirs.get("discarded", 0),
        ledger_prompt_tokens=ours.get("ledger_prompt", 0),
        engine_prompt_tokens=theirs.get("engines_prompt", 0),
        uncertain_prompt_tokens=theirs.get("uncertain_prompt", 0),
        resumed_prompt_tokens=theirs.get("resumed_prompt", 0),
        has_prompts=bool(theirs.get("has_prompts", False)),
        state=ReconciliationState.OPEN,
    )


def mismatch_tokens(hours: Sequence[Compared]) -> int:
    """Return the total number of tokens by which the ledger certainly differs."""
    return sum(
        abs(hour.difference) + abs(hour.prompt_difference)
        for hour in hours
        if hour.state is ReconciliationState.DIFFERS
    )


async def reconciled(store: Store, from_ms: int, to_ms: int, closed_ms: int) -> list[Compared]:
    """Return the comparison for whole hours. Raises STORE_ERRORS."""
    ledger = await store.query(_LEDGER, {"from_ms": from_ms, "to_ms": to_ms})
    return await _against_engines(store, ledger, (from_ms, to_ms), closed_ms)


async def _against_engines(
    store: Store, ledger: Iterable[Mapping[str, Any]], span: Range, closed_ms: int
) -> list[Compared]:
    counted = await store.query(_COUNTED, {"from_ms": span[0], "to_ms": span[1]})
    killed = await store.query(_KILLED, {})
    return compared(ledger, counted, [row["hour_ms"] for row in killed], closed_ms)


class LedgerSums:
    """The ledger's sums for repeated comparisons. Only hours with new rows are read again."""

    def __init__(self, store: Store, *, settle_ms: int = SETTLE_MS) -> None:
        self._store = store
        self._settle_ms = settle_ms
        self._hours: dict[int, list[dict[str, Any]]] = {}
        self._seen_ms = self._whole_ms = 0

    async def of(self, span: Range) -> list[dict[str, Any]]:
        """Return the sums of whole hours. Raises STORE_ERRORS if ClickHouse cannot be reached."""
        [clock] = await self._store.query(_NOW, {})  # the store's time before any rows are read
        now_ms = clock["now_ms"]
        is_whole = not self._whole_ms <= now_ms < self._whole_ms + _WHOLE_EVERY_MS
        parameters = {"from_ms": span[0], "to_ms": span[1]}
        touched: set[int] = set()
        if not is_whole:
            since_ms = self._seen_ms - self._settle_ms
            rows = await self._store.query(_TOUCHED, parameters | {"since_ms": since_ms})
            touched = {row["hour_ms"] for row in rows}
        hours = range(span[0], span[1], HOUR_MS)
        kept = {} if is_whole else {at: self._hours[at] for at in hours if at in self._hours}
        todo = [at for at in hours if at in touched or at not in kept]
        found = kept | {at: [] for at in todo}
        for begin, end in stretches(todo):
            for row in await self._store.query(_LEDGER, {"from_ms": begin, "to_ms": end}):
                found[row["hour_ms"]].append(row)
        self._hours, self._seen_ms = found, now_ms
        if is_whole:
            self._whole_ms = now_ms
        return [row for at in hours for row in found[at]]


def stretches(hours: Iterable[int]) -> list[Range]:
    """Return consecutive hours as one time range each."""
    found: list[Range] = []
    for at in hours:
        begin = found.pop()[0] if found and found[-1][1] == at else at
        found.append((begin, at + HOUR_MS))
    return found


class Reconciler:
    """Updates the metrics of the reconciliation in the loop `run`, which runs in a TaskGroup."""

    def __init__(
        self, store: Store, progress: IngestProgress, closer: Closer, metrics: TelemetryMetrics
    ) -> None:
        self._store = store
        self._progress = progress
        self._closer = closer
        self._metrics = metrics
        self._sums = LedgerSums(store)

    async def run(self) -> None:
        """Compare ledger and engines once a minute until cancelled."""
        await run_every(
            _EVERY_S, self.step, name="reconcile", expected=STORE_ERRORS, step_timeout_s=_STEP_S
        )

    async def step(self) -> None:
        """Compare the closed hours of two days. Raises STORE_ERRORS if ClickHouse is down."""
        closed_ms = closed_until_ms(min(self._progress.until_ms, self._closer.until_ms))
        if not closed_ms:
            return
        now_ms = int(time.time() * 1000)
        from_ms = (now_ms - _WATCHED_MS) // Granularity.HOUR.ms * Granularity.HOUR.ms
        span = (from_ms, closed_ms)
        hours = await _against_engines(self._store, await self._sums.of(span), span, closed_ms)
        self._metrics.mismatch.set(mismatch_tokens(hours))
        self._metrics.compared_at.set(time.time())
