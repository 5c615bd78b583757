"""deploy/compose/check.py: what it reads of `docker compose`."""

import runpy
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[3] / "deploy" / "compose" / "check.py"


@pytest.mark.parametrize(
    "told",
    ['{"Service": "a"}\n{"Service": "b"}\n', '[{"Service": "a"},\n {"Service": "b"}]\n'],
    ids=["a line each", "a list"],
)
def test_both_forms_of_containers_are_read(told: str) -> None:
    read = runpy.run_path(str(CHECK))["rows"]

    assert [row["Service"] for row in read(told)] == ["a", "b"]
    assert read("") == read("[]") == []
