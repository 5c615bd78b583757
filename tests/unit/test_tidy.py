"""The size ratchet: functions below 60 lines, files of at most 500 (docs/style.md)."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "benchmarks",
    "cli",
    "control_plane",
    "gateway",
    "hatch_build.py",
    "model_repo",
    "replica",
    "requirements",
    "router",
    "sim",
    "sluice",
    "telemetry",
    "tests",
    "training",
)
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 500


def sources(package: str) -> list[Path]:
    place = ROOT / package
    found = [place] if place.is_file() else place.rglob("*.py")
    return sorted(it for it in found if not {"wire", "__pycache__"} & set(it.parts))


def problems(path: Path) -> list[str]:
    """Say what is too long in a file; one that is short itself is not parsed."""
    source = path.read_text()
    lines = source.count("\n") + 1
    if lines < FUNCTION_LINES_MAX:
        return []
    found = [f"{path}: {lines} lines"] if lines > FILE_LINES_MAX else []
    return found + [
        f"{path}:{node.lineno}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 >= FUNCTION_LINES_MAX
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_and_files_stay_small(package: str) -> None:
    assert sources(package)
    found = [problem for path in sources(package) for problem in problems(path)]
    assert not found, f"at most {FILE_LINES_MAX} and {FUNCTION_LINES_MAX - 1} lines; split them"


def test_files_of_the_console_stay_small() -> None:
    files = [it for it in (ROOT / "console").rglob("*.js") if "vendor" not in it.parts]
    assert files
    found = [it.name for it in files if it.read_text().count("\n") >= FILE_LINES_MAX]
    assert not found, f"at most {FILE_LINES_MAX} lines; split them"


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


def test_the_migrations_of_postgresql_are_one_chain() -> None:
    files = sorted((ROOT / "migrations/postgres/versions").glob("[0-9]*.py"))
    found = [
        dict(
            re.findall(
                r'^(revision|down_revision) = (?:"(\d+)"|None)$', it.read_text(), re.MULTILINE
            )
        )
        for it in files
    ]
    revisions = [it["revision"] for it in found]
    assert revisions == [it.name[:4] for it in files]
    assert [it["down_revision"] for it in found] == ["", *revisions[:-1]]
