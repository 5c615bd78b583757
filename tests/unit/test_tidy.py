"""The size ratchet: functions below 60 lines, files of at most 500 (docs/style.md)."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "benchmarks",
    "cli",
    "control_plane",
    "gateway",
    "model_repo",
    "replica",
    "router",
    "sim",
    "sluice",
    "telemetry",
    "tests",
    "training",
)
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 500

SOURCES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "wire" not in path.parts and "__pycache__" not in path.parts
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_and_files_stay_small(path: Path) -> None:
    source = path.read_text()
    lines = source.count("\n") + 1
    assert lines <= FILE_LINES_MAX, f"{lines} lines: split the module by what changes together"
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 >= FUNCTION_LINES_MAX
    }
    assert not long, f"functions of {FUNCTION_LINES_MAX} lines or more: {long}"


def test_nothing_committed_holds_an_absolute_home_or_registry_host() -> None:
    found = subprocess.run(
        [
            "git",
            "grep",
            "-nIE",
            r"(^|[^A-Za-z0-9_.$}])/(home|root|Users)/[a-z]|pypi\.org|npmjs\.org",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    hits = [line for line in found.stdout.splitlines() if "test_tidy.py" not in line]
    assert not hits, hits
