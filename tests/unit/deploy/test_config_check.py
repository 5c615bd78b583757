"""`sluice config`: what is wrong and what to write; never a value of a secret."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli.app import app
from sluice.probe import target
from tests.unit.deploy.compose_file import ROOT

GATEWAY = {
    "GATEWAY__INSTANCE_ID": "g",
    "GATEWAY__HTTP_ADDRESS": "0.0.0.0:8000",
    "GATEWAY__CONTROL_ADDRESS": "c:1",
    "GATEWAY__STATE_DIR": "/s",
    "GATEWAY__VALKEY_URL": "redis://:hunter2@v:1",
    "GATEWAY__KAFKA_BOOTSTRAP": "k:1",
}


def run(tmp_path: Path, command: str, status: int, *services: str, **changes: str) -> str:
    file = tmp_path / "env"
    file.write_text("".join(f"{n}={v}\n" for n, v in {**GATEWAY, **changes}.items()))
    done = CliRunner().invoke(app, ["config", command, *services, "--env-file", str(file)])
    assert done.exit_code == status, done.output
    assert "hunter2" not in done.output
    return done.output


def test_right_settings_are_ok(tmp_path: Path) -> None:
    assert run(tmp_path, "check", 0) == "gateway: ok, 6 set\n"


def test_quotes_of_env_files_are_none_of_the_value(tmp_path: Path) -> None:
    assert "ok, 7" in run(tmp_path, "check", 0, GATEWAY__WORKERS='"2"')


def test_a_misspelt_one_is_told_with_the_right_one(tmp_path: Path) -> None:
    said = run(tmp_path, "check", 2, GATEWAY__WORKER="2")
    assert said == "gateway: unknown setting GATEWAY__WORKER; did you mean GATEWAY__WORKERS?\n"


def test_a_wrong_one_is_told_with_its_range_and_meaning(tmp_path: Path) -> None:
    said = run(tmp_path, "check", 2, GATEWAY__DRAIN_S="hunter2")
    assert "GATEWAY__DRAIN_S: Input should be a valid number" in said
    assert "number, ≥ 0, ≤ 3,600" in said
    assert "for which streams may still run" in said


def test_a_missing_one_is_told(tmp_path: Path) -> None:
    said = run(tmp_path, "check", 2, "router", "gateway")
    assert "router: ROUTER__CONTROL_ADDRESS: Field required (text: host:port of" in said
    assert "gateway: ok" in said


def test_an_unknown_service_is_told(tmp_path: Path) -> None:
    assert "choose from: gateway, router, agent" in run(tmp_path, "check", 2, "gatewy")


def test_show_has_defaults_and_hides_secrets(tmp_path: Path) -> None:
    said = run(tmp_path, "show", 0)
    assert "GATEWAY__VALKEY_URL=**********\n" in said
    assert "GATEWAY__WORKERS=1  # default\n" in said


def test_the_probe_asks_where_the_process_listens() -> None:
    assert target({"ROUTER__HTTP_ADDRESS": "router:7080"}) == ("router", 7080, False)
    tls = GATEWAY | {"GATEWAY__TLS_CERT": "/c"}
    assert target(tls) == ("127.0.0.1", 8000, True)
    # Which tells of all workers, and speaks no TLS.
    assert target(tls | {"GATEWAY__OPS_ADDRESS": "[::]:9"}) == ("::1", 9, False)
    with pytest.raises(LookupError, match="AGENT__HTTP_ADDRESS"):
        target({})


@given(st.text("abc", min_size=1), st.integers(1, 65535))
def test_the_probe_takes_any_address(host: str, port: int) -> None:
    assert target({"AGENT__HTTP_ADDRESS": f"{host}:{port}"}) == (host, port, False)


def test_the_command_works_in_the_image_without_the_servers_of_the_local_stack() -> None:
    """The image `sluice` has no psutil, chdb and the like; only `sluice up` and `status` do."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['psutil', 'chdb', 'openvino', 'numpy']));"
        "import cli.stack.seed, cli.stack.base; from cli.commands import COMMANDS, load;"
        "[load(name) for name in COMMANDS]"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
