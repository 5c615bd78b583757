"""Writes bills of materials: one in CycloneDX 1.6 per image, and one of the wheel.

`python deploy/sbom.py [FOLDER] [--wheel FILE] [--sign KEY]`, by default into `build/sbom`; `make
sbom` does it, and a release signs with `make sbom SIGN_KEY=...`. An image has the packages of its
lock file, with the hashes that pip checks there, less those that its recipe removes again. Licences
are those of the same versions in this environment. Times and ids follow from the contents, so that
the same commit gives the same files.
"""  # noqa: INP001 - a script beside what it describes

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

_ROOT = Path(__file__).parents[1]
_NAMESPACE = "sluice-sbom"  # of signatures: one for another use does not count
_SIGN_S = 20.0
_EPOCH_S = 1_767_225_600  # as SOURCE_DATE_EPOCH of the images
_IDS = uuid.UUID("8a52aa9c-6c0e-5a0e-9d5e-50f6a1c5b0de")
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_REMOVED = re.compile(r"uninstall --yes \\\n((?:\s+[\w .-]+\\\n)+)")
_VENDORED = re.compile(r"^\| `(\S+)` \| `(\S+)` (\S+), .*\| `([0-9a-f]{64})` \|", re.MULTILINE)
_LICENCES = LicenseFactory()
_WHEEL = ComponentType.LIBRARY
_SHIPPED = ("gateway", "router", "replica", "control-plane", "telemetry", "local")
# By image: its recipe and its lock file.
IMAGES = {
    "sluice": ("sluice.Dockerfile", "sluice.lock"),
    "sluice-edge": ("sluice.Dockerfile", "sluice-edge.lock"),
    "sluice-replica-cpu": ("replica-cpu.Dockerfile", "replica-cpu.lock"),
}


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """A package of a lock file.

    Attributes:
        name: Its name, as PyPI spells it in addresses.
        version: Its only version.
        hashes: SHA-256 of each file that pip takes for it.
    """

    name: str
    version: str
    hashes: Sequence[str] = field(default_factory=tuple)


def locked(text: str) -> list[LockedPackage]:
    """Return the packages of a lock file as `uv pip compile` writes it."""
    found: list[LockedPackage] = []
    for block in re.split(r"\n(?=[A-Za-z0-9])", text):
        if pin := _PIN.match(block):
            name = re.sub(r"[-_.]+", "-", pin[1]).lower()
            found.append(LockedPackage(name, pin[2], tuple(_HASH.findall(block))))
    return found


def removed(recipe: str) -> set[str]:
    """Return the packages that a recipe of an image takes out again."""
    return {name for block in _REMOVED.findall(recipe) for name in block.replace("\\", "").split()}


def licence_of(name: str, version: str) -> Iterator[str]:
    """Yield the licence of an installed package, if it is this version."""
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return
    if found["Version"] != version:
        return
    if expression := found.get("License-Expression"):
        yield expression
        return
    classifiers = [it for it in found.get_all("Classifier") or () if it.startswith("License ::")]
    named = [it.rpartition(" :: ")[2] for it in classifiers if it.count("::") > 1]
    text = (found.get("License") or "").strip()
    if text and len(text) < 64 and "\n" not in text:
        named = named or [text]
    yield from named[:1]


def component(package: LockedPackage) -> Component:
    """Return a package as CycloneDX has it."""
    purl = PackageURL("pypi", name=package.name, version=package.version)
    files = [HashType(alg=HashAlgorithm.SHA_256, content=it) for it in package.hashes]
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        purl=purl,
        bom_ref=str(purl),
        licenses=[
            _LICENCES.make_from_string(it) for it in licence_of(package.name, package.version)
        ],
        external_references=[
            ExternalReference(
                type=ExternalReferenceType.DISTRIBUTION,
                url=XsUri(str(purl)),
                comment="one of these files, as the lock file has them",
                hashes=files,
            )
        ]
        if files
        else (),
    )


def vendored(page: str) -> Iterator[Component]:
    """Yield the modules of the console that came from npm, with the hashes of their page."""
    for file, name, version, digest in _VENDORED.findall(page):
        purl = PackageURL("npm", name=name, version=version)
        yield Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=version,
            purl=purl,
            bom_ref=str(purl),
            description=file,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        )


