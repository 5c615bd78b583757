"""Reads the counts of a rollout's control and canary from the trace store, by time window.

`control_plane.rollouts.evidence` defines the counts, and this module computes them in SQL. Windows
are multiples of their length in Unix time. A request belongs to the window in which it was
*received*.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sluice.buckets import sql_bucket_of
from sluice.errors import ErrorCode
from sluice.wire.telemetry.v1 import telemetry_pb2 as wire
from telemetry.scores import ScoreCounts, score_counts
from telemetry.store import Store

WINDOWS_MAX = 1_000
SESSION_QUIET_S = 300  # seconds without a request after which the next one begins a new session
WINDOW_MS_MIN, WINDOW_MS_MAX = 1_000, 3_600_000


# The TTFT of a stream is the time at which its first token was sent. An answer without streaming is
# sent at its end, so the durations of its stages up to the first token are summed instead.
#
# LIMIT 1 BY selects the first request of each session per window and arm. It also removes
# duplicates of events that are not merged yet. Every request without a session is selected.
#
# Properties of answers are counted once per session. An answer does not count if the session had
# another request shortly before, which may be in an earlier window. So rows are read from before
# the first window.
#
# A failure whose code this version does not define is counted by its HTTP status.
_WINDOWS = f"""
SELECT
    window,
    is_canary,
    count() AS requests,
    sumMapIf(map(error, 1), error != '') AS errors,
    countIf(is_first AND error = '') AS first_answers,
    countIf(is_first AND is_refusal AND error = '') AS refusals,
    countIf(is_first AND is_empty AND error = '') AS empty_answers,
    countIf(is_first AND is_repetitive AND error = '') AS repetitive_answers,
    countIf(is_first AND outcome = 'length' AND error = '') AS cut_answers,
    sumMapIf(map({sql_bucket_of("first_token_us / 1000")}, 1), first_token_us > 0) AS ttft_ms,
    sumMapIf(
        map({sql_bucket_of("(total_us - first_token_us) / (output_tokens - 1)")}, 1),
        error = '' AND choices <= 1 AND output_tokens >= 2
            AND first_token_us BETWEEN 1 AND total_us
    ) AS tpot_us,
    sumMapIf(map({sql_bucket_of("output_tokens")}, 1), is_first AND error = '') AS answer_tokens
