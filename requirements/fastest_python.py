"""Prints the Python 3.11 or 3.12 with which `make setup` makes the environment.

Builds of one version differ by a factor of up to 1.7 in speed, because many have no profile-guided
optimisation. Their build options do not tell, so every interpreter on PATH runs a short loop.
The interpreters run in turns and each one's least time counts, because other work slows some turns.
`python3` is used unless another one takes less than nine tenths of its processor time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

NAMES = ("python3", "python3.12", "python3.11")
_ADVANTAGE = 0.9  # share of the default's time below which another interpreter is used
_TIMEOUT_S = 10.0
_ROUNDS = 4
# An interpreter without `ensurepip` makes no environment, one without headers compiles nothing, and
# Triton loads Python from the shared library.
_PROBE = """
import ctypes, ensurepip, json, os, sys, sysconfig, time, venv
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
library = sysconfig.get_config_var("INSTSONAME") or ""
here = os.path.join(sysconfig.get_config_var("LIBDIR") or "", library)
assert library.startswith("libpython") and ".so" in library
assert os.path.exists(here) or ctypes.CDLL(library)
def loop():
    began_s, found = time.process_time(), {}
    for number in range(50_000):
        found[number % 1000] = (number, str(number))
    return time.process_time() - began_s
seconds = min(loop() for _ in range(5))
print(json.dumps([sys.executable, list(sys.version_info[:2]), seconds]))
"""


class Interpreter(NamedTuple):
    """An interpreter that can make the environment.

    Attributes:
        path: Path of the program, or its name.
        seconds: Processor time of the loop, in seconds.
    """

    path: str
    seconds: float


def fastest(found: Iterable[Interpreter]) -> str:
    """Return the path of the interpreter to use. The first is the default."""
    default, *others = found
    best = min(others, key=lambda it: it.seconds, default=default)
    return best.path if best.seconds < _ADVANTAGE * default.seconds else default.path


def probe(program: str) -> Interpreter | None:
    """Measure a program, or return None if the environment cannot be made with it."""
    try:
        done = subprocess.run(
            [program, "-I", "-c", _PROBE], capture_output=True, check=True, timeout=_TIMEOUT_S
        )
        path, version, seconds = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Interpreter(path, seconds) if [3, 11] <= version < [3, 13] else None


def programs(path: str) -> list[str]:
    """Return the interpreters in the folders of a PATH, `python3` of the first folder first."""
    found: dict[Path, str] = {}
    for name in NAMES:
        for folder in filter(None, path.split(os.pathsep)):
            program = Path(folder, name)
            if os.access(program, os.X_OK):
                found.setdefault(program.resolve(), str(program))
    return list(found.values())


def measured(found: Iterable[str]) -> list[Interpreter]:
    """Measure programs in turns. The result has those that can make the environment."""
    least = {name: it for name in found if (it := probe(name))}
    for _ in range(_ROUNDS - 1):
        for name, before in least.items():
            again = probe(name)
            if again is not None and again.seconds < before.seconds:
                least[name] = again
    return list(least.values())


def main() -> None:
    """Print the interpreter, or `python3` if none can make the environment."""
    found = measured(programs(os.environ.get("PATH", "")))
    print(fastest(found) if found else "python3")


if __name__ == "__main__":
    sys.exit(main())
