"""The supervisor with small real processes in place of the servers."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.stack.home import Home
from cli.stack.segments import mapped_files
from cli.stack.state import DONE, DOWN, READY, STOPPED, ProcessState
from cli.stack.supervisor import SupervisedService, Supervisor
from cli.stack.teardown import end_leftovers
from sluice.process import MARKER, ProcessSpec, marked_processes

pytestmark = pytest.mark.real

# Writes its name when it starts and when it is asked to stop.
CHILD = """
import signal, sys, time
from pathlib import Path
name, folder = sys.argv[1], Path(sys.argv[2])
def note(what):
    with (folder / "order").open("a") as file:
        file.write(f"{what} {name}\\n")
def stop(*_):
    note("stop")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("start")
(folder / name).write_text("")
time.sleep(300)
"""


def spec(name: str, folder: Path, code: str = CHILD, marker: str = "none") -> ProcessSpec:
    async def ready() -> None:
        if not (folder / name).exists():
            raise OSError("not yet")

    return ProcessSpec(
        name=name,
        command=[sys.executable, "-c", code, name, str(folder)],
        env={"PATH": "/usr/bin:/bin", MARKER: marker},
        log_file=folder / "logs" / f"{name}.log",
        ready=ready,
        stop_grace_s=5.0,
    )


def order(folder: Path) -> list[str]:
    return (folder / "order").read_text().splitlines()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - state of other processes
            await asyncio.sleep(0.02)


@asynccontextmanager
async def supervised(
    *services: SupervisedService,
) -> AsyncIterator[tuple[Supervisor, list[ProcessState]]]:
    seen: list[ProcessState] = []
    supervisor = Supervisor(services, seen.append)
    async with asyncio.TaskGroup() as group:
        supervisor.start(group)
        try:
            yield supervisor, seen
        finally:
            await supervisor.stop()


async def test_services_start_in_order_of_need_and_stop_in_reverse(tmp_path) -> None:
    prepared = []

    async def prepare() -> None:
        prepared.append(True)

    services = [
        SupervisedService(
            spec("web", tmp_path), needs=frozenset({"once"}), uses=frozenset({"cache"})
        ),
        SupervisedService(spec("cache", tmp_path)),
        SupervisedService(
            spec("once", tmp_path, "import sys; sys.exit(0)"),
            needs=frozenset({"base"}),
            runs_once=True,
        ),
        SupervisedService(spec("base", tmp_path), prepare=prepare),
    ]
    async with supervised(*services) as (supervisor, _):
        for ready in supervisor.ready.values():
            await until(ready.is_set)
        assert prepared
        assert supervisor.states["once"].state == DONE
        assert supervisor.states["web"].state == READY
    lines = order(tmp_path)
    assert lines.index("start base") < lines.index("start web")
    assert lines.index("stop web") < min(lines.index("stop base"), lines.index("stop cache"))
    assert {s.state for s in supervisor.states.values()} == {STOPPED, DONE}


async def test_a_dead_service_is_restarted_and_reported(tmp_path) -> None:
    async with supervised(SupervisedService(spec("web", tmp_path))) as (supervisor, seen):
        await until(supervisor.ready["web"].is_set)
        first = supervisor.states["web"].pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.states["web"].pid not in (0, first))
        await until(lambda: supervisor.states["web"].state == READY)
        down = next(state for state in seen if state.state == DOWN)
        assert "ended with status -9" in down.last_error
        assert supervisor.states["web"].restarts == 1
        assert not supervisor.failed.is_set()


async def test_a_service_that_never_starts_fails_the_start_in_its_own_words(tmp_path) -> None:
    code = "import sys; sys.exit('no luck today')"
    async with supervised(SupervisedService(spec("web", tmp_path, code))) as (supervisor, _):
        await until(supervisor.failed.is_set)
        assert "no luck today" in supervisor.failure


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit('bad schema')", "import time; time.sleep(99)"]
)
async def test_a_one_shot_that_fails_or_hangs_fails_the_start(tmp_path, code) -> None:
    service = SupervisedService(spec("once", tmp_path, code), runs_once=True, ready_timeout_s=2.0)
    after = SupervisedService(spec("web", tmp_path), needs=frozenset({"once"}))
    async with supervised(service, after) as (supervisor, _):
        await until(supervisor.failed.is_set)
        assert supervisor.failure.startswith("once ")
    assert not (tmp_path / "web").exists()


async def test_a_failed_preparation_fails_the_start(tmp_path) -> None:
    async def prepare() -> None:
        raise RuntimeError("no room")

    async with supervised(SupervisedService(spec("web", tmp_path), prepare=prepare)) as (
        supervisor,
        _,
    ):
        await until(supervisor.failed.is_set)
        assert supervisor.failure == "no room"


async def test_a_missing_program_fails_the_start(tmp_path) -> None:
    missing = spec("web", tmp_path)
    missing = ProcessSpec("web", ["/no/such/program"], {}, missing.log_file, missing.ready)
    async with supervised(SupervisedService(missing)) as (supervisor, _):
        await until(supervisor.failed.is_set)
        assert "/no/such/program" in supervisor.failure


def test_a_dependency_without_a_provider_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="unknown: base"):
        Supervisor(
            [SupervisedService(spec("web", tmp_path), needs=frozenset({"base"}))], lambda _: None
        )


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
async def test_leftovers_of_a_dead_supervisor_are_ended_with_their_shared_memory(
    tmp_path, grace_s
) -> None:
    home = Home(tmp_path)
    segment = Path("/dev/shm") / f"sluice-test-{os.getpid()}"
    code = f"""
import mmap, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open({str(segment)!r}, "w+b") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
time.sleep(300)
"""
    async with supervised(SupervisedService(spec("x", tmp_path, code, home.marker))) as (
        supervisor,
        _,
    ):
        await until(lambda: supervisor.states["x"].pid and segment.exists())
        pid = supervisor.states["x"].pid
        await until(lambda: mapped_files([pid]))
        ended = await asyncio.to_thread(end_leftovers, home, grace_s=grace_s)
        assert [name.endswith(f"({pid})") for name in ended] == [True]
    assert marked_processes(home.marker) == []
    assert not segment.exists()
    assert end_leftovers(home) == []
