"""The compiled build of the cores decides what plain Python decides, from the same inputs.

The cores are the router's, and the scheduler of engines with its bookkeeping. A world's engines and
clients answer what the router's core does, by its seed: one decision that differs, and all that
follows is different, so that equal traces are equal decisions. The inputs of an engine are given.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
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
# The tests of the cores, by folder, in which they are compiled.
FILES = {
    "unit": ("router", "replica_engine", "replica_host"),
    "simulation": (
        *("test_attach_cancel.py", "test_disaggregation.py", "test_faults.py"),
        *("test_overload.py", "test_router_shell.py", "test_sim_sluice.py"),
    ),
    "contract": (
        *("test_driver_features.py", "test_drivers.py", "test_explain.py", "test_flaws.py"),
        *("test_garbage.py", "test_not_finite.py", "test_router.py"),
    ),
}
# These read source, count its frames or reads of a list, or replace a method of the core, which is
# impossible in compiled code.
LEFT_OUT = (
    "tests/unit/router/test_walk.py",
    "tests/unit/router/test_admission_page.py",
    "tests/unit/replica_engine/test_speculation.py"
    "::test_a_long_prompt_is_read_in_parts_and_once_for_all_siblings",
    "tests/simulation/test_overload.py"
    "::test_more_clients_are_served_within_two_retries_if_retry_times_are_spread",
    "tests/simulation/test_router_shell.py"
    "::test_frames_within_a_millisecond_are_one_pass_unless_a_request_waits",
    "tests/simulation/test_sim_sluice.py::test_the_router_sees_the_fleet_with_the_given_delay",
)
# Both cores are imported after the tests, from where the tests had them.
TESTS = """
import sys, pytest
failed = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]])
from replica.engine import scheduler
from router.core import router
for module in (scheduler, router):
    assert module.__file__.endswith(".so"), module.__file__
sys.exit(failed)
"""
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
ENGINES = """
import json
from collections import Counter
from importlib.util import find_spec
from tests.support.engine_records import EngineRecord

seen, traces = Counter(), []
for seed in range(12):
    record = EngineRecord(seed)
    traces.append(record.run())
    seen += record.seen
core = find_spec("replica.engine.scheduler").origin
print(json.dumps({"traces": traces, "core": core, "seen": seen}))
"""
# What the inputs of engines have to lead to, so that equal decisions prove something.
SEEN = {
    *("preemptions", "evictions", "cached tokens", "pinned blocks", "blocks sent", "copies"),
    *("accepted drafts", "forks", "adapters loaded", "logprobs of prompts", "scores"),
    *("STOP", "LENGTH", "CANCELLED", "FAILED"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack a wheel with the compiled cores, which nobody has optimised: that takes a minute."""
    home = tmp_path_factory.mktemp("compiled")
    run(
        ["-m", "hatchling", "build", "-t", "wheel", "-d", str(home)],
        {"HATCH_BUILD_HOOKS_ENABLE": "1", "MYPYC_OPT_LEVEL": "0", "PYTHONPATH": str(ROOT)},
    )
    (wheel,) = home.glob("*.whl")
    assert "-none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "site")
    shutil.rmtree(home / "site" / "sim")  # a wheel has only a part of it, the checkout all
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


def test_every_module_that_mypy_checks_is_compiled_and_the_checkout_has_none(site: Path):
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert listed["packages"] == ["router.core"]
    plain = {path.relative_to(site) for path in site.glob("router/core/**/*.py")}
    plain |= {Path(*name.split(".")).with_suffix(".py") for name in listed["modules"]}
    compiled = {path.relative_to(site) for path in site.glob("*/**/*.so")}
    assert {path.with_name(path.name.split(".")[0] + ".py") for path in compiled} == {
        path for path in plain if path.name != "__init__.py"
    }
    for folder in ("router", "replica"):
        assert not list(ROOT.glob(f"{folder}/**/*.so"))


@pytest.mark.parametrize("script", [WORLDS, ENGINES], ids=["router", "engine"])
def test_both_builds_decide_the_same(site: Path, script: str):
    compiled = json.loads(run(["-c", script], on(site, ROOT)))
    plain = json.loads(run(["-c", script], on(ROOT)))
    assert (compiled["core"][-3:], plain["core"][-3:]) == (".so", ".py")
    assert compiled["traces"] == plain["traces"]
    assert len(set(plain["traces"])) == len(plain["traces"])
    assert script is WORLDS or plain["seen"].keys() >= SEEN


@pytest.mark.parametrize("folder", FILES)
def test_the_tests_of_the_cores_pass_on_the_compiled_build(site: Path, folder: str):
    files = [f"tests/{folder}/{name}" for name in FILES[folder]]
    left_out = [f"--deselect={name}" for name in LEFT_OUT if name.startswith(f"tests/{folder}/")]
    said = run(["-c", TESTS, "--ring=one", *files, *left_out], on(site, ROOT))
    assert " passed" in said


def test_a_command_tells_which_build_runs(site: Path):
    asked = ["-m", "cli", "version"]
    compiled, plain = run(asked, on(site, ROOT)), run(asked, on(ROOT))
    for name in ("router core", "engine scheduler"):
        assert f"{name}: compiled" in compiled
        assert f"{name}: plain Python" in plain
