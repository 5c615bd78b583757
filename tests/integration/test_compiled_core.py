"""The compiled build of the router's core decides what plain Python decides, from the same inputs.

A world's engines and clients answer what the core does, by its seed: one decision that differs, and
all that follows is different, so that equal traces are equal decisions.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

HEADER = Path(sysconfig.get_path("include"), "Python.h")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        shutil.which("cc") is None or not HEADER.is_file(),
        reason="no C compiler or no Python.h: install gcc and python3-dev",
    ),
]

ROOT = Path(__file__).parents[2]
COMPILE_S = 600.0  # a minute and a half of a free core
# One counts frames of Python, one reads the source: compiled code has neither.
LEFT_OUT = ("test_walk.py", "test_admission_page.py")
WORLDS = """
import hashlib, json
from importlib.util import find_spec
from sim.router_world import Fault, RouterWorld, Workload

traces = []
for seed in range(8):
    world = RouterWorld(seed, replicas=4)
    kinds = ("die", "freeze", "cut", "busy", "fail", "slow", "lie")
    world.load(Workload(requests=200, rate_per_s=80, cancel_share=0.15, batch_share=0.3))
    for _ in range(8):
        at_s, for_s = world.random.uniform(0.2, 4.0), world.random.uniform(0.1, 3.0)
        kind, replica = world.random.choice(kinds), world.random.randrange(4)
        world.plan(Fault(at_s=at_s, kind=kind, replica=replica, for_s=for_s))
    world.run()
    world.verify()
    traces.append(hashlib.sha256(repr(world.trace).encode()).hexdigest())
print(json.dumps({"traces": traces, "core": find_spec("router.core.router").origin}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack a wheel with the compiled core, which nobody has optimised: that takes a minute."""
    home = tmp_path_factory.mktemp("compiled")
    run(
        ["-m", "hatchling", "build", "-t", "wheel", "-d", str(home)],
        {"HATCH_BUILD_HOOKS_ENABLE": "1", "MYPYC_OPT_LEVEL": "0", "PYTHONPATH": str(ROOT)},
    )
    (wheel,) = home.glob("*.whl")
    assert "-none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "site")
    return home / "site"


def run(arguments: list[str], environment: dict[str, str]) -> str:
    inherited = {name: it for name, it in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=inherited | {"PYTHONSAFEPATH": "1", **environment},
        capture_output=True,
        text=True,
        timeout=COMPILE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": ":".join(map(str, folders))}


def test_every_module_of_the_core_is_compiled_and_the_checkout_has_none(site: Path):
    plain = {path.relative_to(site) for path in site.glob("router/core/**/*.py")}
    compiled = {path.relative_to(site) for path in site.glob("router/core/**/*.so")}
    assert {path.with_name(path.name.split(".")[0] + ".py") for path in compiled} == {
        path for path in plain if path.name != "__init__.py"
    }
    assert not list(ROOT.glob("router/**/*.so"))


def test_both_builds_decide_the_same(site: Path):
    compiled = json.loads(run(["-c", WORLDS], on(site, ROOT)))
    plain = json.loads(run(["-c", WORLDS], on(ROOT)))
    assert (compiled["core"][-3:], plain["core"][-3:]) == (".so", ".py")
    assert compiled["traces"] == plain["traces"]
    assert len(set(plain["traces"])) == len(plain["traces"])


def test_the_tests_of_the_core_pass_on_the_compiled_build(site: Path):
    left_out = [f"--ignore=tests/unit/router/{name}" for name in LEFT_OUT]
    arguments = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--ring=one", *left_out]
    said = run([*arguments, "tests/unit/router"], on(site, ROOT))
    assert " passed" in said


def test_a_command_tells_which_build_runs(site: Path):
    asked = ["-m", "cli", "version"]
    assert "router core: compiled" in run(asked, on(site, ROOT))
    assert "router core: plain Python" in run(asked, on(ROOT))
