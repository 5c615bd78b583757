"""Tests that records of engines are read again, and that unreadable ones are ignored."""

import json
import os
from dataclasses import replace
from pathlib import Path

from replica.agent.replica_state import EngineSpec
from replica.agent.runs import RunFile, RunRecord
from sluice.procfs import start_ticks

SPEC = EngineSpec("sim", "a" * 64, (("speed", "2"),), (0, 1))
RECORD = RunRecord("r-1", SPEC, 3, os.getpid(), start_ticks(os.getpid()), 4000, 4001, restarts=2)


def test_a_record_is_found_by_the_next_agent(tmp_path: Path) -> None:
    assert RunFile(tmp_path).load() is None
    file = RunFile(tmp_path)
    file.save(RECORD)
    assert RunFile(tmp_path).load() == RECORD
    file.mark_ready()
    again = RunFile(tmp_path)
    assert again.load() == replace(RECORD, was_ready=True)
    again.remove()
    again.remove()
    again.mark_ready()
    assert RunFile(tmp_path).load() is None


def test_an_engine_adopted_while_it_starts_is_marked_when_it_is_ready(tmp_path: Path) -> None:
    RunFile(tmp_path).save(RECORD)
    file = RunFile(tmp_path)
    file.load()
    file.mark_ready()
    assert RunFile(tmp_path).load() == replace(RECORD, was_ready=True)


def test_damaged_records_and_records_of_other_versions_count_as_none(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    RunFile(tmp_path).save(RECORD)
    good = json.loads(path.read_text())
    bad = [
        {**good, "format": 1},
        {name: value for name, value in good.items() if name != "pid"},
        {**good, "colour": "blue"},
        {**good, "spec": {"engine": "sim"}},
    ]
    for values in bad:
        path.write_text(json.dumps(values))
        assert RunFile(tmp_path).load() is None
    for text in ("", "{", "[]"):
        path.write_text(text)
        assert RunFile(tmp_path).load() is None
    RunFile(tmp_path / "missing").save(RECORD)


def test_a_process_is_named_by_id_and_start() -> None:
    assert RECORD.is_running
    assert not replace(RECORD, start_ticks=RECORD.start_ticks - 1).is_running
    assert not replace(RECORD, start_ticks=0, pid=2**22).is_running
