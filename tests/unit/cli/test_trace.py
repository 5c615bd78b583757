"""`sluice trace`: stages of any event, bars that fit, and what is said where nothing is known."""

import json
from itertools import pairwise
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import explain, trace_commands
from cli.api import ApiError
from cli.app import app
from cli.trace_view import TraceStage, attempt_stages, bar, lines, stages, waterfall
from sluice.wire.router.v1 import router_pb2 as wire
from telemetry.rows import COLUMNS

TEXTS = {name: "" for name, kind in COLUMNS.items() if "String" in kind}
NUMBERS = {name: 0 for name, kind in COLUMNS.items() if "Int" in kind}
FLAGS = {name: False for name, kind in COLUMNS.items() if kind == "Bool"}
ENDED = {
    **TEXTS,
    **NUMBERS,
    **FLAGS,
    **{name: name for name in TEXTS},
    "received_at": "2030-01-01T00:00:00.000+00:00",
    "rollout_id": "",
    "outcome": "stop",
    "status": 200,
    "is_stream": True,
    "prompt_tokens": 15,
    "output_tokens": 101,
    "gateway_us": 1_000,
    "queue_us": 4_000,
    "engine_queue_us": 500,
    "load_us": 200,
    "prefill_us": 2_500,
    "ttft_us": 10_000,
    "total_us": 210_000,
}
MICROS = st.integers(0, 2**32 - 1)
EVENTS = st.fixed_dictionaries(
    {name: MICROS for name in NUMBERS if name.endswith("_us")}
    | {
        "is_stream": st.booleans(),
        "replica_id": st.sampled_from(["", "r"]),
        "resumes": st.integers(0, 3),
        "status": st.sampled_from([0, 200, 503]),
        "choices": st.integers(0, 3),
    }
).map(lambda some: ENDED | some)


def trace_of(row: dict[str, Any], **more: Any) -> dict[str, Any]:
    known = {"request": row, "is_settled": True, "closings": [], "copies": [], "others": []}
    return known | {"ingested_until": None} | more


def names(row: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(stage.name, stage.start_us, stage.end_us) for stage in stages(row)]


@given(EVENTS)
def test_stages_cover_the_time_of_a_request_without_gaps(row):
    found = stages(row)
    longest = max(row["total_us"], row["ttft_us"], row["gateway_us"])
    assert [stage.start_us for stage in found[:1]] == [0] * (longest > 0)
    assert [stage.end_us for stage in found[-1:]] == [longest] * (longest > 0)
    assert all(one.end_us == next_.start_us for one, next_ in pairwise(found))
    assert all(stage.end_us > stage.start_us for stage in found)


@given(EVENTS, st.integers(1, 300))
def test_bars_fit_the_width_or_are_left_out(row, width):
    shown = list(waterfall(stages(row), width))
    assert len({len(line) for line in shown}) == 1
    assert ("█" not in "".join(shown)) or len(shown[0]) <= width
    assert list(lines(trace_of(row), width))


@given(st.integers(0, 2**32), st.integers(1, 2**32), st.integers(0, 2**32), st.integers(1, 200))
def test_a_bar_has_its_width_and_shows_every_stage(start, length, rest, width):
    shown = bar(TraceStage("any", start, start + length), start + length + rest, width)
    assert len(shown) == width
    assert set(shown.strip()) == {"█"}


def test_a_streamed_answer_has_all_stages():
    assert names(ENDED) == [
        ("gateway", 0, 1_000),
        ("queue", 1_000, 5_000),
        ("load", 5_000, 5_200),
        ("batch", 5_200, 5_500),
        ("prefill", 5_500, 8_000),
        ("first token", 8_000, 10_000),
        ("decode", 10_000, 210_000),
    ]
    shown = "\n".join(lines(trace_of(ENDED), 120))
    assert "answer 101 tokens, 500/s after the first" in shown


def test_stages_that_cannot_be_placed_on_the_axis_are_shown_apart():
    resumed = ENDED | {"resumes": 2, "queue_us": 40_000}
    assert [name for name, _, _ in names(resumed)] == ["gateway", "first token", "decode"]
    shown = "\n".join(lines(trace_of(resumed), 120))
    assert "resumed 2 x; of the last attempt, on replica_id: queue 40.00 ms" in shown
    refused = ENDED | {"replica_id": "", "status": 503, "ttft_us": 0, "total_us": 9_000}
    assert names(refused) == [("gateway", 0, 1_000), ("not placed", 1_000, 9_000)]
    whole = ENDED | {"is_stream": False, "ttft_us": 210_000}
    assert names(whole)[-1] == ("decode", 8_000, 210_000)


PLACED = {
    "part": 0, "number": 0, "router_id": "router-1", "cell_id": "c", "replica_id": "r1",
    "submitted_us": 1_000, "first_us": 9_000, "ended_us": 80_000, "queue_us": 2_000,
    "engine_queue_us": 500, "prefill_us": 3_000, "cached_tokens": 4, "output_tokens": 30,
    "outcome": "replica_lost", "reason": "replica r1 was lost", "decision": None,
}  # fmt: skip
ATTEMPTS = st.lists(
    st.fixed_dictionaries(
        {name: MICROS for name in PLACED if name.endswith("_us")}
        | {"replica_id": st.sampled_from(["", "r"]), "part": st.integers(0, 2)}
    ).map(lambda some: PLACED | some),
    min_size=2,
    max_size=5,
)


