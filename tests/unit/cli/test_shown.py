import io
import json
import os
import shlex

import pytest
from rich.console import Console

from cli.render import (
    console,
    curl_line,
    duration,
    show_objects,
    started_table,
    status_json,
    status_table,
)
from cli.stack.health import HealthRow, replica_states
from cli.stack.progress import (
    LiveRenderer,
    PipeRenderer,
    PlainRenderer,
    ProgressLine,
    StartProgress,
    replay,
    terminal_renderer,
)
from cli.stack.state import DONE, DOWN, READY, STARTING, WAITING

ROWS = [
    HealthRow("gateway", 11, 8000, 120.44, READY, "ok", 0, 75.0),
    HealthRow("router", 12, 20001, 60.0, DOWN, "down", 2, 0.0),
]


def rendered(renderable) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(renderable)
    return out.getvalue()


def test_the_status_table_shows_every_process_and_the_sum() -> None:
    text = rendered(status_table(ROWS))
    gateway, router, total = [line.split() for line in text.splitlines() if line.strip()][-3:]
    assert gateway == ["gateway", "11", "8000", "120", "MiB", "ok", "0", "1m", "15s"]
    assert router[:5] == ["router", "12", "20001", "60", "MiB"]
    assert total == ["total", "180", "MiB"]
    assert "8000" in rendered(started_table(ROWS))


def test_the_status_for_programs_is_unhealthy_when_one_is() -> None:
    shown = status_json(ROWS, READY, "sim")
    assert shown["is_healthy"] is False
    assert shown["memory_mib"] == 180.4
    assert [p["is_healthy"] for p in shown["processes"]] == [True, False]
    assert status_json(ROWS[:1], READY, "sim")["is_healthy"] is True
    json.dumps(shown)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m 0s"), (3661, "1h 1m"), (90061, "1d 1h")],
)
def test_durations_have_two_units(seconds, text) -> None:
    assert duration(seconds) == text


def test_the_curl_line_is_one_line_that_a_shell_splits_right() -> None:
    line = curl_line("http://127.0.0.1:8000/v1", "sk-sluice-x", "sluice-tiny")
    assert "\n" not in line
    words = shlex.split(line)
    assert words[2] == "http://127.0.0.1:8000/v1/chat/completions"
    assert "Authorization: Bearer sk-sluice-x" in words
    assert json.loads(words[-1])["stream"] is True


def test_objects_are_shown_as_a_table_or_as_json(capsys) -> None:
    objects = [{"id": "a", "name": None, "x": 1.23456}]
    show_objects(objects, ("id", "name", "x"), as_json=False)
    assert capsys.readouterr().out.split()[-3:] == ["a", "-", "1.23"]
    show_objects(objects, ("id",), as_json=True)
    assert json.loads(capsys.readouterr().out) == objects
    assert console().width == 240


def test_replica_states_are_found_by_port() -> None:
    replicas = [
        {"grpc_address": "127.0.0.1:81", "state": "REPLICA_STATE_READY"},
        {"grpc_address": "", "state": "starting"},
        {"grpc_address": "127.0.0.1:82", "state": "lost"},
    ]
    assert replica_states(replicas) == {81: "ready", 82: "lost"}


def test_plain_progress_prints_ends_only_and_each_once() -> None:
    out = io.StringIO()
    progress = StartProgress(PlainRenderer(out))
    for state in (WAITING, STARTING, READY, READY):
        progress.update("gateway", state, "here")
    progress.update("router", STARTING)
    progress.update("router", DOWN, "why")
    progress.say("remark")
    lines = out.getvalue().splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", "gateway"], ["!!", "router"], ["remark"]]
    assert lines[1].endswith("why")


def test_a_closed_output_is_no_failure() -> None:
    out = io.StringIO()
    out.close()
    PlainRenderer(out).say("x")


def test_live_progress_ends_without_a_spinner() -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=80)
    renderer = terminal_renderer(terminal)
    assert isinstance(renderer, LiveRenderer)
    progress = StartProgress(renderer)
    progress.update("gateway", STARTING)
    progress.update("router", WAITING)
    progress.update("seed", DONE)
    progress.say("remark")
    progress.close_open_lines()
    renderer.close()
    last = {line.split()[1]: line for line in out.getvalue().splitlines() if len(line.split()) > 1}
    assert "·" in last["gateway"]
    assert "·" in last["router"]
    assert "✓" in last["seed"]
    assert isinstance(terminal_renderer(Console(file=io.StringIO())), PlainRenderer)


@pytest.mark.parametrize("error", ["", "it broke"])
def test_progress_travels_through_a_pipe(error) -> None:
    reading, writing = os.pipe()
    pipe = PipeRenderer(writing)
    pipe.show(ProgressLine("gateway", READY, 1.5, "x"))
    pipe.say("remark")
    pipe.end(error)
    pipe.show(ProgressLine("late"))  # after the end nobody listens, and that is no error
    out = io.StringIO()
    with os.fdopen(reading) as received:
        assert replay(received, PlainRenderer(out)) == error
    assert "gateway" in out.getvalue()
    assert "remark" in out.getvalue()


def test_a_supervisor_that_ends_without_a_word_is_noticed() -> None:
    reading, writing = os.pipe()
    pipe = PipeRenderer(writing)
    pipe.show(ProgressLine("gateway", DOWN))
    pipe.close()
    with os.fdopen(reading) as received:
        assert replay(received, PlainRenderer(io.StringIO())) is None


def test_a_pipe_without_a_reader_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    pipe = PipeRenderer(writing)
    pipe.show(ProgressLine("gateway"))
    pipe.end()


def test_a_table_is_as_wide_as_columns_says_and_keeps_ids_whole(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    digest, words = "ab" * 32, "some words that take more room than there is"
    show_objects([{"digest": digest, "text": words}], ("digest", "text"), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert any(digest in line for line in lines)
    assert len(max(lines, key=len)) < len(digest) + 20, "all else is folded"
    show_objects([{"id": "a", "text": words}], ("id", "text"), as_json=False)
    assert len(max(capsys.readouterr().out.splitlines(), key=len)) <= 40


@pytest.mark.parametrize("columns", [20, 60, 100])
def test_no_column_is_lost_where_there_is_no_room(capsys, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [f"column_{number}" for number in range(12)]
    show_objects([dict.fromkeys(names, "some words")], names, as_json=False)
    said = capsys.readouterr().out
    assert all(name in said for name in names)
    assert said.count("words") == len(names)
