"""A new engine needs an entry of `sluice/engines.py` and its driver, and no other file names it."""

import ast
import json
import re
import runpy
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from replica.agent.installation import Installation, problems_of
from replica.agent.model_kinds import KINDS
from replica.agent.triton import DEFAULT_ENGINES
from replica.drivers.registry import DRIVERS
from sluice.engines import ENGINES, profile_of
from sluice.profiles import EMBED, FRAMES

ROOT = Path(__file__).parents[3]
SHIPPED = ("cli", "control_plane", "gateway", "replica", "router", "sluice", "telemetry", "deploy")
# Names that are no other words, so that a string of them is the name of an engine.
PLAIN = ENGINES.keys() - {"sim", "embed"}


def test_each_engine_is_found_by_its_name():
    assert all(name == engine.name for name, engine in ENGINES.items())
    assert set(DRIVERS) == {"openvino", "sim", "trtllm"}
    assert all(find_spec(f"replica.drivers.{name}") for name in DRIVERS)
    assert KINDS.keys() == ENGINES.keys()
    assert DEFAULT_ENGINES == ("openvino", "sim", "embed")
    assert (profile_of("embed"), profile_of("openvino"), profile_of("?")) == (EMBED, FRAMES, FRAMES)


def test_no_other_code_names_an_engine():
    allowed = {ROOT / "sluice" / "engines.py", *(ROOT / "replica" / "drivers").glob("*.py")}
    files = [path for package in SHIPPED for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 500
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if path not in allowed and any(name in path.read_text() for name in PLAIN)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in PLAIN
    ]
    assert not found, "read sluice.engines there"


def test_the_chart_knows_the_engines_that_have_nodes():
    script = runpy.run_path(str(ROOT / "deploy" / "helm" / "generate.py"))
    text = script["SCHEMA"].read_text()
    assert text == script["schema"](text), "run deploy/helm/generate.py"
    engines = json.loads(text)["properties"]["pools"]["additionalProperties"]["properties"]
    assert engines["engine"]["enum"] == ["openvino", "embed", "trtllm"]
    other = text.replace('"trtllm"', '"vllm"')
    assert other != text == script["schema"](other)


def test_the_packages_of_an_engine_are_in_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {
        re.split(r"[^a-z0-9-]", line)[0]
        for lines in extras["optional-dependencies"].values()
        for line in lines
    }
    assert {package for engine in ENGINES.values() for package in engine.packages} <= listed


@pytest.mark.parametrize("engine", ["openvino", "embed"])
def test_a_missing_package_is_told_with_the_first_engine_that_needs_it(engine, tmp_path: Path):
    found = Installation(
        python="3.11",
        bin_dir=tmp_path,
        libpython="libpython3.11.so",
        libpython_dir="",
        glibc=(2, 36),
        versions={"numpy": "1.26.4"},
        triton=None,
        shm_bytes_free=1 << 30,
    )
    told = problems_of(found, ["sim", engine, "openvino"])
    assert f"the engine {engine} needs openvino: pip install openvino" in told
    assert sum("needs openvino" in line for line in told) == 1