def required(project: dict[str, Any]) -> Iterator[Component]:
    """Yield what the wheel asks for; pip chooses the versions, so it names a range of them."""
    extras = project["optional-dependencies"]
    for scope, texts in (
        (ComponentScope.REQUIRED, project["dependencies"]),
        (ComponentScope.OPTIONAL, [it for name in _SHIPPED for it in extras[name]]),
    ):
        for text in texts:
            asked = Requirement(text)
            if asked.name != project["name"]:
                purl = PackageURL("pypi", name=asked.name)
                yield Component(
                    type=ComponentType.LIBRARY,
                    name=asked.name,
                    scope=scope,
                    purl=purl,
                    bom_ref=str(purl),
                    description=str(asked.specifier),
                )


def bill(root: Component, parts: Iterable[Component]) -> str:
    """Return the bill of a thing with its parts, checked against CycloneDX' schema.

    Raises:
        ValueError: It does not fit the schema; the message names the place.
    """
    made = {part.bom_ref.value: part for part in parts}  # of two scopes the last counts
    bom = Bom(components=made.values())
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromtimestamp(_EPOCH_S, UTC)
    bom.register_dependency(root, made.values())
    text = _written(bom, uuid.UUID(int=0))
    text = _written(bom, uuid.uuid5(_IDS, text))
    if wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"{root.name}: {wrong}")
    return text + "\n"


def _written(bom: Bom, number: uuid.UUID) -> str:
    bom.serial_number = number
    return JsonV1Dot6(bom).output_as_string(indent=1)


def _root(name: str, version: str, kind: ComponentType, digest: str = "") -> Component:
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest)] if digest else ()
    purl = PackageURL("pypi", name=name, version=version) if kind is _WHEEL else None
    return Component(
        type=kind,
        name=name,
        version=version,
        purl=purl,
        bom_ref=f"{kind.value}/{name}",
        licenses=[_LICENCES.make_from_string("Apache-2.0")],
        hashes=hashes,
    )


def bills(wheel: Path | None = None) -> dict[str, str]:
    """Return all bills by the names of their files; raises ValueError as `bill` does."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    console = list(vendored((_ROOT / "console" / "vendor" / "README.md").read_text()))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest() if wheel else ""
    found = {
        f"sluice-{version}-wheel.cdx.json": bill(
            _root("sluice", version, _WHEEL, digest), [*console, *required(project)]
        )
    }
    for image, (recipe, lock) in IMAGES.items():
        gone = removed((_ROOT / "deploy" / "images" / recipe).read_text())
        packages = locked((_ROOT / "requirements" / lock).read_text())
        parts = [component(it) for it in packages if it.name not in gone]
        root = _root(image, version, ComponentType.CONTAINER)
        found[f"{image}-{version}.cdx.json"] = bill(root, [*console, *parts])
    return found


def sign(files: Sequence[Path], key: Path) -> list[Path]:
    """Write a signature beside each file, checked against the key at once; return their paths.

    Args:
        files: Bills, and the wheel.
        key: Private key of OpenSSH; its public one lies beside it as `KEY.pub`.

    Raises:
        ValueError: `ssh-keygen` is missing, or refuses; the message has its words.
    """
    signer = f"{_NAMESPACE} {key.with_name(key.name + '.pub').read_text()}"
    made: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        (allowed := Path(folder, "signers")).write_text(signer)
        check = ("-Y", "verify", "-f", str(allowed), "-I", _NAMESPACE, "-n", _NAMESPACE)
        for file in files:
            made.append(signature := file.with_name(file.name + ".sig"))
            signature.unlink(missing_ok=True)  # ssh-keygen would ask
            _ssh_keygen("-q", "-Y", "sign", "-f", str(key), "-n", _NAMESPACE, str(file))
            _ssh_keygen("-q", *check, "-s", str(signature), given=file.read_bytes())
    return made


def _ssh_keygen(*words: str, given: bytes = b"") -> None:
    try:
        done = subprocess.run(
            ["ssh-keygen", *words],
            input=given,
            capture_output=True,
            check=False,
            timeout=_SIGN_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"ssh-keygen cannot run: {error}") from None
    if done.returncode:
        raise ValueError(f"ssh-keygen {words[-1]}: {done.stderr.decode(errors='replace').strip()}")


def main() -> None:
    """Write all bills into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=_ROOT / "build" / "sbom")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="whose hash the bill has")
    parser.add_argument("--sign", type=Path, metavar="KEY", help="private key of OpenSSH")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for name, text in bills(given.wheel).items():
        files.append(file := given.folder / name)
        file.write_text(text)
    if given.sign:
        files += sign([*files, *([given.wheel] if given.wheel else [])], given.sign)
    for file in files:
        sys.stdout.write(f"{file}\n")


if __name__ == "__main__":
    main()
