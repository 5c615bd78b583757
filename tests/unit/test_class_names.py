"""A class name says one thing: no public class of the product has the name of another one."""

import ast
from collections import defaultdict
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
# Each service has one of these, under the same name on purpose.
SAME_IN_EACH_SERVICE = {"Settings", "MigrateSettings"}


def _places() -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            if "wire" in file.parts:  # generated
                continue
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(str(file.relative_to(ROOT)))
    return places


def test_a_class_name_is_unique() -> None:
    doubled = {
        name: files
        for name, files in _places().items()
        if len(files) > 1 and name not in SAME_IN_EACH_SERVICE
    }
    assert not doubled, "rename one of each after the thing that it is, with its domain's noun"
