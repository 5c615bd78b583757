"""The feed hands out only windows whose requests are all counted, and only sense."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from control_plane.rollouts import feed as feed_module
from control_plane.rollouts.evidence import Arm, Histogram
from control_plane.rollouts.feed import EvidenceFeed, Settling, open_feed
from control_plane.telemetry_client import FeedDownError
from sluice.buckets import BUCKETS
from sluice.errors import ErrorCode

START_MS = 1_790_000_000_000
WINDOW_MS = 10_000
KEY = "key-of-the-test"
NOBODY = {
    "requests": 0,
    "errors": {},
    "refusals": 0,
    "ttft_ms": {},
    "tpot_us": {},
    "output_tokens": {},
}
SOMEBODY = {
    "requests": 5,
    "errors": {"engine_failed": 2},
    "refusals": 1,
    "repetitive_answers": 3,
    "cut_answers": 2,
    "ttft_ms": {"12": 3, "96": 1},
    "tpot_us": {"0": 2},
    "output_tokens": {"40": 3},
    "scores": {
        "answers": 3,
        "base_like": 2,
        "surprisal_mnats": {"12": 3},
        "entropy_mnats": {"96": 1},
        "of_a_newer_service": [1],
    },
    "of_a_newer_service": [1],
}


def window(number: int, **canary: Any) -> dict[str, Any]:
    return {
        "start_ms": START_MS + number * WINDOW_MS,
        "end_ms": START_MS + (number + 1) * WINDOW_MS,
        "control": SOMEBODY,
        "canary": NOBODY | canary,
    }


class Peer:
    """A telemetry service that answers what a test wants."""

    def __init__(self) -> None:
        self.status = 200
        self.answer: Any = {"ingested_until_unix_ms": 0, "data": []}
        self.asked: list[dict[str, str]] = []

    async def serve(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        assert request.match_info["rollout_id"] == "r/1"
        self.asked.append(dict(request.query))
        text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
        return web.Response(text=text, status=self.status)


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[tuple[Peer, EvidenceFeed]]:
    found = Peer()
    app = web.Application()
    app.router.add_get("/v1/rollouts/{rollout_id}/windows", found.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with open_feed(f"http://{host}:{port}/", KEY) as feed:
        yield found, feed
    await runner.cleanup()


async def test_windows_come_once_the_store_has_the_events_sent_before_the_query(
    peer: tuple[Peer, EvidenceFeed], monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry, feed = peer
    until_ms = START_MS + 2 * WINDOW_MS + 5
    now_ms = until_ms + 1_000
    monkeypatch.setattr(feed_module, "_now_ms", lambda: now_ms)
    telemetry.answer = {"ingested_until_unix_ms": now_ms - 1, "data": [window(0), window(1)]}
    assert await feed.windows("r/1", START_MS - 1, until_ms) == ()
    telemetry.answer["ingested_until_unix_ms"] = now_ms
    now_ms += 5_000
    first, second = await feed.windows("r/1", START_MS - 1, until_ms)
    assert (first.start_ms, first.end_ms) == (START_MS, START_MS + WINDOW_MS)
    assert second.end_ms == START_MS + 2 * WINDOW_MS
    histogram = Histogram(tuple({12: 3, 96: 1}.get(bucket, 0) for bucket in range(BUCKETS)))
    assert first.control.ttft_ms == histogram
    assert first.control.errors == {ErrorCode.ENGINE_FAILED: 2}
    control = first.control
    assert (control.empty_answers, control.repetitive_answers, control.cut_answers) == (0, 3, 2)
    assert (control.scores.answers, control.scores.base_like) == (3, 2)
    assert (control.scores.surprisal_mnats.counts[12], control.scores.entropy_mnats.counts[96]) == (
        *(3, 1),
    )
    assert (first.control.requests, first.control.refusals, first.canary) == (5, 1, Arm())
    asked = {"after_ms": START_MS, "until_ms": START_MS + 2 * WINDOW_MS, "window_ms": WINDOW_MS}
    assert telemetry.asked == [{name: str(value) for name, value in asked.items()}] * 2
    assert await feed.windows("r/1", START_MS + 1, START_MS + 2 * WINDOW_MS - 1) == ()
    assert len(telemetry.asked) == 2  # no window lies in that


@pytest.mark.parametrize(
    "data",
    [
        [window(1)],
        [window(0), window(2)],
        [window(0) | {"end_ms": START_MS + 1}],
        [window(0) | {"end_ms": START_MS}],
        [window(number) for number in range(3)],
        [window(0, refusals=1)],
        [window(0, requests=1, output_tokens={"3": 2})],
        [window(0, requests=1, cut_answers=2)],
        [window(0, first_answers=6)],
        [window(0, first_answers=2)],
        [window(0, requests=1, ttft_ms={"97": 1})],
        [window(0, scores={"answers": 1, "base_like": 2})],
        [window(0, scores={"entropy_mnats": {"3": 1}})],
        [window(0, requests=1, errors={"new": 1})],
        [window(0, requests=-1)],
        [window(0, requests="1")],
        [window(0) | {"canary": None}],
        None,
    ],
)
async def test_nonsense_is_refused(peer: tuple[Peer, EvidenceFeed], data: object) -> None:
    telemetry, feed = peer
    telemetry.answer = {"ingested_until_unix_ms": 4_000_000_000_000, "data": data}
    with pytest.raises(FeedDownError):
        await feed.windows("r/1", START_MS, START_MS + 2 * WINDOW_MS)


async def test_every_failure_of_the_feed_is_named(peer: tuple[Peer, EvidenceFeed]) -> None:
    telemetry, feed = peer
    telemetry.status, telemetry.answer = 503, "the trace store does not answer"
    with pytest.raises(FeedDownError, match="503: the trace store does not answer"):
        await feed.windows("r/1", START_MS, START_MS + WINDOW_MS)
    telemetry.status, telemetry.answer = 200, " " * ((16 << 20) + 1)
    with pytest.raises(FeedDownError, match="more than 16 MiB"):
        await feed.windows("r/1", START_MS, START_MS + WINDOW_MS)
    async with open_feed("http://127.0.0.1:1", KEY) as nobody:
        with pytest.raises(FeedDownError, match="does not answer"):
            await nobody.windows("r/1", START_MS, START_MS + WINDOW_MS)
    async with open_feed("", "") as none:
        with pytest.raises(FeedDownError, match="TELEMETRY_URL is not set"):
            await none.windows("r/1", START_MS, START_MS + WINDOW_MS)


async def test_a_reader_behind_by_long_catches_up_in_steps(peer: tuple[Peer, EvidenceFeed]) -> None:
    telemetry, feed = peer
    telemetry.answer["ingested_until_unix_ms"] = 4_000_000_000_000
    await feed.windows("r/1", START_MS, START_MS + 1_000 * WINDOW_MS)
    assert telemetry.asked[0]["until_ms"] == str(START_MS + 60 * WINDOW_MS)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 40))))
def test_nothing_is_settled_that_was_asked_for_later(steps: list[tuple[int, int, int]]) -> None:
    settling = Settling()
    now_ms, until_ms, ingested_ms, asked = 100, 0, 0, [(0, 0)]
    for elapsed_ms, more_ms, lag_ms in steps:
        now_ms += elapsed_ms
        until_ms = min(now_ms, until_ms + more_ms)
        settling.asked(now_ms, until_ms)
        asked.append((now_ms, until_ms))
        ingested_ms = max(ingested_ms, now_ms - lag_ms)
        settled_ms = settling.settled(ingested_ms)
        assert settled_ms == max(until for at, until in asked if at <= ingested_ms)
    # Once all is ingested, all that was asked for is settled.
    assert settling.settled(now_ms) == max(until for _, until in asked)
