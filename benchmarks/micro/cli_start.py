"""Measures the CPU time of short commands: help texts, refusals and reads of local files.

One operation is one process of `python -m cli COMMAND`, from its start to its end. `ms` is user and
system time in the round with the least. Each round runs all commands, so that other work on the
machine affects all alike. `bare` is an interpreter without a program. A command of the admin REST
finds no installation here, so it ends before it imports the HTTP client. Not measured: the import
of this client, and its request.
Run: `python -m benchmarks.micro.cli_start`.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile

from benchmarks.results import write_result

_ROUNDS = 7
_COMMANDS = {
    "--help": ("--help",),
    "version": ("version",),
    "status": ("status",),
    "tenants --help": ("tenants", "--help"),
    "tenants list": ("tenants", "list"),
    "rollouts start --help": ("rollouts", "start", "--help"),
    "up --help": ("up", "--help"),
    "logs": ("logs", "gateway"),
}


def _cpu_ms(arguments: tuple[str, ...], home: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "SLUICE_HOME": home}
    subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, check=False, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    """Measure, print and write the result."""
    cases = {"bare": ("-c", "pass")} | {
        name: ("-m", "cli", *words) for name, words in _COMMANDS.items()
    }
    figures: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as home:
        for _ in range(_ROUNDS):
            for name, arguments in cases.items():
                figures[name].append(_cpu_ms(arguments, home))
    measured = {name: round(min(found)) for name, found in figures.items()}
    sys.stdout.write(json.dumps(measured, indent=2) + "\n")
    write_result(
        "cli_start",
        "One operation: one process of the command line, from its start to its end; least of"
        f" {_ROUNDS} rounds in turns.",
        {"ms": measured},
    )


if __name__ == "__main__":
    main()
