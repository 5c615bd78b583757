"""Tests that each reason why Triton cannot run is one line that names the remedy."""

from dataclasses import replace
from pathlib import Path

import pytest

from replica.agent.installation import Installation, inspect_installation, problems_of
from replica.agent.triton import model_repository, preflight


@pytest.fixture
def good(tmp_path: Path) -> Installation:
    triton = tmp_path / "tritonserver"
    for version in ("3.10", "3.11"):
        stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
        stub.parent.mkdir(parents=True)
        stub.touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch()
    return Installation(
        python="3.11",
        bin_dir=tmp_path / "bin",
        libpython="libpython3.11.so.1.0",
        libpython_dir=tmp_path,
        glibc=(2, 36),
        versions={"numpy": "1.26.4", "openvino": "2026.4.1", "nvidia-pytriton": "0.7.0"},
        triton=triton,
        shm_bytes_free=1 << 30,
    )


def test_nothing_is_wrong_with_a_good_installation(good: Installation) -> None:
    assert problems_of(good, ["openvino", "sim"]) == []
    assert problems_of(replace(good, libpython_dir=""), ["sim"]) == []
    assert good.stub is not None


def test_the_server_of_nvidias_images_has_one_stub_beside_its_backend(
    good: Installation, tmp_path: Path
) -> None:
    vendor = tmp_path / "opt"
    stub = vendor / "backends" / "python" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    found = replace(good, triton=vendor, python="3.12")
    assert found.stub is None
    stub.touch()
    assert found.stub == stub


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"triton": None}, "pip install nvidia-pytriton"),
        ({"python": "3.13"}, "no stub for Python 3.13; use one of: 3.10, 3.11"),
        ({"libpython": "libpython3.11.a"}, "without a shared libpython"),
        ({"libpython": ""}, "without a shared libpython"),
        ({"libpython_dir": None}, "apt install libpython3.11"),
        ({"glibc": (2, 31)}, "glibc 2.35 or newer (2.31)"),
        ({"glibc": None}, "not glibc"),
        ({"bin_dir": Path("/nonexistent")}, "no python3 in /nonexistent"),
        ({"versions": {"numpy": "2.5.5", "openvino": "2026.4.1"}}, "pip install 'numpy<2'"),
        ({"versions": {"openvino": "2026.4.1"}}, "numpy is not installed"),
        ({"versions": {"numpy": "1.26.4"}}, "pip install openvino"),
        ({"shm_bytes_free": None}, "mount a tmpfs"),
        ({"shm_bytes_free": 1 << 20}, "--shm-size"),
    ],
)
def test_each_problem_is_one_line_that_names_the_fix(
    good: Installation, changes: dict[str, object], words: str
) -> None:
    (problem,) = problems_of(replace(good, **changes), ["openvino", "sim"])  # type: ignore[arg-type]
    assert words in problem
    assert "\n" not in problem


def test_openvino_is_only_needed_where_it_is_wanted(good: Installation) -> None:
    assert problems_of(replace(good, versions={"numpy": "1.26.4"}), ["sim"]) == []


def test_this_environment_can_run_triton() -> None:
    assert preflight() == []
    assert inspect_installation().triton is not None


def test_the_triton_model_is_found() -> None:
    assert (model_repository() / "llm" / "config.pbtxt").is_file()
