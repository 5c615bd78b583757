"""Every benchmark can be found, imports, and begins with what one operation is."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.page import PAGE, benchmarks_page
from benchmarks.run import MODULES, about

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("module", MODULES.values())
def test_the_page_says_one_operation_and_its_exclusions(module: str) -> None:
    text = " ".join(about(module).split())
    assert re.search(r"\b([Oo]ne|[Tt]wo|[Tt]hree) operations?\b", text)
    assert re.search(r"\b[Nn]ot (measured|counted)\b", text)
    assert f"python -m {module}" in text
    assert callable(import_module(module).main)


def test_all_that_can_be_run_is_in_the_table() -> None:
    runnable = {
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert runnable - {"benchmarks.run", "benchmarks.page"} == set(MODULES.values())


def test_the_figures_of_the_page_equal_the_result_files() -> None:
    page = PAGE.read_text()
    assert page == benchmarks_page(page), "run `make docs`"
