"""Names state their promise or thing in plain words: see docs/style.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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
PRONOUN = re.compile(
    r"(^|_)(what|whatever|who|whoever|whom|whose|nobody|nobodys|somebody|somebodys|those|such"
    r"|likewise)(_|$)"
)


def names(folder: str) -> Iterator[tuple[str, str]]:
    """Yield (place, name) of all functions and annotated attributes of a folder."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        if "wire" in file.parts:  # generated
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.name
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.target.id


def test_a_test_names_its_subject() -> None:
    found = [
        f"{place}: {name}"
        for place, name in names("tests")
        if name.startswith("test_") and PRONOUN.search(name)
    ]
    assert not found, "name the thing that the test is about:\n" + "\n".join(found)


def test_a_public_name_is_a_noun_or_a_verb() -> None:
    found = [
        f"{place}: {name}"
        for package in PACKAGES
        for place, name in names(package)
        if not name.startswith("_") and PRONOUN.search(name)
    ]
    assert not found, "name the thing or the action:\n" + "\n".join(found)
