"""Checks whether this machine can run Triton's Python backend, and finds the parts of Triton.

Undetected, each problem would cause an obscure failure of Triton's stub process or, with numpy 2,
wrong data. The stub is a program that embeds this environment's Python.
"""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sluice.engines import ENGINES

GLIBC_MIN = (2, 35)
SHM_BYTES_MIN = 64 << 20
# Distributions of all engines.
_PACKAGES = sorted({package for engine in ENGINES.values() for package in engine.packages})
STUB = "triton_python_backend_stub"
VENDOR_TRITON = Path("/opt/tritonserver")
SHM = Path("/dev/shm")  # noqa: S108 - POSIX shared memory is there, on every Linux


@dataclass(frozen=True, slots=True)
class Installation:
    """The parts of this environment that matter to Triton.

    Attributes:
        python: Python version for which the stub must be built, for example `3.11`.
        bin_dir: Directory of `python3`. It must be first on PATH, because the stub finds
            site-packages through PATH.
        libpython: File name of the shared libpython. It does not end in `.so` if Python is linked
            statically.
        libpython_dir: Directory of libpython. Empty if the system's loader finds it, and None if
            there is no libpython.
            without libpython.
        glibc: Version of glibc as (major, minor), or None if the C library is not glibc.
        versions: Versions of the relevant Python distributions that are installed.
        triton: `pytriton/tritonserver` of the wheel, or the directory in NVIDIA's images, or None
            without either.
        shm_bytes_free: Free bytes in /dev/shm, or None if there is no /dev/shm.
    """

    python: str
    bin_dir: Path
    libpython: str
    libpython_dir: Path | str | None
    glibc: tuple[int, int] | None
    versions: dict[str, str]
    triton: Path | None
    shm_bytes_free: int | None

    @property
    def stub(self) -> Path | None:
        """The program that runs Python models with this Python, or None if there is none."""
        if self.triton is None:
            return None
        stubs = self.triton / "python_backend_stubs"
        # NVIDIA's images have one Python only, so its stub is in the directory of the backend.
        own = self.triton / "backends" / "python"
        path = (stubs / self.python if stubs.is_dir() else own) / STUB
        return path if path.is_file() else None


def inspect_installation() -> Installation:
    """Return the installation of this environment."""
    return Installation(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        bin_dir=Path(sys.executable).parent,  # not resolved, because a venv's python is a symlink
        libpython=str(sysconfig.get_config_var("INSTSONAME") or ""),
        libpython_dir=_libpython_dir(str(sysconfig.get_config_var("INSTSONAME") or "")),
        glibc=_glibc(),
        versions=_versions("numpy", "nvidia-pytriton", *_PACKAGES),
        triton=_triton(),
        shm_bytes_free=_shm_bytes_free(),
    )


def problems_of(found: Installation, engines: Sequence[str]) -> list[str]:
    """Return one line per reason why Triton cannot run here, each with its remedy."""
    problems: list[str] = []
    if found.triton is None:
        problems.append("nvidia-pytriton is not installed: pip install nvidia-pytriton==0.7.0")
    elif found.stub is None:
        stubs = found.triton / "python_backend_stubs"
        known = ", ".join(sorted(path.name for path in stubs.glob("*"))) or "none"
        problems.append(
            f"the Triton wheel has no stub for Python {found.python}; use one of: {known}"
        )
    if ".so" not in found.libpython:
        problems.append(
            f"Python {found.python} in {found.bin_dir} is built without a shared libpython, which "
            "Triton's stub needs; with pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install"
        )
    elif found.libpython_dir is None:
        problems.append(
            f"{found.libpython} is not on this machine; with Debian or Ubuntu: "
            f"apt install libpython{found.python}"
        )
    if found.glibc is None or found.glibc < GLIBC_MIN:
        have = "the C library is not glibc" if found.glibc is None else _dotted(found.glibc)
        problems.append(
            f"Triton needs glibc {_dotted(GLIBC_MIN)} or newer ({have}): use Debian 12, "
            "Ubuntu 22.04 or newer"
        )
    if not (found.bin_dir / "python3").exists():
        problems.append(f"no python3 in {found.bin_dir}; make the virtual environment anew")
    return problems + _package_problems(found, engines) + _memory_problems(found)


def _package_problems(found: Installation, engines: Sequence[str]) -> list[str]:
    problems: list[str] = []
    numpy = found.versions.get("numpy")
    if numpy is None:
        problems.append("numpy is not installed: pip install 'numpy>=1.26,<2'")
    elif int(numpy.split(".")[0]) >= 2:
        problems.append(
            f"numpy {numpy} breaks the tensors of Triton's stub (it repeats the first element and "
            "sends empty outputs): pip install 'numpy<2'"
        )
    missing = {
        package: engine
        for engine in reversed(engines)
        for package in ENGINES[engine].packages
        if package not in found.versions
    }
    problems += [
        f"the engine {engine} needs {package}: pip install {package}"
        for package, engine in missing.items()
    ]
    return problems


def _memory_problems(found: Installation) -> list[str]:
    if found.shm_bytes_free is None:
        return [f"{SHM} is missing: mount a tmpfs there"]
    if found.shm_bytes_free < SHM_BYTES_MIN:
        return [
            f"{SHM} has {found.shm_bytes_free >> 20} MiB free, {SHM_BYTES_MIN >> 20} are needed: "
            f"remove what is left in it, or start the container with --shm-size=256m"
        ]
    return []


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _versions(*names: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _triton() -> Path | None:
    """Return the server's directory.

    The wheel is not imported, because its import logs warnings and probes the system.
    """
    with suppress(importlib.metadata.PackageNotFoundError):
        wheel = importlib.metadata.distribution("nvidia-pytriton")
        path = Path(str(wheel.locate_file("pytriton/tritonserver")))
        if (path / "bin" / "tritonserver").is_file():
            return path
    return VENDOR_TRITON if (VENDOR_TRITON / "bin" / "tritonserver").is_file() else None


def _libpython_dir(name: str) -> Path | str | None:
    if not name:
        return None
    for candidate in (str(sysconfig.get_config_var("LIBDIR") or ""), f"{sys.base_prefix}/lib"):
        if candidate and (Path(candidate) / name).is_file():
            return Path(candidate)
    for ldconfig in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        with suppress(OSError, subprocess.SubprocessError):
            listing = subprocess.run(
                [ldconfig, "-p"], capture_output=True, text=True, timeout=10, check=True
            )
            if name in listing.stdout:
                return ""
    return None


def _glibc() -> tuple[int, int] | None:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""  # "glibc 2.36"
    except (ValueError, OSError):
        return None
    parts = text.removeprefix("glibc ").split(".")
    if not text.startswith("glibc ") or len(parts) < 2:
        return None
    return int(parts[0]), int(parts[1])


def _shm_bytes_free() -> int | None:
    try:
        facts = os.statvfs(SHM)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize
