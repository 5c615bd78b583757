"""Recipes of images, read as a builder reads them: `make compose-check` builds them."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from replica.agent.triton import _PROTOCOLS

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "deploy" / "images").glob("*.Dockerfile"))
REQUIREMENTS = ROOT / "requirements"
ENGINE = ROOT / "deploy" / "images" / "engine.Dockerfile"
SLUICE = ROOT / "deploy" / "images" / "sluice.Dockerfile"
OURS = [path for path in RECIPES if path != ENGINE]
# The others stand on an image of their vendor, whose packages stay as they are.
LOCKED = [path for path in OURS if path.name != "replica-gpu.Dockerfile"]
SERVICES = ("gateway", "router", "control-plane", "telemetry")  # run on any supported Python


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of a recipe, continuation lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(words[0].upper(), words[1]) for words in found]


def sources(arguments: str) -> list[str]:
    return [word for word in arguments.split()[:-1] if not word.startswith("--")]


def test_there_is_a_recipe() -> None:
    assert ENGINE in RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_copied_file_exists(path: Path) -> None:
    for name, arguments in instructions(path):
        if name in ("COPY", "ADD") and "--from=" not in arguments:
            for source in sources(arguments):
                assert (ROOT / source).exists(), f"{path.name}: {source}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_bases_are_given_by_the_builder_and_no_registry_is_named(path: Path) -> None:
    given = {
        word.split("=")[0]
        for name, arguments in instructions(path)
        if name == "ARG"
        for word in arguments.split()
    }
    for name, arguments in instructions(path):
        if name == "FROM":
            image = arguments.split()[0]
            is_known = image == "scratch" or image.strip("${}") in given
            assert is_known, f"{path.name}: FROM {image} is no ARG of its own"
    assert not re.search(r"\b[a-z0-9-]+(\.[a-z0-9-]+)+/[a-z]", path.read_text())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_instructions_are_known_and_stages_exist(path: Path) -> None:
    known = {"ARG", "FROM", "WORKDIR", "COPY", "ADD", "RUN", "ENV", "USER", "EXPOSE", "LABEL"}
    known |= {"ENTRYPOINT", "CMD", "STOPSIGNAL", "HEALTHCHECK", "SHELL", "VOLUME"}
    stages: set[str] = set()
    for name, arguments in instructions(path):
        assert name in known, name
        if name == "FROM" and " AS " in arguments:
            stages.add(arguments.split(" AS ")[1])
        if "--from=" in arguments:
            assert re.search(r"--from=(\w+)", arguments)[1] in stages
        if name == "ENTRYPOINT":
            assert isinstance(json.loads(arguments), list)


def stages(path: Path) -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage, without those before the first FROM."""
    found: list[list[tuple[str, str]]] = []
    for name, arguments in instructions(path):
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, arguments))
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_images_run_as_a_user_and_stop_on_request(path: Path) -> None:
    final = dict(stages(path)[-1])
    assert final["USER"].split(":")[0] not in ("root", "0")
    assert final["STOPSIGNAL"] == "SIGTERM"
    assert "ENTRYPOINT" in final


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_our_images_are_labelled_and_say_whether_they_are_ready(path: Path) -> None:
    final = stages(path)[-1]
    labels = " ".join(arguments for name, arguments in final if name == "LABEL")
    assert "org.opencontainers.image.title" in labels
    assert "org.opencontainers.image.revision" in labels
    (health,) = [arguments for name, arguments in final if name == "HEALTHCHECK"]
    assert json.loads(health.partition("CMD ")[2])[1:] == ["-m", "sluice.probe"]


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.name)
def test_packages_are_installed_from_a_lock_file_with_hashes(path: Path) -> None:
    runs = " ".join(arguments for name, arguments in instructions(path) if name == "RUN")
    installs = [part for part in runs.split("&&") if " install " in part and "pip" in part]
    for install in installs:
        is_our_wheel = "--no-deps" in install and "/wheels/" in install
        assert is_our_wheel or "--require-hashes" in install, install
    assert len(re.findall(r"-r \S+\.lock", runs)) == 2
    for lock in (REQUIREMENTS / "build.lock", *own_locks(path)):
        text = lock.read_text()
        assert len(re.findall(r"^[a-z0-9-]+==", text, re.MULTILINE)) <= text.count("--hash=sha256:")


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.name)
def test_lock_files_of_images_agree_with_the_one_that_tests_run_with(path: Path) -> None:
    tested = pins(REQUIREMENTS / "dev.lock")
    assert own_locks(path)
    for lock in own_locks(path):
        own = pins(lock)
        assert own
        assert own.items() <= tested.items()


