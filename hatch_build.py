"""Compiles cores for a wheel, when the build asks for it: `HATCH_BUILD_HOOKS_ENABLE=1`.

The cores are the packages and modules that pyproject.toml lists for mypy: the router's core, and
the scheduler of engines with its bookkeeping. Each becomes one library, and both are compiled at
once. Plain Python stays the reference, and is in the wheel as well. The compiled modules stand
beside it, and imports find them first. Nothing is made in the checkout, where it would win over
edited source.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_MADE = "made"
_SOURCES = ("replica", "router", "sluice", "pyproject.toml")
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "_data")
# -O1 takes a third of the compiler's time, and the router's core still needs only 0.41-0.53 of the
# time of plain Python. mypyc's own variable chooses another level, because a test of decisions
# needs no speed.
_LEVEL, _USUAL_LEVEL = "MYPYC_OPT_LEVEL", "1"
_SETUP = """
import sys
from itertools import groupby
from mypyc.build import mypycify
from setuptools import setup

files = sys.argv[2:]
sys.argv[2:] = ["--build-lib", "%s", "--parallel", "2"]
groups = [(list(of), name) for name, of in groupby(files, lambda file: file.split("/")[0])]
options = {"separate": groups, "opt_level": "%s", "debug_level": "0"}
modules = mypycify(["--config-file", "pyproject.toml", *files], **options)
setup(name="compiled", packages=[], py_modules=[], ext_modules=modules)
"""


class CustomBuildHook(BuildHookInterface[Any]):
    """A build hook, which hatchling runs before it makes a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules, and add them to the wheel."""
        if self.target_name != "wheel" or version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="sluice-compiled-"))
        made = compiled(Path(self.root), self._folder)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for file in made:
            build_data["force_include"][str(file)] = str(file.relative_to(self._folder / _MADE))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the folder of the compiled modules, which are in the wheel by now."""
        del version, build_data, artifact_path
        shutil.rmtree(self._folder)


def compiled(root: Path, folder: Path) -> list[Path]:
    """Return the extension modules of a checkout, made in an empty folder within two minutes.

    Raises:
        RuntimeError: mypy or the C compiler has refused a module. The message has its output.
    """
    for name in _SOURCES:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=_NOT_COPIED)
        else:
            shutil.copy(source, folder / name)
    (folder / "setup_compiled.py").write_text(
        _SETUP % (_MADE, os.environ.get(_LEVEL, _USUAL_LEVEL))
    )
    files = [str(path.relative_to(folder)) for path in compiled_files(folder)]
    command = [sys.executable, "setup_compiled.py", "build_ext", *files]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a core cannot be compiled:\n{done.stdout}{done.stderr}")
    return sorted((folder / _MADE).rglob("*.so"))


def compiled_files(root: Path) -> list[Path]:
    """Return the files that mypy checks and that are compiled, by pyproject.toml."""
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mypy"]
    found = [root.joinpath(*name.split(".")).with_suffix(".py") for name in listed["modules"]]
    for package in listed["packages"]:
        found += root.joinpath(*package.split(".")).rglob("*.py")
    return sorted(path for path in found if path.name != "__init__.py")
