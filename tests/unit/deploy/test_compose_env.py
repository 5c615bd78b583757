"""`sluice compose init`: secrets are made once, differ everywhere, and are readable by nobody else."""

import hashlib
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import compose_env
from cli.app import app
from cli.stack.home import Home, parse_env


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    return tmp_path


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_secrets_are_made_once(place: Path) -> None:
    said = run("compose", "init")
    values = parse_env((place / ".env").read_text())
    secrets = {v for n, v in values.items() if n.endswith(("PASSWORD", "_KEY"))}
    assert len(secrets) == 7
    assert not [secret for secret in secrets if secret in said]
    assert "nothing was missing" in run("compose", "init")
    assert parse_env((place / ".env").read_text()) == values
    for file in (place / ".env", Home.find().context_file("compose")):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_chosen_values_stay_and_the_digest_follows_the_key(place: Path) -> None:
    (place / ".env").write_text("SLUICE_ADMIN_KEY=mine\nCOMPOSE_PROFILES=\nOTHER=1\n")
    run("compose", "init")
    values = parse_env((place / ".env").read_text())
    assert values["SLUICE_ADMIN_KEY"] == "mine"
    assert values["SLUICE_ADMIN_KEY_SHA256"] == hashlib.sha256(b"mine").hexdigest()
    assert values["COMPOSE_PROFILES"] == ""
    assert values["OTHER"] == "1"


def test_lines_that_are_right_stay_as_they_are(place: Path) -> None:
    mine = (
        "# of the team\n\nexport OTHER = 'two words'  # why\nGRAFANA_PORT=\"3001\" # taken: 3000\n"
        "SLUICE_ADMIN_KEY='mine'"
    )
    (place / ".env").write_text(mine + "\n\nVALKEY_PASSWORD=\nSLUICE_ADMIN_KEY_SHA256=old")
    run("compose", "init")
    text = (place / ".env").read_text()
    assert text.startswith(mine + "\n\nVALKEY_PASSWORD=valkey-")
    assert text.count("VALKEY_PASSWORD=") == text.count("SLUICE_ADMIN_KEY_SHA256=") == 1
    known = compose_env.parsed(text)
    assert (known["OTHER"], known["GRAFANA_PORT"]) == ("two words", "3001")
    assert known["SLUICE_ADMIN_KEY_SHA256"] == hashlib.sha256(b"mine").hexdigest()
    assert "nothing was missing" in run("compose", "init")
    assert (place / ".env").read_text() == text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('X="two\nlines"', "line 1 is not NAME=VALUE"),
        ("X", "line 1 is not NAME=VALUE"),
        ("SLUICE_ADMIN_KEY='hunter 2'", "SLUICE_ADMIN_KEY may have"),
        ("POSTGRES_PASSWORD=hunter@2", "POSTGRES_PASSWORD may have"),
    ],
)
def test_an_unreadable_file_is_named_and_left_alone(place: Path, line: str, said: str) -> None:
    (place / ".env").write_text(line)
    done = CliRunner().invoke(app, ["compose", "init"])
    assert done.exit_code == 1
    assert said in done.output
    assert "hunter" not in done.output
    assert (place / ".env").read_text() == line


def test_two_installations_share_no_secret() -> None:
    first, second = compose_env.completed({}), compose_env.completed({})
    assert {n for n in first if first[n] == second[n]} == set(compose_env.PLAIN)


def test_the_context_names_the_addresses_of_commands(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Put back what the command sets: it ends with its process, a test does not.
    for name in ("OPENAI_BASE_URL", "SLUICE_ADMIN_URL", "SLUICE_ADMIN_KEY", "SLUICE_TELEMETRY_URL"):
        monkeypatch.setenv(name, "x")
    done = CliRunner().invoke(app, ["--context", "compose", "tiers", "list"])
    assert done.exit_code == 1
    assert "there is no context 'compose'" in done.output
    (place / ".env").write_text("ADMIN_PORT=1\n")
    run("compose", "init")
    done = CliRunner().invoke(app, ["--context", "compose", "tiers", "list"])
    assert "127.0.0.1:1" in done.output
