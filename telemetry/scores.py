"""Counts the likelihood scores of a rollout's answers by time window, in SQL.

A score has a separate row, which is the event of a copy of the scored request. The score belongs to
the window in which it was *computed*. So no window waits for scores, whose priority is the lowest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.buckets import sql_bucket_of
from sluice.wire.telemetry.v1 import telemetry_pb2 as wire
from telemetry.store import Store

# Difference of log probabilities, in nats. Below it, an answer is about as likely under the base as
# under the adapter that generated it. Adapters without effect (B = 0, or layers in another order)
# had differences of 0.00, with tails up to 0.2. The shipped adapters had 2.7 and 11.
BASE_LIKE_NATS = 0.01
_SCORE_S_MAX = 60  # seconds, twice the longest time that gateways permit for one score

# Counts one score per session, as `telemetry.evidence` does for all properties of answers.
_SCORES = f"""
SELECT
    intDiv(made_ms, {{window_ms:Int64}}) AS window,
    is_canary,
    count() AS answers,
    countIf(answer_logprob - base_logprob < {BASE_LIKE_NATS}) AS base_like,
    sumMap(map({sql_bucket_of("-1000 * base_logprob")}, 1)) AS surprisal_mnats,
    sumMap(map({sql_bucket_of("1000 * answer_entropy")}, 1)) AS entropy_mnats
FROM (
SELECT
    *,
    session_hash = 0 OR made_ms
        > lagInFrame(made_ms, 1, toInt64(0)) OVER session + {{quiet_ms:Int64}} AS is_first
FROM (
    SELECT
        toUnixTimestamp64Milli(received_at) + intDiv(total_us, 1000) AS made_ms,
        arm = {wire.ARM_CANARY} AS is_canary,
        tenant_id, session_hash, event_id, base_logprob, answer_logprob, answer_entropy
    FROM requests
    WHERE scored_rollout_id = {{rollout:String}}
        AND received_at >= fromUnixTimestamp64Milli({{earlier_ms:Int64}}, 'UTC')
            - toIntervalSecond({_SCORE_S_MAX})
        AND received_at < fromUnixTimestamp64Milli({{end_ms:Int64}}, 'UTC')
        AND made_ms BETWEEN {{earlier_ms:Int64}} AND {{end_ms:Int64}} - 1
        AND arm IN ({wire.ARM_CONTROL}, {wire.ARM_CANARY})
        AND status = 200
    ORDER BY event_id
    LIMIT 1 BY event_id
)
WINDOW session AS (
    PARTITION BY is_canary, tenant_id, session_hash ORDER BY made_ms, event_id
    ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING
)
)
WHERE is_first AND made_ms >= {{start_ms:Int64}}
GROUP BY window, is_canary
SETTINGS max_execution_time = 20
"""  # noqa: S608 - constants of the code, with values as parameters


@dataclass(frozen=True, slots=True)
class ScoreCounts:
    """The scores of one arm in one window. Histograms map bucket -> count, without empty buckets.

    Attributes:
        answers: Number of scored answers.
        base_like: Number of answers that are about as likely under the base as under the adapter
            that generated them.
        surprisal_mnats: Negative mean log probability of an answer's tokens under the base, in
            thousandths of a nat.
        entropy_mnats: Mean entropy of the distributions from which an answer's tokens were drawn,
            in thousandths of a nat.
    """

    answers: int = 0
    base_like: int = 0
    surprisal_mnats: Mapping[int, int] = field(default_factory=dict[int, int])
    entropy_mnats: Mapping[int, int] = field(default_factory=dict[int, int])


async def score_counts(
    store: Store, parameters: Mapping[str, Any]
) -> dict[tuple[int, bool], ScoreCounts]:
    """Return (start of the window, whether the arm is the canary) -> scores.

    Args:
        store: The trace store with the requests.
        parameters: `rollout`, `window_ms`, `start_ms`, `end_ms`, `earlier_ms` (the time from which
            sessions are read) and `quiet_ms` (the pause after which a session counts as new).

    Raises:
        STORE_ERRORS: ClickHouse cannot be reached.
    """
    rows = await store.query(_SCORES, parameters)
    return {
        (row["window"] * parameters["window_ms"], bool(row["is_canary"])): ScoreCounts(
            row["answers"], row["base_like"], row["surprisal_mnats"], row["entropy_mnats"]
        )
        for row in rows
    }
