"""A docstring's first sentence has a noun as its subject: see docs/style.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "gateway",
    "router",
    "replica",
    "control_plane",
    "telemetry",
    "cli",
    "sim",
    "sluice",
    "benchmarks",
)
NO_NOUN = re.compile(r"(What|Who|Whose|Whoever|Whatever|Nobody|Those)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# A published migration stays as it is; the rest is made by protoc.
LEFT_OUT = {"wire", "versions"}


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """Yield (place, docstring) of a package."""
    for file in sorted((ROOT / package).rglob("*.py")):
        if LEFT_OUT.isdisjoint(file.parts):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                    line = getattr(node, "lineno", 1)
                    yield f"{file.relative_to(ROOT)}:{line}", text


@pytest.mark.parametrize("package", PACKAGES)
def test_a_docstring_begins_with_its_noun_or_verb(package: str) -> None:
    found = [
        f"{place}: {text.splitlines()[0]}"
        for place, text in docstrings(package)
        if NO_NOUN.match(text)
    ]
    assert not found, "\n".join(found)
