import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.stack.home import (
    Home,
    load_secrets,
    parse_env,
    read_env,
    render_env,
    save_secrets,
    try_lock,
    with_demo_key,
    write_atomic,
)
from cli.stack.logfiles import find_log, log_names
from cli.stack.state import (
    READY,
    ProcessState,
    StackState,
    is_supervised,
    own_identity,
    parse_state,
    read_state,
    start_ticks,
    write_state,
)


def state(**fields) -> StackState:
    pid, ticks = own_identity()
    values = {
        "supervisor_pid": pid,
        "supervisor_started": ticks,
        "started_unix_s": 1.0,
        "phase": READY,
        "engine": "sim",
        "port": 8000,
        "admin_port": 8001,
        "replicas": 1,
        "processes": (ProcessState("gateway", READY, 17, 8000), ProcessState("router")),
    }
    return StackState(**values | fields)


def test_home_is_chosen_then_from_the_environment_then_here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLUICE_HOME", raising=False)
    assert Home.find().root == tmp_path / ".sluice"
    monkeypatch.setenv("SLUICE_HOME", "elsewhere")
    assert Home.find().root == tmp_path / "elsewhere"
    assert Home.find(Path("/x")).root == Path("/x")


def test_two_homes_have_different_markers() -> None:
    assert Home(Path("/a")).marker == Home(Path("/a")).marker != Home(Path("/b")).marker


def test_a_file_is_replaced_whole_with_its_mode(tmp_path) -> None:
    file = tmp_path / "deep" / "file"
    write_atomic(file, "one")
    write_atomic(file, "two", mode=0o600)
    assert file.read_text() == "two"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_secrets_are_made_once_and_closed_to_others(tmp_path) -> None:
    home = Home(tmp_path)
    first = load_secrets(home)
    assert load_secrets(home) == first
    assert stat.S_IMODE(home.secrets_file.stat().st_mode) == 0o600
    passwords = {first.valkey_password, first.tracestore_password, first.broker_password}
    assert len(passwords | {first.admin_key}) == 4
    save_secrets(home, with_demo_key(first, "id", "key"))
    assert load_secrets(home).demo_key == "key"
    assert load_secrets(home).admin_key == first.admin_key


NAMES = st.from_regex(r"[A-Z][A-Z0-9_]{0,20}", fullmatch=True)
VALUES = st.from_regex(r"[A-Za-z0-9:/._=-]{1,60}", fullmatch=True)


@given(st.dictionaries(NAMES, VALUES))
def test_the_environment_file_reads_back(values) -> None:
    assert parse_env(render_env(values)) == values


@pytest.mark.parametrize("value", ["", "a b", "$(x)", "a;b", "`x`", "a\nB=c"])
def test_the_environment_file_holds_nothing_a_shell_would_run(value) -> None:
    with pytest.raises(AssertionError):
        render_env({"NAME": value})


def test_a_stack_that_never_ran_has_no_environment_and_no_state(tmp_path) -> None:
    assert read_env(Home(tmp_path)) == {}
    assert read_state(Home(tmp_path)) is None


def test_only_one_holds_the_lock_and_its_end_gives_it_back(tmp_path) -> None:
    home = Home(tmp_path)
    held = try_lock(home)
    assert held is not None
    assert try_lock(home) is None
    held.close()
    again = try_lock(home)
    assert again is not None
    again.close()


def test_the_state_reads_back(tmp_path) -> None:
    home = Home(tmp_path)
    write_state(home, state())
    assert read_state(home) == state()
    assert read_state(home).process("gateway").pid == 17
    assert read_state(home).process("nobody") is None


@given(st.text())
def test_a_malformed_state_is_none(text) -> None:
    assert parse_state(text) is None


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"processes": [{"x": 1}]}', "null"])
def test_states_of_other_versions_are_none(text) -> None:
    assert parse_state(text) is None


def test_a_reused_process_id_is_not_the_supervisor() -> None:
    assert is_supervised(state())
    assert not is_supervised(state(supervisor_started=own_identity()[1] + 1))
    assert not is_supervised(state(supervisor_pid=2**22 + 1, supervisor_started=0))
    assert start_ticks(2**22 + 1) == 0


def test_the_state_file_is_plain_json(tmp_path) -> None:
    home = Home(tmp_path)
    write_state(home, state())
    shown = json.loads(home.state_file.read_text())
    assert shown["processes"][0]["name"] == "gateway"


def test_logs_have_the_names_that_status_shows(tmp_path) -> None:
    home = Home(tmp_path)
    home.logs.mkdir(parents=True)
    (home.logs / "gateway.log").touch()
    for replica, model, changed_s in (("a", "llm", 2), ("b", "embed", 3), ("c", "llm", 1)):
        directory = home.service_state("agent") / "replicas" / replica
        (directory / "models" / model).mkdir(parents=True)
        (directory / "triton.log").write_text(replica)
        os.utime(directory / "triton.log", (changed_s, changed_s))
    assert log_names(home) == ["gateway", "triton", "triton-embed"]
    found = {name: find_log(home, name) for name in ("triton", "triton-embed", "nobody")}
    assert {name: log and log.read_text() for name, log in found.items()} == {
        "triton": "a",
        "triton-embed": "b",
        "nobody": None,
    }