@given(EVENTS, ATTEMPTS, st.integers(1, 300))
def test_bars_fit_for_any_attempts(row, attempts, width):
    shown = list(waterfall(attempt_stages(row, attempts), width))
    assert len({len(line) for line in shown}) == 1
    assert ("█" not in "".join(shown)) or len(shown[0]) <= width
    assert list(lines(trace_of(row, attempts=attempts), width))


def test_each_attempt_of_a_resumed_request_has_its_own_bars_and_says_why_it_ended():
    second = PLACED | {"number": 1, "replica_id": "r2", "submitted_us": 90_000, "first_us": 0}
    second |= {"ended_us": 200_000, "outcome": "stop", "reason": ""}
    row = ENDED | {"resumes": 1, "total_us": 200_000}
    found = [(it.name, it.start_us, it.end_us) for it in attempt_stages(row, [PLACED, second])]
    assert found == [
        ("gateway", 0, 1_000),
        ("attempt 0", 1_000, 80_000),
        ("  queue", 1_000, 3_000),
        ("  batch", 3_000, 3_500),
        ("  prefill", 3_500, 6_500),
        ("  first token", 6_500, 9_000),
        ("  decode", 9_000, 80_000),
        ("attempt 1", 90_000, 200_000),
        ("  queue", 90_000, 92_000),
        ("  batch", 92_000, 92_500),
        ("  prefill", 92_500, 95_500),
        ("  no token", 95_500, 200_000),
    ]
    shown = "\n".join(lines(trace_of(row, attempts=[PLACED, second]), 120))
    assert "attempt 0: r1, router router-1, cell c; 30 tokens, 4 prompt tokens cached" in shown
    assert "replica_lost: replica r1 was lost" in shown
    assert "of the last attempt" not in shown


def test_the_trace_of_a_lost_gateway_shows_the_routers_closings():
    told = {"part": 0, "router_id": "router-1", "replica_id": "r", "output_tokens": 9}
    lost = ENDED | dict.fromkeys((name for name in NUMBERS if name.endswith("_us")), 0)
    closing = told | {"ingested_at": "2030-01-01T00:00:01.000+00:00"}
    shown = "\n".join(lines(trace_of(lost, is_settled=False, closings=[closing]), 120))
    assert "only routers have reported it so far" in shown
    assert "closed by router-1: answer 0, 9 tokens on r" in shown
    assert "█" not in shown


@pytest.fixture
def services(monkeypatch):
    """Plays telemetry and the routers."""
    monkeypatch.setenv("SLUICE_ADMIN_URL", "http://nowhere")

    def play(found: dict[str, Any] | None, *live: wire.Explanation) -> None:
        answers = (found, "" if found else "404 there is no request")
        monkeypatch.setattr(trace_commands, "ask", lambda _, url="": answers if url else list(live))

    return play


def run(*words: str):
    return CliRunner().invoke(app, ["trace", *words])


def test_an_ended_request_is_shown_or_given_as_json(services):
    services(trace_of(ENDED))
    shown = run("request_id")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("request_id: stop (200) after 210 ms")
    assert json.loads(run("request_id", "--json").stdout)["request"] == ENDED


def test_an_ended_request_shows_the_knowledge_of_its_router(services):
    known = wire.Explanation(
        request_id="request_id", state="placed", chosen="r1", predicted_ttft_ms=9
    )
    known.candidates.add(replica_id="r1", cost_us=5_000, cached_tokens=4)
    decision = MessageToDict(known, preserving_proto_field_name=True) | {"of_tomorrow": 1}
    services(trace_of(ENDED, attempts=[PLACED | {"decision": decision, "reason": ""}]))
    shown = run("request_id").stdout
    assert "attempt 0, facts of its router at placement:" in shown
    assert "5.0 ms" in shown
    assert (
        "it was placed after 2.00 ms in the queue; the first token was predicted 9 ms after it was"
        " placed and came after 6.00 ms" in shown
    )


def test_of_a_living_request_the_router_is_asked_unless_for_a_tenant(services):
    services(None, wire.Explanation(request_id="r-1", state="queued", reason="no room"))
    shown = run("r-1")
    assert shown.exit_code == 0
    assert "it has not ended" in shown.stdout
    assert "no room" in shown.stdout
    assert json.loads(run("r-1", "--json").stdout)["routers"][0]["state"] == "queued"
    hidden = run("r-1", "--tenant", "acme")
    assert (hidden.exit_code, hidden.stdout) == (1, "")
    assert "there is no request" in hidden.stderr


def test_an_unknown_request_is_one_line(services):
    services(None)
    shown = run("r-1")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr == "sluice: 404 there is no request\n"


async def test_only_an_unknown_request_goes_on_to_the_routers(monkeypatch):
    class Telemetry:
        def __init__(self, status: int) -> None:
            self.status = status

        async def call(self, *_: object, **__: object) -> None:
            raise ApiError("no", self.status)

    assert await trace_commands._find(Telemetry(404), "r", {}) == (None, "no")
    with pytest.raises(ApiError):
        await trace_commands._find(Telemetry(503), "r", {})
    assert explain.plain(wire.Explanation(state="queued"))["state"] == "queued"