@pytest.mark.parametrize("minor", range(11, 15))
def test_the_lock_file_of_tests_has_the_packages_of_services_for_each_python(minor: int) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = f"3.{minor}"
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    assert SpecifierSet(project["requires-python"]).contains(f"{python}.0")
    found = pins(REQUIREMENTS / "dev.lock", python)
    extras = [project["optional-dependencies"][it] for it in SERVICES]
    for asked in map(Requirement, chain(project["dependencies"], *extras)):
        assert asked.specifier.contains(found[canonicalize_name(asked.name)]), asked
    # Triton's stub needs numpy 1, which has no wheels for newer versions of Python.
    assert found["numpy"].startswith("1." if minor < 13 else "2.")
    assert ("nvidia-pytriton" in found) == (minor < 13)


def test_images_and_the_released_wheel_have_compiled_cores() -> None:
    for path in LOCKED:
        assert ("ENV", "HATCH_BUILD_HOOKS_ENABLE=1") in chain(*stages(path)), path
    _, _, recipe = (ROOT / "Makefile").read_text().partition("\nsbom: ")
    (wheel,) = [line for line in recipe.partition("\n\n")[0].splitlines() if "pip wheel" in line]
    assert "HATCH_BUILD_HOOKS_ENABLE=1" in wheel


def own_locks(path: Path) -> list[Path]:
    """Return the lock files of the images that are made by a recipe."""
    copied = [
        source
        for name, arguments in instructions(path)
        if name == "COPY"
        for source in sources(arguments)
        if source.endswith(".lock") and not source.endswith("build.lock")
    ]
    return [ROOT / source for source in copied]


def pins(lock: Path, python: str = "3.11") -> dict[str, str]:
    """Return the versions that a lock file pins for a version of Python, here that of images."""
    version = {"python_version": python, "python_full_version": f"{python}.0"}
    lines = [line for line in lock.read_text().splitlines() if line[:1].isalnum()]
    asked = [Requirement(line.removesuffix("\\")) for line in lines]
    held = [it for it in asked if it.marker is None or it.marker.evaluate(version)]
    found = {it.name: str(it.specifier).removeprefix("==") for it in held}
    assert len(found) == len(held)
    return found


def left_out() -> list[str]:
    """Return the modules that the recipe of our services takes out of what it installed."""
    runs = " ".join(a for name, a in instructions(SLUICE) if name == "RUN")
    removed = set(re.findall(r"uninstall --yes ([\w -]+?) &&", runs)[0].split())
    modules = [
        module
        for module, owners in packages_distributions().items()
        if removed & {owner.lower().replace("_", "-") for owner in owners}
    ]
    assert len(modules) >= len(removed)
    directories = re.findall(r"rm -rf ((?:\w+/\w+ ?)+)", runs)[0].strip()
    return modules + directories.replace("/", ".").split()


def run_without(blocked: list[str], source: str, **environment: str) -> None:
    """Run a program that cannot import these modules; it has to end with status 0."""
    source = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n{source}"
    command = [sys.executable, "-c", source]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_services_start_without_the_packages_that_the_image_leaves_out() -> None:
    run_without(
        left_out(),
        "import gateway.app, router.app, control_plane.app, control_plane.migrate\n"
        "import telemetry.app, telemetry.migrate, tokenizers\n"
        "from cli.commands import COMMANDS, load\n[load(name) for name in COMMANDS]\n",
    )


def test_gateway_and_router_start_with_the_packages_of_their_image() -> None:
    absent = pins(REQUIREMENTS / "sluice.lock").keys() - pins(REQUIREMENTS / "sluice-edge.lock")
    assert {"sqlalchemy", "obstore", "clickhouse-connect"} <= absent
    blocked = [
        module
        for module, owners in packages_distributions().items()
        if {owner.lower().replace("_", "-") for owner in owners} <= absent
    ]
    assert "sqlalchemy" in blocked
    # The command line imports what a command needs when it runs: so it has to run.
    run_without(
        blocked + left_out(),
        "import gateway.app, gateway.__main__, router.app, router.__main__, sluice.probe\n"
        "from cli.app import app\n"
        "app(['config', 'check', 'gateway', 'router'])\n",
        GATEWAY__INSTANCE_ID="g",
        GATEWAY__HTTP_ADDRESS="0.0.0.0:8000",
        GATEWAY__CONTROL_ADDRESS="c:1",
        GATEWAY__STATE_DIR="/s",
        GATEWAY__VALKEY_URL="redis://v:1",
        GATEWAY__KAFKA_BOOTSTRAP="k:1",
        ROUTER__INSTANCE_ID="r",
        ROUTER__GRPC_ADDRESS="r:7001",
        ROUTER__HTTP_ADDRESS="0.0.0.0:7080",
        ROUTER__CONTROL_ADDRESS="c:1",
        ROUTER__STATE_DIR="/s",
    )


