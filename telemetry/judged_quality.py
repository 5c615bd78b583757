"""Computes the judged quality of `auto`'s answers by model and release, and detects drops.

A judgement is a user's thumb, or a model's verdict on a stored answer (`sluice auto judge`). The
tables that this module reads are small, because they have only choices of `auto` and judgements.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from telemetry.store import Store

_DAYS_BEFORE = 14
_RELEASES_MAX = 200
_JUDGED_LEAST = 20  # least number of judged answers in each period, below which no drop is reported
_CERTAIN = 1.96  # standard errors by which a difference must exceed 0 to be significant at 95 %

# A judgement names its `answer` by an event id or a request id.
_JUDGED = """
SELECT model, release, is_recent, sum(good) AS good, count() AS judged
FROM (
    SELECT model, arrayElement(releases, indexOf(models, model)) AS release,
        received_at >= now64(3) - toIntervalDay(1) AS is_recent,
        if(by_event.answer != '', by_event.good, by_request.good) AS good
    FROM (
        SELECT * FROM auto_choices FINAL
        WHERE received_at >= now64(3) - toIntervalDay({days:UInt32} + 1)
    ) AS choices
    LEFT JOIN (SELECT tenant_id, answer, good FROM feedback FINAL) AS by_event
        ON by_event.tenant_id = choices.tenant_id AND by_event.answer = choices.event_id
    LEFT JOIN (SELECT tenant_id, answer, good FROM feedback FINAL) AS by_request
        ON by_request.tenant_id = choices.tenant_id AND by_request.answer = choices.request_id
    WHERE by_event.answer != '' OR by_request.answer != ''
)
GROUP BY model, release, is_recent
ORDER BY judged DESC
LIMIT {limit:UInt32}
SETTINGS max_execution_time = 8, join_use_nulls = 0
"""


@dataclass(frozen=True, slots=True)
class JudgedRelease:
    """The judged quality of a release's answers.

    Attributes:
        model: Public name of the model.
        release: Release that generated the answers.
        judged: Number of judged answers to requests of the last day.
        good: Share of these answers that were judged good.
        drop: Amount by which `good` is below the share of the 14 days before, over all releases of
            the model. It is 0 if the difference is not significant (95 %), or if too few answers
            were judged.
    """

    model: str
    release: str
    judged: int
    good: float
    drop: float


async def judged_releases(store: Store) -> list[JudgedRelease]:
    """Return the judged quality of the last day, or raise STORE_ERRORS."""
    parameters = {"days": _DAYS_BEFORE, "limit": _RELEASES_MAX}
    return compared(await store.query(_JUDGED, parameters))


def compared(rows: Iterable[dict[str, Any]]) -> list[JudgedRelease]:
    """Return the releases of the last day, each compared with its model's 14 days before.

    Args:
        rows: Sums by `model`, `release` and `is_recent`. `judged` is the number of judged answers.
            `good` is the sum of their judgements, each from 0 to 1.
    """
    before: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    recent = list[dict[str, Any]]()
    for row in rows:
        if row["is_recent"]:
            recent.append(row)
        else:
            good, judged = before[row["model"]]
            before[row["model"]] = good + row["good"], judged + row["judged"]
    return [
        JudgedRelease(
            row["model"],
            row["release"],
            row["judged"],
            row["good"] / row["judged"],
            _drop(before[row["model"]], (row["good"], row["judged"])),
        )
        for row in recent
    ]


def _drop(before: tuple[float, int], now: tuple[float, int]) -> float:
    """Return the drop of the share of good answers, or 0 if it is not significant."""
    if min(before[1], now[1]) < _JUDGED_LEAST:
        return 0.0
    shares = before[0] / before[1], now[0] / now[1]
    drop = shares[0] - shares[1]
    pooled = (before[0] + now[0]) / (before[1] + now[1])
    error = (pooled * (1 - pooled) * (1 / before[1] + 1 / now[1])) ** 0.5
    return drop if drop > _CERTAIN * error else 0.0
