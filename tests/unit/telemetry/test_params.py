"""Tests the parsing of query parameters."""

import re
from pathlib import Path

import pytest

from sluice.errors import BadRequestError
from telemetry import params

PAGE = Path(__file__).parents[3] / "console" / "pages" / "requests.js"


@pytest.mark.parametrize(
    ("text", "bounds"),
    [("404", (404, 404)), ("5xx", (500, 599)), ("200-399", (200, 399)), (None, (0, 65535))],
)
def test_a_status_is_one_a_class_or_a_range(text: str | None, bounds: tuple[int, int]) -> None:
    assert params.statuses({} if text is None else {"status": text}, "status") == bounds


@pytest.mark.parametrize("text", ["", "6xx", "99", "200-", "-399", "200-4xx", "200-399-500", "٤٠٤"])
def test_other_statuses_are_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="200-399"):
        params.statuses({"status": text}, "status")


def test_the_consoles_choices_are_taken() -> None:
    choices = re.search(r"const STATUSES = \[(.*?)\];", PAGE.read_text(), re.DOTALL)
    assert choices is not None
    values = re.findall(r'\["([^"]+)",', choices[1])
    assert len(values) == 3
    for value in values:
        assert params.statuses({"status": value}, "status") != (0, 65535)
