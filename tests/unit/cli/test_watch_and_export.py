"""Commands that go on through a lost answer, and say what ended them."""

from typing import Any

import pytest
from typer.testing import CliRunner

from cli import admin, rollout_commands, usage_commands
from cli.api import ApiClient, ApiError
from cli.app import app

ROLLOUT = "rollout_" + "0" * 26
DONE = {
    "id": ROLLOUT,
    "phase": "done",
    "reason": "",
    "explanation": "",
    "ended_at": "now",
    "stage": 1,
    "stages": 2,
    "share_percent": 100,
    "mirrored_percent": 0,
    "watched_s": 1.0,
    "watched_needed_s": 1.0,
    "sample": 1,
    "control_sample": 1,
    "sample_needed": 1,
}


class Plane(ApiClient):
    """Answers in turn, and then always what it answered last."""

    answers: list[dict[str, Any] | int]

    async def call(self, method, path, body=None, query=None) -> dict[str, Any]:
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, int):
            raise ApiError(f"status {answer}", answer)
        return answer


@pytest.fixture
def watch(monkeypatch):
    def watch(*answers: dict[str, Any] | int, patience_s: float = 3600.0):
        monkeypatch.setattr(Plane, "answers", list(answers), raising=False)
        monkeypatch.setattr(admin, "ApiClient", Plane)
        monkeypatch.setattr(rollout_commands, "_POLL_S", 0.0)
        monkeypatch.setattr(rollout_commands, "_LOST_S_MAX", patience_s)
        monkeypatch.setenv("SLUICE_ADMIN_URL", "http://127.0.0.1:1")
        monkeypatch.setenv("SLUICE_ADMIN_KEY", "key")
        return CliRunner().invoke(app, ["rollouts", "watch", ROLLOUT])

    return watch


def test_a_watch_outlives_a_control_plane_that_is_away(watch) -> None:
    result = watch(0, 503, DONE | {"ended_at": ""}, 500, DONE)
    assert result.exit_code == 0, result.output
    assert "done" in result.output


def test_the_status_tells_a_promotion_from_a_rollback_and_from_the_unknown(watch) -> None:
    assert watch(DONE | {"phase": "rolled_back"}).exit_code == 1
    assert watch(404).exit_code == 3
    assert watch(0, patience_s=0.0).exit_code == 3


def test_a_file_that_cannot_be_written_is_said_in_a_line(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(usage_commands, "ask", lambda *_: b"PAR1")
    path = tmp_path / "no" / "usage.parquet"
    result = CliRunner().invoke(app, ["usage", "--parquet", str(path)])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    path.parent.mkdir()
    assert CliRunner().invoke(app, ["usage", "--parquet", str(path)]).exit_code == 0
    assert path.read_bytes() == b"PAR1"
