"""Turns facts of this machine into findings of problems, without I/O."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cli.doctor.model import DoctorFinding, DoctorLevel, ok

# The stack with a replica of each model needs 1.02 GB (benchmarks/results/stack_start.json).
MEMORY_BYTES_MIN = 1 << 30
MEMORY_BYTES_WELL = 3 << 29
DISK_BYTES_MIN = 1 << 30
DISK_BYTES_WELL = 5 << 30
# Open files for streams, connections and artifacts. A desktop's usual 1,024 are too few.
FILES_MIN = 4096
_OTHERS = 0o077  # bits of a file's mode that grant rights to users other than its owner
_SAFE_PATH = re.compile(r"[\w./+@:,=~-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The facts about this machine.

    Attributes:
        platform: System and processor, e.g. `linux x86_64`.
        missing_wheels: Wheels of the extra `local` that are missing, by their purpose.
        engine_problems: Problems of libpython, glibc, numpy or memory, from the agent's own check.
        memory_bytes: Memory available to programs, or None if unknown.
        disk_bytes: Free bytes on the disk of the home, or None if the home cannot be used.
        home: The folder of the local stack.
        home_problem: Reason why the home cannot be written, or empty if it can.
        open_files: Largest number of open files of each process of this user.
        readable_secrets: Files with keys that other users may read.
        holders: Processes that listen on the stack's public ports.
        runs: Whether the local stack is running, so that it occupies the ports itself.
    """

    platform: str
    missing_wheels: Sequence[str] = ()
    engine_problems: Sequence[str] = ()
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    home: str = ""
    home_problem: str = ""
    open_files: int = FILES_MIN
    readable_secrets: Sequence[str] = ()
    holders: Mapping[int, str] = field(default_factory=dict[int, str])
    runs: bool = False


def machine_findings(facts: MachineFacts) -> Iterator[DoctorFinding]:
    """Yield a finding for each check of the machine."""
    yield _platform(facts)
    yield _wheels(facts)
    yield _engine(facts)
    yield _memory(facts)
    yield _home(facts)
    yield _disk(facts)
    yield _files(facts)
    yield _secrets(facts)
    yield _ports(facts)


def _platform(facts: MachineFacts) -> DoctorFinding:
    if facts.platform == "linux x86_64":
        return ok("platform", facts.platform)
    fix = (
        "use Linux on x86_64, a virtual machine or WSL 2; against a remote stack, sluice runs here"
    )
    return DoctorFinding(
        "platform", DoctorLevel.WARNING, f"{facts.platform}: no local stack here", fix
    )


def _wheels(facts: MachineFacts) -> DoctorFinding:
    if not facts.missing_wheels:
        return ok("packages", "all of the extra `local`")
    missing = f"missing: {', '.join(facts.missing_wheels)}"
    return DoctorFinding("packages", DoctorLevel.WARNING, missing, "pip install 'sluice[local]'")


def _engine(facts: MachineFacts) -> DoctorFinding:
    if not facts.engine_problems:
        return ok("engine", "glibc, libpython, numpy and shared memory are as Triton needs them")
    found = "; ".join(line.partition(":")[0] for line in facts.engine_problems)
    return DoctorFinding("engine", DoctorLevel.WRONG, found, "; ".join(facts.engine_problems))


def _memory(facts: MachineFacts) -> DoctorFinding:
    if facts.memory_bytes is None:
        return DoctorFinding("memory", DoctorLevel.UNKNOWN, "/proc/meminfo has no figure")
    found = f"{facts.memory_bytes >> 20} MiB are free"
    if facts.runs or facts.memory_bytes >= MEMORY_BYTES_WELL:
        return ok("memory", found)
    level = DoctorLevel.WRONG if facts.memory_bytes < MEMORY_BYTES_MIN else DoctorLevel.WARNING
    fix = (
        "end other programs; or start with `sluice up --no-embeddings`, which takes 300 MiB less;"
        f" the stack takes {MEMORY_BYTES_MIN >> 20} MiB"
    )
    return DoctorFinding("memory", level, found, fix)


def _home(facts: MachineFacts) -> DoctorFinding:
    if facts.home_problem:
        fix = "set SLUICE_HOME to a folder of yours"
        return DoctorFinding("home", DoctorLevel.WRONG, f"{facts.home}: {facts.home_problem}", fix)
    if not _SAFE_PATH.fullmatch(facts.home):
        fix = "set SLUICE_HOME to a folder of letters, digits, ._-"
        found = f"{facts.home!r} holds a space or special character, at which Triton's shell breaks"
        return DoctorFinding("home", DoctorLevel.WRONG, found, fix)
    return ok("home", facts.home)


def _disk(facts: MachineFacts) -> DoctorFinding:
    if facts.disk_bytes is None:
        return DoctorFinding("disk", DoctorLevel.UNKNOWN, f"{facts.home} cannot be read")
    found = f"{facts.disk_bytes >> 20} MiB free at {facts.home}"
    if facts.disk_bytes >= DISK_BYTES_WELL:
        return ok("disk", found)
    level = DoctorLevel.WRONG if facts.disk_bytes < DISK_BYTES_MIN else DoctorLevel.WARNING
    fix = "free some space, or set SLUICE_HOME to a folder on another disk"
    return DoctorFinding("disk", level, found, fix)


def _files(facts: MachineFacts) -> DoctorFinding:
    found = f"a process may open {facts.open_files} files"
    if facts.open_files >= FILES_MIN:
        return ok("open files", found)
    fix = f"ulimit -n {FILES_MIN} (for good: LimitNOFILE= of the unit, or limits.conf)"
    return DoctorFinding("open files", DoctorLevel.WARNING, found, fix)


def _secrets(facts: MachineFacts) -> DoctorFinding:
    if not facts.readable_secrets:
        return ok("secrets", "only their owner reads them")
    names = " ".join(facts.readable_secrets)
    found = f"others may read {', '.join(facts.readable_secrets)}"
    return DoctorFinding(
        "secrets", DoctorLevel.WRONG, found, f"chmod 600 {names}; then make new keys"
    )


def is_open_to_others(mode: int) -> bool:
    """Return whether a mode grants any right to users other than the owner."""
    return bool(mode & _OTHERS)


def _ports(facts: MachineFacts) -> DoctorFinding:
    if facts.runs:
        return ok("ports", "the local stack has them")
    if not facts.holders:
        return ok("ports", "free")
    taken = ", ".join(f"{port} by {who or 'another'}" for port, who in facts.holders.items())
    fix = "stop it, or start with `sluice up --port N --admin-port M`"
    return DoctorFinding("ports", DoctorLevel.WARNING, f"taken: {taken}", fix)