FROM (
SELECT
    *,
    session_hash = 0 OR received_at
        > lagInFrame(received_at, 1, toDateTime64(0, 3, 'UTC')) OVER session
        + toIntervalSecond({SESSION_QUIET_S}) AS is_first
FROM (
    SELECT
        received_at, tenant_id, session_hash, event_id,
        intDiv(toUnixTimestamp64Milli(received_at), {{window_ms:Int64}}) AS window,
        is_copy OR arm = {wire.ARM_CANARY} AS is_canary,
        multiIf(
            outcome IN {{codes:Array(String)}}, toString(outcome),
            status >= 500, '{ErrorCode.INTERNAL}',
            status >= 400, '{ErrorCode.INVALID_REQUEST}',
            ''
        ) AS error,
        multiIf(
            ttft_us > 0, toUInt64(ttft_us),
            output_tokens > 0, gateway_us + queue_us + engine_queue_us + prefill_us,
            0
        ) AS first_token_us,
        total_us, output_tokens, choices, is_refusal, is_empty, is_repetitive, outcome
    FROM requests
    WHERE rollout_id = {{rollout:String}}
        AND received_at >= fromUnixTimestamp64Milli({{earlier_ms:Int64}}, 'UTC')
        AND received_at < fromUnixTimestamp64Milli({{end_ms:Int64}}, 'UTC')
        AND (is_copy OR arm IN ({wire.ARM_CONTROL}, {wire.ARM_CANARY}))
        AND NOT is_pinned
    ORDER BY received_at, event_id
    LIMIT 1 BY window, is_canary, tenant_id, session_hash, if(session_hash = 0, event_id, '')
)
WINDOW session AS (
    PARTITION BY is_canary, tenant_id, session_hash ORDER BY received_at, event_id
    ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING
)
)
WHERE window >= intDiv({{start_ms:Int64}}, {{window_ms:Int64}})
GROUP BY window, is_canary
SETTINGS max_execution_time = 20
"""  # noqa: S608 - constants of the code, with values as parameters
_CODES = [str(code) for code in ErrorCode]


@dataclass(frozen=True, slots=True)
class ArmCounts:
    """The counts of one arm in one window. Histograms map bucket -> count, without empty buckets.

    Attributes:
        requests: Number of requests.
        errors: Failed requests, by error code.
        first_answers: Number of first answers of sessions, and of answers without a session. The
            counts below include only these answers, but the times include all requests.
        refusals: Answers in which the model declined to answer.
        empty_answers: Answers without content.
        repetitive_answers: Answers with repeated text.
        cut_answers: Answers that were cut at their maximum length.
        ttft_ms: TTFT in milliseconds, of each request with a first token.
        tpot_us: TPOT in microseconds, of each complete answer.
        output_tokens: Number of output tokens, of each complete first answer.
        scores: Likelihoods of the answers that were scored in this window.
    """

    requests: int = 0
    errors: Mapping[str, int] = field(default_factory=dict[str, int])
    first_answers: int = 0
    refusals: int = 0
    empty_answers: int = 0
    repetitive_answers: int = 0
    cut_answers: int = 0
    ttft_ms: Mapping[int, int] = field(default_factory=dict[int, int])
    tpot_us: Mapping[int, int] = field(default_factory=dict[int, int])
    output_tokens: Mapping[int, int] = field(default_factory=dict[int, int])
    scores: ScoreCounts = field(default_factory=ScoreCounts)


_NO_COUNTS = ArmCounts()


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """The counts of both arms in one window, whose bounds are Unix milliseconds, end exclusive."""

    start_ms: int
    end_ms: int
    control: ArmCounts
    canary: ArmCounts

    def as_json(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        return asdict(self)


def complete_windows(after_ms: int, until_ms: int, window_ms: int) -> range:
    """Return the starts of the windows that lie completely in a time range, at most 1,000."""
    first = -(-after_ms // window_ms)
    last = min(until_ms // window_ms, first + WINDOWS_MAX)
    return range(first * window_ms, last * window_ms, window_ms)


async def rollout_windows(
    store: Store, rollout_id: str, starts_ms: range
) -> tuple[WindowCounts, ...]:
    """Return the windows of a rollout, in order and without gaps.

    Args:
        store: The trace store with the requests.
        rollout_id: Id of the rollout. The counts of an unknown rollout are all zero.
        starts_ms: Starts of the windows, from `complete_windows`.

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    if not starts_ms:
        return ()
    window_ms = starts_ms.step
    stretch = {
        "rollout": rollout_id,
        "window_ms": window_ms,
        "start_ms": starts_ms.start,
        "earlier_ms": (starts_ms.start - SESSION_QUIET_S * 1000) // window_ms * window_ms,
        "end_ms": starts_ms.stop,
    }
    rows = await store.query(_WINDOWS, stretch | {"codes": _CODES})
    arms = {(row["window"] * window_ms, bool(row["is_canary"])): _arm(row) for row in rows}
    scores = await score_counts(store, stretch | {"quiet_ms": SESSION_QUIET_S * 1000})
    for place, counts in scores.items():
        arms[place] = replace(arms.get(place, _NO_COUNTS), scores=counts)
    return tuple(_windows(arms, starts_ms))


def _windows(
    arms: Mapping[tuple[int, bool], ArmCounts], starts_ms: range
) -> Iterable[WindowCounts]:
    for start_ms in starts_ms:
        control, canary = (
            arms.get((start_ms, is_canary), _NO_COUNTS) for is_canary in (False, True)
        )
        yield WindowCounts(start_ms, start_ms + starts_ms.step, control, canary)


def _arm(row: Mapping[str, Any]) -> ArmCounts:
    return ArmCounts(
        row["requests"],
        row["errors"],
        row["first_answers"],
        row["refusals"],
        row["empty_answers"],
        row["repetitive_answers"],
        row["cut_answers"],
        row["ttft_ms"],
        row["tpot_us"],
        row["answer_tokens"],
    )
