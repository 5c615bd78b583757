"""Reads the sums of a pool's past requests from the telemetry service."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote

from control_plane.telemetry_client import FeedDownError
from control_plane.telemetry_reader import TelemetryReader
from sluice.errors import BadRequestError, ErrorCode

DEADLINE_S = 25.0  # longer than a query of the telemetry service may run
_LATE_SHARE = 0.01  # share of late requests above which the 99th percentile misses the objective
_COLUMNS = ("requests", "prompt_tokens", "output_tokens", "judged", "late")


@dataclass(frozen=True, slots=True)
class PoolTraffic:
    """The requests of a pool in buckets of time, the oldest first.

    Attributes:
        step_s: Seconds per bucket.
        requests: Number of requests, with copies for shadow stages.
        prompt_tokens: Computed prompt tokens, without tokens of a cached prefix.
        output_tokens: Output tokens.
        judged: Number of requests whose tier has an objective.
        late: Number of these requests that failed or missed their objective.
    """

    step_s: int
    requests: list[int]
    prompt_tokens: list[int]
    output_tokens: list[int]
    judged: list[int]
    late: list[int]

    @property
    def violated(self) -> list[bool]:
        """Whether the 99th percentile of TTFT misses the objective, for each bucket."""
        pairs = zip(self.late, self.judged, strict=True)
        return [late > _LATE_SHARE * judged for late, judged in pairs]


async def read_traffic(
    telemetry: TelemetryReader,
    pool_id: str,
    span: tuple[datetime, datetime],
    step_s: int,
    objectives_ms: Mapping[str, int],
) -> PoolTraffic:
    """Return the requests that a pool received in a time range of at most 48 hours.

    Args:
        telemetry: Client of the telemetry service.
        pool_id: Id of the pool.
        span: Start and end of the time range, end exclusive.
        step_s: Seconds per bucket.
        objectives_ms: TTFT objectives by tier. Requests of other tiers are not judged.

    Raises:
        FeedDownError: The service or its trace store does not answer.
        BadRequestError: The service refuses the query.
    """
    begin, end = span
    query = {
        "from": begin.isoformat(),
        "to": end.isoformat(),
        "step_s": str(step_s),
        "objectives": json.dumps(objectives_ms),
    }
    path = f"/v1/pools/{quote(pool_id, safe='')}/demand"
    answer = await telemetry.get(path, query, DEADLINE_S)
    try:
        body = json.loads(answer.body)
        if answer.status == 200:
            return PoolTraffic(step_s, *(list(map(int, body[name])) for name in _COLUMNS))
        detail = str(body["detail"])
    except (ValueError, KeyError, TypeError) as error:
        # An older telemetry service has no such path, and its answer is no JSON.
        raise FeedDownError(
            f"telemetry answers {answer.status} without the pool's requests: upgrade it"
        ) from error
    raise BadRequestError(ErrorCode.INVALID_REQUEST, detail)