def test_an_image_from_scratch_asks_for_no_shell() -> None:
    final = stages(SLUICE)[-1]
    assert final[0] == ("FROM", "scratch")
    for name, arguments in final:
        if name in ("RUN", "ENTRYPOINT", "CMD", "HEALTHCHECK"):
            command = arguments.partition("CMD ")[2] if name == "HEALTHCHECK" else arguments
            assert isinstance(json.loads(command), list), arguments


def test_an_image_from_scratch_is_checked_for_pythons_libraries() -> None:
    (run,) = [json.loads(arguments) for name, arguments in stages(SLUICE)[-1] if name == "RUN"]
    assert run[:2] == ["python", "-c"]
    imported = {
        alias.name
        for node in ast.walk(ast.parse(run[2]))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    # All that stand on a library of the base; without one of them pip and wheels may still load.
    assert {"bz2", "ctypes", "hashlib", "lzma", "sqlite3", "ssl", "zlib"} <= imported


def test_nothing_but_the_wheel_reaches_a_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {rule[1:].split("/")[0] for rule in rules if rule.startswith("!")}
    copied = {
        source.split("/")[0]
        for path in RECIPES
        for name, arguments in instructions(path)
        if name == "COPY" and "--from=" not in arguments
        for source in sources(arguments)
    }
    assert copied == allowed


@pytest.mark.parametrize("path", [ENGINE, *LOCKED], ids=lambda path: path.name)
def test_the_images_have_every_package_of_the_wheel(path: Path) -> None:
    copied = {
        source.rstrip("/")
        for name, arguments in instructions(path)
        if name == "COPY"
        for source in sources(arguments)
    }
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = build["targets"]["wheel"]
    assert set(wheel["packages"]) <= copied
    for name in wheel["force-include"]:
        assert any(f"{name}/".startswith(f"{folder}/") for folder in copied), name
    assert {"pyproject.toml", "README.md", "LICENSE"} <= copied


def test_the_engine_image_installs_an_extra_that_keeps_numpy() -> None:
    (install,) = [a for name, a in instructions(ENGINE) if name == "RUN" and "pip install" in a]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = re.findall(r"\[([a-z-]+)\]", install.split("pip install")[1].split("&&")[0])
    assert "numpy>=1.26,<2" in extras["optional-dependencies"][extra]
    # These come with the vendor's image; other versions of them would break TensorRT-LLM.
    assert not [
        requirement
        for requirement in extras["optional-dependencies"][extra]
        if re.match(r"(openvino|nvidia-pytriton|llguidance|tokenizers|torch)", requirement)
    ]
    assert "--constraint" in install
    assert "numpy.__version__" in install


def test_the_engine_image_sets_the_variables_of_the_shim() -> None:
    tree = ast.parse((ROOT / "model_repo" / "llm" / "1" / "model.py").read_text())
    needed = {
        node.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and ast.unparse(node.value) == "os.environ"
        and isinstance(node.slice, ast.Constant)
    }
    given = {
        word.split("=")[0]
        for name, arguments in instructions(ENGINE)
        if name == "ENV"
        for word in arguments.split()
    }
    # Which base is served is known when a container starts, not when its image is built.
    assert needed - given == {"SLUICE_BASE_DIGEST"}
    (command,) = [json.loads(a) for name, a in instructions(ENGINE) if name == "ENTRYPOINT"]
    assert "--load-model=llm" in command[-1]
    assert ",".join(_PROTOCOLS) in command[-1], "nothing is answered without a secret"
    assert (ROOT / "model_repo" / "llm" / "config.pbtxt").is_file()


@pytest.mark.parametrize("name", ["sluice.Dockerfile", "replica-cpu.Dockerfile"])
def test_a_recipe_that_compiles_has_the_hook_and_a_compiler(name: str) -> None:
    found = instructions(ROOT / "deploy" / "images" / name)
    assert ("ENV", "HATCH_BUILD_HOOKS_ENABLE=1") in found
    assert any(kind == "COPY" and "hatch_build.py" in sources(rest) for kind, rest in found)
    installs = [rest for kind, rest in found if kind == "RUN" and "apt-get install" in rest]
    assert any({"gcc", "libc6-dev"} <= set(rest.split()) for rest in installs)
