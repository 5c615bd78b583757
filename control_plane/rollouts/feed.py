"""Fetches the evidence for rollouts, as windows of both arms, from the telemetry service."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Protocol, Self
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from control_plane.rollouts.evidence import Arm, Histogram, ScoreEvidence, Window
from control_plane.telemetry_client import FeedDownError, open_session, read_bounded
from sluice.buckets import BUCKETS
from sluice.certificates import http_options
from sluice.errors import ErrorCode
from sluice.identity import CertificateRole

_DEADLINE_S = 5.0
# Largest number of windows per call, so that a control plane catches up in short steps after an
# absence.
_WINDOWS_MAX = 60
_ROLLOUTS_MAX = 1_000
_SPANS_MAX = 1_000


class EvidenceFeed(Protocol):
    """A source of evidence for the loop of rollouts."""

    async def windows(self, rollout_id: str, after_ms: int, until_ms: int) -> tuple[Window, ...]:
        """Return complete windows, in order and without gaps, without counts of golden prompts.

        The result may be incomplete. Another call returns the remaining windows.

        Args:
            rollout_id: Id of the rollout that assigned the requests.
            after_ms: Unix time in milliseconds. The first window begins at this time, rounded up to
                a multiple of the window length.
            until_ms: Unix time in milliseconds. Requests that were received earlier have ended, or
                are older than the age limit.

        Raises:
            FeedDownError: The service is down or slow, or its answer is invalid.
        """
        ...


class NoEvidence:
    """The feed of a control plane without a telemetry service."""

    async def windows(self, rollout_id: str, after_ms: int, until_ms: int) -> tuple[Window, ...]:
        """Raise FeedDownError, because no telemetry service is configured."""
        raise FeedDownError(
            f"no evidence of rollout {rollout_id} from {after_ms} to {until_ms}: "
            "CONTROL_PLANE__TELEMETRY_URL is not set"
        )


@asynccontextmanager
async def open_feed(
    telemetry_url: str, telemetry_key: str, *, window_ms: int = 10_000
) -> AsyncGenerator[EvidenceFeed]:
    """Open a feed. The telemetry service need not run yet.

    Args:
        telemetry_url: URL of the telemetry service, or empty if there is no service.
        telemetry_key: Admin key for the service.
        window_ms: Length of a window in milliseconds.
    """
    if not telemetry_url:
        yield NoEvidence()
        return
    async with open_session(telemetry_key, _DEADLINE_S) as session:
        yield TelemetryFeed(session, telemetry_url, window_ms=window_ms)


class TelemetryFeed:
    """Queries the telemetry service (`GET /v1/rollouts/{rollout_id}/windows`)."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, window_ms: int) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._window_ms = window_ms
        self._settling: OrderedDict[str, Settling] = OrderedDict()

    async def windows(self, rollout_id: str, after_ms: int, until_ms: int) -> tuple[Window, ...]:
        """Return the available complete windows, at most 60."""
        first_ms = -(-after_ms // self._window_ms) * self._window_ms
        last_ms = until_ms // self._window_ms * self._window_ms
        settling = self._settling_of(rollout_id)
        settling.asked(_now_ms(), last_ms)
        last_ms = min(last_ms, first_ms + _WINDOWS_MAX * self._window_ms)
        if first_ms >= last_ms:
            return ()
        answer = await self._fetch(rollout_id, first_ms, last_ms)
        settled_ms = settling.settled(answer.ingested_until_unix_ms)
        windows = tuple(answer.windows())
        self._check(windows, first_ms, last_ms)
        return tuple(window for window in windows if window.end_ms <= settled_ms)

    async def _fetch(self, rollout_id: str, first_ms: int, last_ms: int) -> "_Answer":
        url = f"{self._url}/v1/rollouts/{quote(rollout_id, safe='')}/windows"
        query = {"after_ms": first_ms, "until_ms": last_ms, "window_ms": self._window_ms}
        try:
            async with (
                asyncio.timeout(_DEADLINE_S),
                self._session.get(
                    url, params=query, **http_options(CertificateRole.TELEMETRY)
                ) as response,
            ):
                body = await read_bounded(response)
                if response.status != 200:
                    text = body[:200].decode(errors="replace")
                    raise FeedDownError(f"{url} answers {response.status}: {text}")
                return _Answer.model_validate_json(body)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise FeedDownError(f"{url} does not answer: {error!r}") from error
        except ValidationError as error:
            raise FeedDownError(f"{url} is not understood: {error}") from error

    def _check(self, windows: Iterable[Window], first_ms: int, last_ms: int) -> None:
        start_ms = first_ms
        for window in windows:
            if (window.start_ms, window.end_ms) != (start_ms, start_ms + self._window_ms):
                raise FeedDownError(
                    f"the answer has a window from {window.start_ms}, not from {start_ms}"
                )
            start_ms = window.end_ms
        if start_ms > last_ms:
            raise FeedDownError(
                f"the answer has a window until {start_ms}, before the span of the query"
            )

    def _settling_of(self, rollout_id: str) -> "Settling":
        found = self._settling.setdefault(rollout_id, Settling())
        self._settling.move_to_end(rollout_id)
        if len(self._settling) > _ROLLOUTS_MAX:
            self._settling.popitem(last=False)
        return found


class Settling:
    """Computes the time up to which all requests of a rollout are counted. Pure.

    After a request has ended, its event may still be in transit to the trace store. The loop states
    at `now_ms` that all requests before `until_ms` have ended. The statement becomes effective when
    the store has ingested all events up to `now_ms`.
    """

    def __init__(self) -> None:
        self._settled_ms = 0
        self._spans: deque[tuple[int, int]] = deque()

    def asked(self, now_ms: int, until_ms: int) -> None:
        """Record the statement, made at `now_ms`, that all requests before `until_ms` have ended.

        Both times are in Unix milliseconds. If 1,000 statements are waiting, a newer statement is
        dropped.
        """
        newest_ms = self._spans[-1][1] if self._spans else self._settled_ms
        if until_ms > newest_ms and len(self._spans) < _SPANS_MAX:
            self._spans.append((now_ms, until_ms))

    def settled(self, ingested_ms: int) -> int:
        """Return the time before which all requests are counted.

        Args:
            ingested_ms: Time up to which the trace store has ingested all events, in Unix
                milliseconds.
        """
        while self._spans and self._spans[0][0] <= ingested_ms:
            self._settled_ms = self._spans.popleft()[1]
        return self._settled_ms


class _AnswerPart(BaseModel):
    """The fields of an answer that are read. A newer telemetry service may send more fields."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


_Number = Annotated[int, Field(ge=0)]
_Buckets = dict[Annotated[int, Field(ge=0, lt=BUCKETS)], _Number]


class _ScoresRow(_AnswerPart):
    answers: _Number = 0
    base_like: _Number = 0
    surprisal_mnats: _Buckets = {}
    entropy_mnats: _Buckets = {}

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        counts = (sum(self.surprisal_mnats.values()), sum(self.entropy_mnats.values()))
        if max(self.base_like, *counts) > self.answers:
            raise ValueError("more scores are counted than there are")
        return self

    def scores(self) -> ScoreEvidence:
        surprisal, entropy = _histogram(self.surprisal_mnats), _histogram(self.entropy_mnats)
        return ScoreEvidence(self.answers, self.base_like, surprisal, entropy)


class _ArmRow(_AnswerPart):
    requests: _Number
    errors: dict[ErrorCode, _Number]
    refusals: _Number
    # An older telemetry service does not send the following four counts.
    first_answers: _Number | None = None
    empty_answers: _Number = 0
    repetitive_answers: _Number = 0
    cut_answers: _Number = 0
    ttft_ms: _Buckets
    tpot_us: _Buckets
    output_tokens: _Buckets
    scores: _ScoresRow = _ScoresRow()  # missing in the answers of an older service

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        answers = self.requests - sum(self.errors.values())
        flaws = (self.refusals, self.empty_answers, self.repetitive_answers, self.cut_answers)
        judged = answers if self.first_answers is None else self.first_answers
        is_too_much = max(*flaws, sum(self.output_tokens.values())) > judged or judged > answers
        is_too_much |= sum(self.tpot_us.values()) > answers
        if is_too_much or sum(self.ttft_ms.values()) > self.requests:
            raise ValueError("more answers are counted than there are")
        return self

    def arm(self) -> Arm:
        return Arm(
            requests=self.requests,
            errors=self.errors,
            first_answers=self.first_answers,
            refusals=self.refusals,
            empty_answers=self.empty_answers,
            repetitive_answers=self.repetitive_answers,
            cut_answers=self.cut_answers,
            ttft_ms=_histogram(self.ttft_ms),
            tpot_us=_histogram(self.tpot_us),
            output_tokens=_histogram(self.output_tokens),
            scores=self.scores.scores(),
        )


class _WindowRow(_AnswerPart):
    start_ms: _Number
    end_ms: _Number
    control: _ArmRow
    canary: _ArmRow

    @model_validator(mode="after")
    def _lasts(self) -> Self:
        if self.start_ms >= self.end_ms:
            raise ValueError("a window ends before it begins")
        return self


class _Answer(_AnswerPart):
    ingested_until_unix_ms: _Number
    data: list[_WindowRow]

    def windows(self) -> Iterable[Window]:
        for it in self.data:
            yield Window(it.start_ms, it.end_ms, canary=it.canary.arm(), control=it.control.arm())


def _histogram(buckets: dict[int, int]) -> Histogram:
    return Histogram(tuple(buckets.get(bucket, 0) for bucket in range(BUCKETS)))


def _now_ms() -> int:
    return int(time.time() * 1000)
