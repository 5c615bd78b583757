"""The wheel is complete: all modules import from it alone, and its data are found."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
OURS = {"gateway", "router", "replica", "control_plane", "telemetry", "cli", "sim", "sluice"}
# Runs outside the checkout. The editable installation's path is taken out, so that our packages can
# come from the wheel only; third-party packages still come from this environment.
PROBE = """
import importlib, importlib.metadata, json, sys
from pathlib import Path

target, checkout = Path(sys.argv[1]), Path(sys.argv[2])
sys.path[:] = [str(target), *(p for p in sys.path if p and Path(p).resolve() != checkout)]
names = sorted(
    ".".join(path.relative_to(target).with_suffix("").parts).removesuffix(".__init__")
    for path in target.rglob("*.py")
    if "_data" not in path.parts
)
strangers = {}
for name in names:
    module = importlib.import_module(name)
    if not Path(module.__file__).is_relative_to(target):
        strangers[name] = module.__file__

from cli.stack.preflight import find_base
from control_plane.alerts.evaluator import shipped_rules
from control_plane.migrate import scripts
from replica.agent.triton import model_repository
from telemetry.migrations import load, migrations_folder

print(json.dumps({
    "modules": names,
    "strangers": strangers,
    "base": str(find_base(None)),
    "postgres": str(scripts()),
    "rules": str(shipped_rules()[0].parent),
    "clickhouse": str(migrations_folder()),
    "clickhouse_files": len(load(migrations_folder())),
    "triton": str(model_repository()),
    "owners": importlib.metadata.packages_distributions(),
}))
"""


def run(command: list[str], cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds the installed wheel and nothing else; no network is used."""
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], ROOT)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    target = folder / "site"
    run(
        [*pip, "--no-index", "--no-deps", "--no-compile", "--target", str(target), str(wheel)], ROOT
    )
    return target


@pytest.fixture(scope="module")
def probe(installed: Path) -> dict:
    outside = installed.parent
    return json.loads(
        run([sys.executable, "-P", "-c", PROBE, str(installed), str(ROOT)], outside).splitlines()[
            -1
        ]
    )


def study() -> set[str]:
    """Return the modules of `sim` that are for developers with a checkout."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    excluded = [name.removeprefix("/") for name in wheel["targets"]["wheel"]["exclude"]]
    assert all((ROOT / name).exists() for name in excluded)
    roots = {name.removesuffix(".py").replace("/", ".") for name in excluded}
    return {
        name
        for name in python_files("sim")
        if any(name == root or name.startswith(root + ".") for root in roots)
    }


def python_files(package: str) -> Iterator[str]:
    listed = run(["git", "ls-files", f"{package}/*.py"], ROOT).split()
    for name in listed:
        yield name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_every_module_is_in_the_wheel_and_imports(probe: dict) -> None:
    assert probe["strangers"] == {}
    expected = {name for package in OURS for name in python_files(package)} - study()
    assert expected <= set(probe["modules"])


def test_the_study_of_peers_is_not_in_the_wheel(probe: dict) -> None:
    assert {"sim.routing", "sim.plots", "sim.policies.dynamo"} <= study()
    assert not study() & set(probe["modules"])


def test_data_are_found_in_the_wheel(installed: Path, probe: dict) -> None:
    for name, file in (
        ("base", "model.safetensors"),
        ("triton", "llm/config.pbtxt"),
        ("triton", "llm/1/model.py"),
        ("triton", "embed/config.pbtxt"),
        ("triton", "embed/1/model.py"),
        ("triton", "profiles/trtllm/llama-8b-bf16.json"),
        ("triton", "adapters/butler/adapter_config.json"),
        ("postgres", "versions/0001_initial.py"),
        ("rules", "alerts.yml"),
        ("clickhouse", "0001_requests.sql"),
        ("clickhouse", "0002_requested_model.sql"),
    ):
        folder = Path(probe[name])
        assert folder.is_relative_to(installed), name
        assert (folder / file).is_file(), name
    in_checkout = (ROOT / "migrations" / "clickhouse").glob("*.sql")
    assert probe["clickhouse_files"] == len(list(in_checkout))


def test_the_wheel_holds_our_packages_only(installed: Path) -> None:
    (ours,) = distributions(path=[str(installed)])
    assert ours.metadata["Name"] == "sluice"
    tops = {file.parts[0] for file in ours.files or () if file.suffix == ".py"}
    assert tops == OURS  # `training` is not shipped, nor tests, docs and benchmarks
    assert {entry.name for entry in ours.entry_points} == {"sluice"}


def test_no_other_distribution_owns_our_package_names(probe: dict) -> None:
    owners = {name: set(probe["owners"].get(name, ())) for name in OURS}
    assert owners == {name: {"sluice"} for name in OURS}
