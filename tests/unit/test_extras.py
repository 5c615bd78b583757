"""Each image installs one extra: it must bring all that its service imports, and no other may."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = ("gateway", "router", "replica", "control_plane", "telemetry", "cli", "sim", "sluice")
# Found only in the interpreter that Triton embeds.
TRITON_ONLY = {"triton_python_backend_utils"}


def normal(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert name
    return re.sub(r"[-_.]+", "-", name[0]).lower()


# No extra can install it: its own dependencies must stay away.
OPTIONAL = {
    normal(line)
    for line in (ROOT / "requirements" / "embed.lock").read_text().splitlines()
    if "==" in line
}


def promised(extra: str) -> set[str]:
    """Return the distributions that `sluice[extra]` names."""
    found = {normal(requirement) for requirement in PROJECT["dependencies"]}
    for requirement in PROJECT["optional-dependencies"][extra]:
        nested = re.fullmatch(r"sluice\[(.+)\]", requirement)
        if nested:
            found |= {name for part in nested[1].split(",") for name in promised(part)}
        else:
            found.add(normal(requirement))
    return found


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the full names of what a file imports, at its top or where it is used."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= {name if file_of(name) else module for name in names}
    return frozenset(found)


def looked_up(path: Path) -> set[str]:
    """Return the distributions that a file finds by name, without importing them."""
    tree = ast.parse(path.read_text())
    constants = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == "distribution"
    ]
    return {
        ast.literal_eval(constants.get(ast.unparse(call.args[0]), call.args[0])) for call in calls
    }


def third_party(package: str) -> dict[str, str]:
    """Return import name -> the file that has it, of a package and of all it uses of ours."""
    files = list((ROOT / package).rglob("*.py"))
    seen: set[Path] = set()
    found: dict[str, str] = {}
    while files:
        path = files.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in imports_of(path):
            top = module.split(".")[0]
            if top in OURS:
                target = file_of(module)
                assert target, f"{path} imports {module}, which is not there"
                files.append(target)
            elif top not in sys.stdlib_module_names and top not in TRITON_ONLY:
                found.setdefault(module if top == "google" else top, str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize(
    ("package", "extra"),
    [
        ("gateway", "gateway"),
        ("router", "router"),
        ("replica", "replica"),
        ("control_plane", "control-plane"),
        ("telemetry", "telemetry"),
        ("cli", "local"),
        ("sim", "sim"),
    ],
)
def test_an_extra_brings_all_that_its_service_imports(package: str, extra: str) -> None:
    owners = packages_distributions()
    enough = promised(extra)
    missing = {
        name: file
        for name, file in third_party(package).items()
        if not enough & {normal(owner) for owner in owners[name.split(".")[0]]}
    }
    assert not missing, f"add to extra {extra}"


@pytest.mark.parametrize(("package", "extra"), [("replica", "replica"), ("cli", "local")])
def test_an_extra_brings_the_servers_that_are_looked_up(package: str, extra: str) -> None:
    names = {name for path in (ROOT / package).rglob("*.py") for name in looked_up(path)}
    assert names
    assert names <= promised(extra) | OPTIONAL


def test_a_module_of_sim_is_either_in_the_wheel_or_forbidden_there() -> None:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    excluded = tables["hatch"]["build"]["targets"]["wheel"]["exclude"]
    study = {path.strip("/").removesuffix(".py").replace("/", ".") for path in excluded}
    name = "what the wheel has of sim knows nothing of the study"
    contract = next(it for it in tables["importlinter"]["contracts"] if it["name"] == name)
    assert set(contract["forbidden_modules"]) == study
    modules = {
        f"sim.{path.stem}"
        for path in (ROOT / "sim").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert set(contract["source_modules"]) | study == modules - {"sim.__init__"}


def test_the_wheel_names_every_package() -> None:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tuple(tables["hatch"]["build"]["targets"]["wheel"]["packages"]) == OURS
