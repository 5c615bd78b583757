"""`sluice cost`: amounts that add up as they are shown, bars, and what it refuses."""

from decimal import Decimal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import cost_commands
from cli.app import app
from cli.cost_chart import amounts, svg, text_bar


def row(name: str, kind: str, micros: int) -> dict[str, Any]:
    return {"name": name, "kind": kind, "cost_micros": micros}


@given(st.lists(st.integers(0, 10**12), min_size=1))
def test_shown_amounts_add_up_to_the_shown_total(micros: list[int]) -> None:
    *parts, total = (Decimal(text.replace(",", "")) for text in amounts(micros))
    assert sum(parts) == total
    unit = Decimal("0.01") if sum(micros) >= 100_000_000 else Decimal("0.000001")
    for part, whole in zip([*parts, total], [*micros, sum(micros)], strict=True):
        assert abs(part - Decimal(whole) / 1_000_000) < unit


def test_bars_are_as_long_as_they_mean():
    assert [text_bar(it, 100, 4) for it in (0, 1, 50, 100)] == ["", "", "██", "████"]
    assert text_bar(10, 100, 10) == "█"
    assert text_bar(5, 0) == ""


def test_a_chart_is_xml_and_names_are_escaped():
    rows = [row("a<b>&", "use", 3_000_000), row("a<b>&", "idle", 1_000_000), row("", "idle", 5)]
    root = ET.fromstring(svg(rows, "USD by <hour>"))
    texts = [it.text for it in root.iter() if it.text and it.text.strip()]
    assert {"USD by <hour>", "a<b>&", "(idle)", "4.000000", "0.000005"} <= set(texts)
    bars = [it for it in root.iter() if it.tag.endswith("rect") and it.get("height") == "16"]
    assert [float(str(it.get("width"))) for it in bars] == [420.0, 140.0, 0.0]
    assert ET.fromstring(svg([], "nothing")) is not None


@pytest.mark.parametrize(
    "words",
    [
        ["--volume", "0"],
        ["--volume", "many"],
        ["--volume", "999999T"],
        ["--from", "yesterday"],
        ["--utilisation", "0"],
        ["--accelerator-hours", "p=3"],
        ["--accelerator-hours", "p", "--prices", "x.toml"],
        ["--accelerator-hours", "p=-1", "--prices", "x.toml"],
        ["--by", "key"],
    ],
)
def test_an_empty_embedding_input_is_refused_before_any_call(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_commands, "ask", None)
    assert CliRunner().invoke(app, ["cost", *words]).exit_code == 2


def test_hours_of_a_pool_that_has_no_price_are_refused(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "deploy" / "cost" / "prices.example.toml"
    words = ["cost", "--prices", str(example), "--gpu-hours", "other=5"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "pool other is not in the price list (llama-70b)" in result.output
    result = CliRunner().invoke(app, ["cost", "--prices", str(tmp_path / "none.toml")])
    assert result.exit_code == 1
    assert "none.toml: cannot be read: No such file" in result.output


def test_a_chart_of_too_many_rows_or_to_nowhere_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(str(number), "use", number) for number in range(401)]
    told = {"data": rows, "currency": "USD", "by": "hour", "from": "a", "to": "b"}

    def ask(*_: object) -> object:
        return told

    monkeypatch.setattr(cost_commands, "ask", ask)
    result = CliRunner().invoke(app, ["cost", "--svg", str(tmp_path / "x.svg")])
    assert (result.exit_code, "at most 400" in result.output) == (1, True)
    rows.clear()
    result = CliRunner().invoke(app, ["cost", "--svg", str(tmp_path / "no" / "x.svg")])
    assert (result.exit_code, "cannot be written" in result.output) == (1, True)
