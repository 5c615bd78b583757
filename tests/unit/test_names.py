"""Names state their promise or thing in plain words: see docs/style.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRONOUN = re.compile(
    r"_(what|whatever|who|whoever|whom|whose|nobody|nobodys|somebody|somebodys|those|such|likewise)"
    r"(_|$)"
)


def functions(folder: str) -> Iterator[tuple[str, str]]:
    """Yield (place, name) of all functions of a folder."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file.relative_to(ROOT)}:{node.lineno}", node.name


def test_a_test_names_its_subject() -> None:
    found = [
        f"{place}: {name}"
        for place, name in functions("tests")
        if name.startswith("test_") and PRONOUN.search(name)
    ]
    assert not found, "name the thing that the test is about:\n" + "\n".join(found)
