"""Pages made from the code say what the code says."""

import re
from dataclasses import fields
from pathlib import Path

from cli.reference import (
    ERROR_COLUMNS,
    SETTINGS,
    descriptions,
    metrics_page,
    overload_page,
    security_page,
    settings_page,
)
from sluice.errors import ErrorPolicy

ROOT = Path(__file__).parents[3]
STALE = "stale: run `make docs`"


def test_settings_page_is_fresh():
    assert (ROOT / "docs" / "config.md").read_text() == settings_page(), STALE


def test_metrics_page_is_fresh():
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page(), STALE


def test_the_table_of_errors_is_fresh():
    text = (ROOT / "docs" / "overload.md").read_text()
    assert text == overload_page(text), STALE
    assert "| `queue_full` | 503 |" in text


def test_the_table_of_errors_has_every_rule():
    other = {"status", "own_kind", "from_engine", "release"}
    assert {field.name for field in fields(ErrorPolicy)} == ERROR_COLUMNS.keys() | other


def test_the_table_of_sockets_is_as_the_code():
    text = (ROOT / "docs" / "security.md").read_text()
    assert text == security_page(text), STALE
    assert "| gateway | public |" in text
    assert "| Kubernetes | replica | 9201 |" in text


def test_every_service_with_settings_is_on_the_page():
    found = {
        prefix
        for package in (
            "cli",
            "control_plane",
            "gateway",
            "replica",
            "router",
            "sluice",
            "telemetry",
        )
        for path in (ROOT / package).rglob("*.py")
        for prefix in re.findall(r'env_prefix="(\w+)"', path.read_text())
    }
    assert found == {owner.model_config.get("env_prefix") for owner in SETTINGS.values()}


def test_nothing_is_described_that_does_not_exist():
    for owner in SETTINGS.values():
        assert descriptions(owner).keys() == owner.model_fields.keys(), owner


def test_the_golden_lists_are_on_the_metrics_page():
    """Those lists come from running parts, the page from declarations."""
    page = {
        (name, kind)
        for name, kind in re.findall(r"^\| `(\w+)` \| (\w+) ", metrics_page(), re.MULTILINE)
    }
    golden = {
        tuple(line.split()[2:])
        for part in ("gateway", "router")
        for line in (ROOT / "tests" / "unit" / part / "metrics.golden").read_text().splitlines()
    }
    assert golden
    assert golden <= page
