"""`sluice explain`: questions that make no sense, and how answers look."""

import json

import pytest
from typer.testing import CliRunner

from cli import explain
from cli.app import app
from sluice.wire.router.v1 import router_pb2 as wire

QUEUED = wire.Explanation(
    router_id="router-1",
    cell_id="cell-1",
    request_id="req-7",
    state="queued",
    reason="no replica can take it: 1 draining, 1 sequences",
    predicted_ttft_ms=1250,
    predicted_queue_ms=900,
    deadline_left_ms=28_000,
    candidates=[
        wire.Candidate(
            replica_id="replica-1",
            excluded_by="sequences",
            cost_us=1_500,
            cached_tokens=64,
            is_session_home=True,
            health="healthy",
        ),
        wire.Candidate(replica_id="replica-2", excluded_by="draining", health="ejected: slow"),
    ],
)
REFUSED = wire.Explanation(
    router_id="router-2",
    cell_id="cell-2",
    request_id="req-7",
    state="rejected",
    code="overloaded",
    reason="the first token would take 40.0 s, the deadline is 30.0 s; try again later",
    retry_after_ms=10_000,
    predicted_ttft_ms=40_000,
)


def run(*words: str):
    return CliRunner().invoke(app, ["explain", *words])


@pytest.fixture
def answers(monkeypatch):
    """Answers the routers' part: what they said, and who said nothing."""

    def answer(*said: wire.Explanation, silent: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(explain, "ask", lambda _: (list(said), list(silent)))

    return answer


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "either the id of a request or"),
        (("req-1", "--model", "m"), "either the id of a request or"),
        (("--model", "m"), "give the prompt"),
        (("--model", "m", "--prompt", "x", "--prompt-tokens", "3"), "give the prompt"),
        (("--model", "m", "--tokens-file", "/nowhere.json"), "cannot be read as JSON"),
        (("--model", "m", "--prompt-tokens", "3", "--cache-root", "00"), "32 hexadecimals"),
    ],
)
def test_a_question_without_sense_is_one_line_and_status_2(words, said):
    shown = run(*words)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert said in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '["a"]', "[true]", "[-1]", "[4294967296]"])
def test_a_file_must_hold_token_ids(tmp_path, text):
    file = tmp_path / "ids.json"
    file.write_text(text)
    shown = run("--model", "m", "--tokens-file", str(file))
    assert shown.exit_code == 2
    assert str(file) in shown.stderr


def test_an_answer_for_people(answers):
    answers(QUEUED, silent=("the router at 10.0.0.9:7000 does not answer: away",))
    shown = run("req-7")
    assert shown.exit_code == 0
    assert shown.stderr == "sluice: the router at 10.0.0.9:7000 does not answer: away\n"
    lines = [line.strip() for line in shown.stdout.splitlines()]
    assert lines[:3] == [
        "req-7: queued in cell cell-1, router router-1",
        "no replica can take it: 1 draining, 1 sequences",
        "first token in 1.25 s, 900 ms of it in the queue; deadline in 28.00 s",
    ]
    [first] = [line for line in lines if line.startswith("replica-1")]
    assert first.split()[1:3] == ["1.5", "ms"]
    assert first.endswith("its session, no: sequences")
    [second] = [line for line in lines if line.startswith("replica-2")]
    assert second.split()[-4:] == ["ejected:", "slow", "no:", "draining"]


def test_cells_that_are_not_the_best_are_listed_below(answers):
    answers(QUEUED, REFUSED)
    lines = [
        line.split() for line in run("--model", "m", "--prompt-tokens", "9").stdout.splitlines()
    ]
    [other] = [line for line in lines if line[:1] == ["cell-2"]]
    assert other[1:4] == ["router-2", "rejected", "-"]


def test_a_refusal_says_when_to_come_back(answers):
    answers(REFUSED)
    lines = run("--model", "m", "--prompt-tokens", "9").stdout.splitlines()
    assert lines[0] == "req-7: rejected (overloaded) in cell cell-2, router router-2"
    assert lines[2] == "try again in 10.00 s"
    assert len(lines) == 3


def test_an_answer_for_programs_has_every_field_as_a_number_or_a_word(answers):
    answers(QUEUED)
    [answer] = json.loads(run("req-7", "--json").stdout)
    assert answer.keys() == {field.name for field in wire.Explanation.DESCRIPTOR.fields}
    assert (answer["predicted_ttft_ms"], answer["code"]) == (1250, "")
    candidate = answer["candidates"][0]
    assert candidate.keys() == {field.name for field in wire.Candidate.DESCRIPTOR.fields}
    assert (candidate["cost_us"], candidate["is_session_home"]) == (1500, True)
