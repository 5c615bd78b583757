"""The server's decisions apart from any socket."""

import asyncio
import gc
import gzip
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import cast

import pytest
from aiohttp import http_exceptions as raw
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from gateway.metrics import GatewayMetrics
from gateway.server.body import BodyBudget, unpack
from gateway.server.deadlines import Deadlines
from gateway.server.errors import HttpError
from gateway.server.exposition import merged
from gateway.server.identity import new_identity
from gateway.server.loop_lag import LoopLag
from gateway.server.malformed import FIELD_BYTES_MAX, LINE_BYTES_MAX, malformed
from gateway.server.routes import MethodNotAllowedError, Routes
from sluice.errors import PlatformError, RejectedError

GZIP = 16 + zlib.MAX_WBITS
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def identity(**headers: str):
    given_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return new_identity(CIMultiDictProxy(CIMultiDict(given_headers)))


def test_a_caller_names_request_and_trace() -> None:
    named = identity(x_request_id="mine-1", traceparent=f"00-{TRACE}-{SPAN}-00")
    assert (named.request_id, named.trace_id) == ("mine-1", TRACE)
    version, trace, span, flags = named.traceparent.split("-")
    assert (version, trace, flags) == ("00", TRACE, "00")
    assert span != SPAN
    assert named.headers["traceresponse"] == named.traceparent
    later = identity(traceparent=f"cc-{TRACE}-{SPAN}-01-what-comes-then")
    assert later.trace_id == TRACE


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 1000}",
    ],
)
def test_a_bad_traceparent_begins_a_new_trace(parent: str) -> None:
    named = identity(traceparent=parent)
    assert named.trace_id == named.uid


@given(st.text())
def test_request_ids_cannot_break_a_header_or_a_log(given_id: str) -> None:
    request_id = identity(x_request_id=given_id).request_id
    assert request_id.isprintable()
    assert len(request_id) <= 128
    assert request_id.isascii()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (raw.LineTooLong(b"GET /aaa...", LINE_BYTES_MAX), 414),
        (raw.LineTooLong(b"aaa...", FIELD_BYTES_MAX), 431),
        (raw.BadHttpMessage("Too many headers received"), 431),
        (raw.BadStatusLine(error="Bad status line:\n  Invalid HTTP version: x"), 505),
        (raw.BadStatusLine(error="Bad status line:\n  other"), 400),
        (raw.BadHttpMethod(error="bad"), 400),
        (raw.InvalidURLError("http://["), 400),
        (raw.InvalidHeader(b"Authorization: Bearer sk-secret\x00"), 400),
        (ValueError("anything"), 400),
    ],
)
def test_non_http_bytes_get_a_status_and_no_echo(error: Exception, status: int) -> None:
    answer = malformed(error)
    assert answer.status == status
    assert answer.ends_connection
    assert "secret" not in answer.message


def routes() -> Routes:
    async def handler(_: object) -> None: ...

    found = Routes()
    found.add("GET", "/v1/models", handler)
    found.add("POST", "/v1/models", handler)
    found.add("GET", "/v1/models/*", handler)
    return found


def test_routes_are_exact_or_prefixes() -> None:
    found = routes()
    assert found.find("/v1/models").name == "/v1/models"
    assert found.find("/v1/models/a/b").name == "/v1/models/*"
    assert found.find("/v1/models").handler("HEAD") is found.find("/v1/models").handler("GET")
    for path in ("", "/", "/v1", "/v1/models/", "/v1/modelsx", "v1/models", "*"):
        with pytest.raises(PlatformError) as unknown:
            found.find(path)
        assert unknown.value.status == 404
    with pytest.raises(MethodNotAllowedError) as refused:
        found.find("/v1/models").handler("PUT")
    assert refused.value.headers == {"Allow": "GET, HEAD, POST"}


def test_a_wrong_method_is_told_with_the_path_that_was_asked_for() -> None:
    path = "/v1/models/tiny"
    with pytest.raises(MethodNotAllowedError, match=f"PUT is not allowed for {path};"):
        routes().find(path).handler("PUT", path)
    with pytest.raises(MethodNotAllowedError) as refused:
        routes().find(path).handler("PUT", path * 100)
    assert len(str(refused.value)) < 300


@given(st.text())
def test_any_path_has_a_known_label_or_none(path: str) -> None:
    try:
        name = routes().find(path).name
    except PlatformError as error:
        assert error.status == 404
    else:
        assert name in {"/v1/models", "/v1/models/*"}


@given(st.binary(max_size=4096))
def test_an_unpacked_body_equals_the_packed_one(body: bytes) -> None:
    assert unpack(gzip.compress(body), GZIP) == body
    assert unpack(zlib.compress(body), zlib.MAX_WBITS) == body


@given(st.binary(max_size=200), st.integers(1, 30))
def test_broken_packing_is_refused(body: bytes, cut: int) -> None:
    packed = gzip.compress(body)
    for broken in (packed[:-cut], packed + b"x", packed * 2, b"x" + packed):
        with pytest.raises(HttpError) as refused:
            unpack(broken, GZIP)
        assert refused.value.status == 400


