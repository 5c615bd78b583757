"""`sluice tenants texts set`: what is given replaces, what is not stays, and lists can be emptied."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cli import text_commands

KNOWN = {
    "is_on": True,
    "share_percent": 9,
    "retention_days": 3,
    "redacted": ["ip"],
    "words": ["falcon"],
}


@pytest.fixture
def set_policy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any] | None]:
    """Run the command; return the body that it would send, None if it sends none."""
    sent: list[dict[str, Any]] = []

    def edit(path: str, change: Callable[[dict[str, Any]], dict[str, Any]], _: object) -> Any:
        assert path == "/v1/text-policies/acme"
        sent.append(change(dict(KNOWN)))
        return {"id": "acme"} | sent[-1]

    monkeypatch.setattr(text_commands, "ask", lambda work: work(SimpleNamespace(edit=edit)))

    def run(*options: str) -> dict[str, Any] | None:
        CliRunner().invoke(text_commands.texts, ["set", "acme", *options])
        return sent[-1] if sent else None

    return run


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ((), {}),
        (("--off",), {"is_on": False}),
        (("--word", "eagle"), {"words": ["eagle"]}),
        (("--no-words",), {"words": []}),
        (("--no-redact",), {"redacted": []}),
    ],
)
def test_options_change_only_their_part_of_the_policy(
    set_policy: Callable[..., Any], options: tuple[str, ...], changed: dict[str, Any]
) -> None:
    assert set_policy(*options) == KNOWN | changed


def test_words_and_none_of_them_make_no_sense(set_policy: Callable[..., Any]) -> None:
    assert set_policy("--word", "eagle", "--no-words") is None
