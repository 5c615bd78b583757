"""Bills of materials say what the images and the wheel are made of."""

import importlib.util
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SBOM = ROOT / "deploy" / "sbom.py"


def _module() -> Any:
    spec = importlib.util.spec_from_file_location("deploy_sbom", SBOM)
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # its dataclasses look there
    spec.loader.exec_module(found)
    return found


SCRIPT = _module()


@pytest.fixture(scope="module")
def bills() -> dict[str, Any]:
    """All bills, which the script checks against CycloneDX' schema."""
    return {name: json.loads(text) for name, text in SCRIPT.bills(SBOM).items()}


def of(bills: dict[str, Any], name: str) -> dict[str, Any]:
    kinds = ((it["metadata"]["component"], it) for it in bills.values())
    return next(it for root, it in kinds if (root["name"], root["type"]) == (name, "container"))


@pytest.mark.parametrize("image", SCRIPT.IMAGES)
def test_a_bill_lists_the_content_of_its_image(bills, image):
    recipe, lock = SCRIPT.IMAGES[image]
    parts = {it["purl"]: it for it in of(bills, image)["components"]}
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    pins = [line.split()[0] for line in lines if line[:1].isalnum()]
    purls = {f"pkg:pypi/{pin.replace('==', '@')}" for pin in pins}
    gone = {it for it in purls if it.split("/")[1].split("@")[0] in removed(recipe)}
    npm = {it for it in parts if it.startswith("pkg:npm/")}
    assert parts.keys() - npm == purls - gone
    assert npm == {"pkg:npm/htm@3.1.1"}
    files = [it["externalReferences"][0]["hashes"] for it in parts.values() if it["purl"] in purls]
    named = {one["content"] for hashes in files for one in hashes}
    assert named <= {line.split("sha256:")[1][:64] for line in lines if "sha256:" in line}
    assert all(files)
    with_licence = [it for it in parts.values() if it.get("licenses")]
    assert len(with_licence) > 0.9 * len(parts)


def removed(recipe: str) -> set[str]:
    text = (ROOT / "deploy" / "images" / recipe).read_text()
    after = text.partition("uninstall --yes")[2].partition("&&")[0]
    return set(after.replace("\\", " ").split())


def test_the_bill_of_the_wheel_lists_its_requirements_and_its_hash(bills):
    bill = next(it for name, it in bills.items() if "wheel" in name)
    names = {it["name"] for it in bill["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {it.split(">")[0].split("=")[0].split("[")[0] for it in project["dependencies"]} <= names
    assert "promql-parser" in names
    assert "pytest" not in names
    assert bill["metadata"]["component"]["hashes"][0]["alg"] == "SHA-256"


def test_the_same_commit_gives_the_same_bill():
    packages = SCRIPT.locked((ROOT / "requirements" / "sluice-edge.lock").read_text())
    again = [[SCRIPT.component(it) for it in packages[:5]] for _ in range(2)]
    root = SCRIPT._root("x", "1", SCRIPT.ComponentType.CONTAINER)
    first, second = (SCRIPT.bill(root, parts) for parts in again)
    assert first == second
    assert json.loads(first)["serialNumber"] != "urn:uuid:00000000-0000-0000-0000-000000000000"


def test_a_bill_that_does_not_fit_the_schema_is_not_written():
    package = SCRIPT.LockedPackage("x", "1", ("not hex",))
    root = SCRIPT._root("x", "1", SCRIPT.ComponentType.CONTAINER)
    with pytest.raises(ValueError, match="x"):
        SCRIPT.bill(root, [SCRIPT.component(package)])


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")
def test_a_release_signs_each_bill_as_the_page_says(tmp_path: Path):
    def run(*words: str, given: bytes = b"") -> int:
        return subprocess.run(
            ["ssh-keygen", *words],
            cwd=tmp_path,
            input=given,
            capture_output=True,
            check=False,
            timeout=20,
        ).returncode

    (tmp_path / "bill.json").write_text("{}")
    assert run("-q", "-t", "ed25519", "-N", "", "-f", "key") == 0
    for _ in range(2):  # a second run replaces the signature
        assert SCRIPT.sign([tmp_path / "bill.json"], tmp_path / "key") == [
            tmp_path / "bill.json.sig"
        ]
    (tmp_path / "signers").write_text(f"a@b {(tmp_path / 'key.pub').read_text()}")
    verify = ("-Y", "verify", "-f", "signers", "-I", "a@b", "-n", "sluice-sbom")
    assert run(*verify, "-s", "bill.json.sig", given=b"{}") == 0
    assert run(*verify, "-s", "bill.json.sig", given=b"{ }") != 0
    assert run("-q", "-t", "ed25519", "-N", "", "-f", "other") == 0
    (tmp_path / "key.pub").write_text((tmp_path / "other.pub").read_text())
    with pytest.raises(ValueError, match="ssh-keygen"):
        SCRIPT.sign([tmp_path / "bill.json"], tmp_path / "key")