def test_a_bomb_is_refused_before_it_is_whole() -> None:
    with pytest.raises(PlatformError) as refused:
        unpack(gzip.compress(bytes(5 << 20)), GZIP)
    assert refused.value.status == 413


def test_unfinished_bodies_share_a_budget() -> None:
    budget = BodyBudget(100)
    budget.take(60)
    with pytest.raises(RejectedError):
        budget.take(41)
    budget.take(40)
    budget.release(100)
    assert budget.held_bytes == 0


class Waiting:
    def __init__(self) -> None:
        self.is_over = asyncio.Event()

    def expire(self) -> None:
        self.is_over.set()


async def test_late_waiters_are_woken_in_order() -> None:
    deadlines = Deadlines(0.05, asyncio.get_running_loop(), Waiting.expire)
    many = [Waiting() for _ in range(200)]
    for one in many:
        deadlines.begin(one)
    for one in many[::2]:
        deadlines.end(one)
    async with asyncio.timeout(10):
        for one in many[1::2]:
            await one.is_over.wait()
    assert not any(one.is_over.is_set() for one in many[::2])
    assert not len(deadlines)
    deadlines.close()


class Timers:
    """What `Deadlines` asks of a loop, on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pending: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, due_s: float, callback: Callable[[], None]) -> object:
        self.pending.append((due_s, callback))
        return object()

    def fire(self) -> None:
        due_s, callback = min(self.pending, key=lambda it: it[0])
        self.pending.remove((due_s, callback))
        self.now_s = max(self.now_s, due_s)
        callback()


@pytest.mark.parametrize("count", [1, 10, 200])
def test_a_renewed_wait_needs_no_second_timer(count: int) -> None:
    loop, told = Timers(), [0]

    def again(waiting: int) -> None:
        told.append(waiting)
        deadlines.begin(waiting)

    deadlines = Deadlines[int](1.0, cast("asyncio.AbstractEventLoop", loop), again)
    for number in range(count):
        deadlines.begin(number)
        loop.now_s += 0.5 / count
    for _ in range(5 * count):
        loop.fire()
        assert len(loop.pending) == 1
        assert loop.pending[0][0] <= loop.now_s + 1.0
    assert len(told) > 4 * count


def test_pages_of_workers_become_one() -> None:
    first, second = GatewayMetrics(), GatewayMetrics()
    first.requests.labels("/v1/models", "200", "ok").inc(3)
    second.requests.labels("/v1/models", "200", "ok").inc(4)
    first.ttft.observe(0.2)
    page = merged({"g-0": first.page(), "g-1": second.page(), "g-2": b""}).decode()
    families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families)
    samples = {
        (s.name, s.labels["worker"], s.labels.get("le")): s.value
        for f in families
        for s in f.samples
    }
    assert samples["gateway_requests_total", "g-0", None] == 3
    assert samples["gateway_requests_total", "g-1", None] == 4
    assert samples["llm_ttft_seconds_bucket", "g-0", "0.2"] == 1
    assert samples["llm_ttft_seconds_bucket", "g-1", "0.2"] == 0
    types = [line for line in page.splitlines() if line.startswith("# TYPE llm_ttft")]
    assert types == ["# TYPE llm_ttft_seconds histogram"]


def hold_the_loop(told: list[object], until: threading.Event) -> None:
    """Block as a bug would, until the watchdog has spoken."""
    for _ in range(200):
        if told or until.wait(0.05):
            return


def test_a_loop_lags_when_it_is_late_and_at_work() -> None:
    lag = LoopLag(lambda _: None)
    told: list[bool] = []
    for lag_s, busy_share in (
        *((0.1, 0.9), (0.001, 0.9), (0.1, 0.9), (0.003, 0.5), (0.1, 1.0), (0.002, 0.9)),
        *((0.1, 0.4), (0.1, 0.4), (0.1, 0.9), (0.1, 0.4), (0.1, 0.6), (0.1, 0.6)),
    ):
        lag.note(lag_s, busy_share)
        told.append(lag.is_lagging)
    assert told == [False, False, False, True, True, False, *[False] * 5, True]


def test_a_calm_loop_is_looked_at_less_often() -> None:
    lag = LoopLag(lambda _: None)
    intervals: list[float] = []
    for lag_s, busy_share in ((0.0, 0.1), (0.0, 0.3), (0.0, 0.0), (0.01, 0.1), (0.001, 0.2)):
        lag.note(lag_s, busy_share)
        intervals.append(lag.interval_s)
    assert intervals == [0.1, 0.02, 0.25, 0.02, 0.1]


async def test_a_blocked_loop_is_measured_and_told_with_its_place() -> None:
    seen: list[float] = []
    lag = LoopLag(seen.append)
    with capture_logs() as told:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(lag.run())
            while not seen:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            argument = threading.Event()
            kept = weakref.ref(argument)
            hold_the_loop(told, argument)
            del argument
            before = len(seen)
            while len(seen) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert lag.lag_s > 0.1
            gc.collect()
            assert kept() is None, "nothing of what was seen is held"
            running.cancel()
    # A busy machine may hold the loop up once more, elsewhere.
    assert {entry["event"] for entry in told} == {"loop_blocked"}
    held = [entry for entry in told if any("hold_the_loop" in place for place in entry["where"])]
    assert len(held) == 1, told
