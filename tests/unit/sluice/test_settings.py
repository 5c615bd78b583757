import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from sluice.settings import ServiceSettings


class ExampleSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="EXAMPLE__")

    address: str
    workers: int = Field(default=1, ge=1)


def test_values_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE__ADDRESS", "127.0.0.1:1")
    assert ExampleSettings.from_environment().address == "127.0.0.1:1"


def test_every_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXAMPLE__WORKER", "2")
    monkeypatch.setenv("EXAMPLE__WORKERS", "0")
    with pytest.raises(SystemExit) as end:
        ExampleSettings.from_environment()
    assert end.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "EXAMPLE__WORKER;" in lines[0]
    assert any("EXAMPLE__ADDRESS" in line for line in lines)
    assert any("EXAMPLE__WORKERS" in line and "greater than" in line for line in lines)
