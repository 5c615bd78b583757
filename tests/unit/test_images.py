"""Recipes of images, read as a builder reads them: no image is built here."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "deploy" / "images").glob("*.Dockerfile"))
ENGINE = ROOT / "deploy" / "images" / "engine.Dockerfile"


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
def test_what_is_copied_is_there(path: Path) -> None:
    for name, arguments in instructions(path):
        if name in ("COPY", "ADD") and "--from=" not in arguments:
            for source in sources(arguments):
                assert (ROOT / source).exists(), f"{path.name}: {source}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_bases_are_given_by_the_builder_and_no_registry_is_named(path: Path) -> None:
    given = {arguments for name, arguments in instructions(path) if name == "ARG"}
    for name, arguments in instructions(path):
        if name == "FROM":
            image = arguments.split()[0]
            assert image.strip("${}") in given, f"{path.name}: FROM {image} is no ARG of its own"
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


def test_the_engine_image_has_every_package_of_the_wheel() -> None:
    copied = {
        source.rstrip("/")
        for name, arguments in instructions(ENGINE)
        if name == "COPY"
        for source in sources(arguments)
    }
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = build["targets"]["wheel"]
    assert set(wheel["packages"]) <= copied
    assert {name.split("/")[0] for name in wheel["force-include"]} <= copied
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


def test_the_engine_image_sets_what_the_shim_cannot_do_without() -> None:
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
    assert "--load-model=llm" in command
    assert (ROOT / "model_repo" / "llm" / "config.pbtxt").is_file()
