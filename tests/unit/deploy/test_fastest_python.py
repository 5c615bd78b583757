"""`make setup` makes the environment with the fastest interpreter that can make it."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "requirements" / "fastest_python.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fastest_python", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _program(folder: Path, name: str, answer: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{answer}\n")
    file.chmod(0o755)
    return file


def test_the_default_stays_unless_another_is_clearly_faster(script: ModuleType) -> None:
    measured = [script.Interpreter("default", 1.0), script.Interpreter("near", 0.95)]
    assert script.fastest(measured) == "default"
    assert script.fastest([*measured, script.Interpreter("fast", 0.6)]) == "fast"
    assert script.fastest(measured[:1]) == "default"


def test_an_interpreter_of_another_version_or_without_its_parts_is_left_out(
    script: ModuleType, tmp_path: Path
) -> None:
    answers = {
        "good": "echo '[\"/good\", [3, 11], 0.1]'",
        "old": "echo '[\"/old\", [3, 10], 0.1]'",
        "new": "echo '[\"/new\", [3, 13], 0.1]'",
        "bare": "exit 1",
        "odd": "echo Python",
    }
    programs = {name: _program(tmp_path, name, text) for name, text in answers.items()}
    found = {name: script.probe(str(program)) for name, program in programs.items()}
    assert found.pop("good") == script.Interpreter("/good", 0.1)
    assert set(found.values()) == {None}
    assert script.probe(str(tmp_path / "missing")) is None


def test_one_slow_run_of_an_interpreter_decides_nothing(script: ModuleType, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    steps.write_text("0.9\n0.3\n0.8\n0.8\n")
    # Each run prints the file's first line and drops it.
    uneven = f'echo "[\\"/uneven\\", [3, 11], $(head -n1 {steps})]"; sed -i 1d {steps}'
    even = _program(tmp_path, "even", "echo '[\"/even\", [3, 11], 0.5]'")
    bare = _program(tmp_path, "bare", "exit 1")
    found = script.measured([str(even), str(bare), str(_program(tmp_path, "uneven", uneven))])
    assert found == [script.Interpreter("/even", 0.5), script.Interpreter("/uneven", 0.3)]


def test_the_interpreter_of_these_tests_can_make_the_environment(script: ModuleType) -> None:
    here = script.probe(str(Path(sys.executable).resolve()))
    assert here is not None
    assert here.seconds > 0


def test_the_first_python3_on_the_path_is_the_default(script: ModuleType, tmp_path: Path) -> None:
    first = _program(tmp_path / "first", "python3", "true")
    second = _program(tmp_path / "second", "python3", "true")
    third = _program(tmp_path / "second", "python3.11", "true")
    (tmp_path / "first" / "python3.11").symlink_to(first)
    path = os.pathsep.join([str(tmp_path / "first"), "", str(tmp_path / "second")])
    assert script.programs(path) == [str(first), str(second), str(third)]
