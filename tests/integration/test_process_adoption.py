"""Groups that an earlier process of ours left running are taken over, if they are the right ones."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replica.agent.activity import Activity, ProbeWatch
from sluice.ids import new_id
from sluice.process import MARKER, AdoptedProcess, ChildProcess, ProcessSpec
from sluice.procfs import (
    environment,
    group_processes,
    kill_marked,
    marked_processes,
    start_ticks,
    wants_processor,
)

pytestmark = pytest.mark.real

# Two processes: a shell that ends on SIGTERM, and its child that ignores it, as Triton's stub does.
STUBBORN = "(trap '' TERM; while :; do sleep 0.2; done) & wait"


async def ready_at_once() -> None:
    return None


def yes(_: int) -> bool:
    return True


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - watches processes, which set no event
            await asyncio.sleep(0.01)


@pytest.fixture
def cleaned() -> list[bool]:
    return []


@pytest.fixture
def spec(tmp_path: Path, cleaned: list[bool]) -> ProcessSpec:
    return ProcessSpec(
        name="left",
        command=["/bin/sh", "-c", STUBBORN],
        env={"PATH": "/usr/bin:/bin"},
        log_file=tmp_path / "left.log",
        ready=ready_at_once,
        stop_grace_s=3.0,
        cleanup=lambda: cleaned.append(True),
    )


@pytest.fixture
def leave() -> Iterator[Callable[[str, str], int]]:
    """Start a script in a group of its own whose parent is gone; return its id."""
    marker = new_id("test")

    def start(script: str, marker: str = marker) -> int:
        command = 'setsid /bin/sh -c "$1" > /dev/null 2>&1 & echo $!'
        started = subprocess.run(
            ["/bin/sh", "-c", command, "sh", script],
            env={"PATH": "/usr/bin:/bin", MARKER: marker},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(started.stdout)

    yield start
    for pid in marked_processes(marker):
        os.kill(pid, signal.SIGKILL)


async def adopted(spec: ProcessSpec, pid: int) -> AdoptedProcess:
    await until(lambda: len(group_processes(pid)) >= 2)
    process = AdoptedProcess.adopt(spec, pid, yes)
    assert process is not None
    return process


async def test_an_adopted_group_is_stopped_as_a_child_is(spec, leave, cleaned) -> None:
    process = await adopted(spec, leave(STUBBORN))
    assert process.is_running
    await process.stop()
    await process.stop()
    assert (group_processes(process.pid), cleaned, process.is_running) == ([], [True], False)
    assert process.status is None, "only its parent could know"


async def test_the_end_of_a_leader_that_is_no_child_is_noticed(spec, leave, cleaned) -> None:
    process = await adopted(spec, leave(STUBBORN))
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        await process.ended()
    assert (group_processes(process.pid) != [], cleaned) == (True, [])
    await process.stop()
    assert (group_processes(process.pid), cleaned) == ([], [True])


async def test_only_the_process_that_is_meant_is_adopted(spec, leave) -> None:
    pid = leave(STUBBORN)
    await until(lambda: len(group_processes(pid)) >= 2)
    handles = len(list(Path("/proc/self/fd").iterdir()))
    asked: list[int] = []

    def no(candidate: int) -> bool:
        asked.append(candidate)
        return False

    def yes_but_it_ends(candidate: int) -> bool:
        os.killpg(candidate, signal.SIGKILL)
        while group_processes(candidate):
            time.sleep(0.01)
        return True

    assert AdoptedProcess.adopt(spec, pid, no) is None
    assert (asked, len(group_processes(pid)) >= 2) == ([pid], True), "it is left alone"
    assert AdoptedProcess.adopt(spec, pid, yes_but_it_ends) is None
    await until(lambda: start_ticks(pid) == 0)
    assert AdoptedProcess.adopt(spec, pid, yes) is None
    assert len(list(Path("/proc/self/fd").iterdir())) <= handles


async def test_a_released_child_goes_on_and_can_be_adopted(spec, cleaned) -> None:
    child = await ChildProcess.start(spec)
    await until(lambda: len(group_processes(child.pid)) >= 2)
    child.release()
    child.release()
    await asyncio.sleep(0.05)
    assert (len(group_processes(child.pid)) >= 2, cleaned) == (True, [])
    process = await adopted(spec, child.pid)
    await process.stop(grace_s=0)
    assert (group_processes(child.pid), cleaned) == ([], [True])


async def test_marked_groups_can_be_spared(leave) -> None:
    marker = new_id("test")
    spared, other = leave(STUBBORN, marker), leave(STUBBORN, marker)
    await until(lambda: len(marked_processes(marker)) >= 4)
    assert other in await kill_marked(marker, spare={spared})
    assert (group_processes(other), len(group_processes(spared)) >= 2) == ([], True)
    await kill_marked(marker)
    assert group_processes(spared) == []


async def test_the_activity_and_environment_of_a_process_can_be_read(leave) -> None:
    busy, idle = leave("while :; do :; done"), leave("exec sleep 60")
    await until(lambda: wants_processor([busy]))
    await until(lambda: not wants_processor([idle]))
    assert 0 < start_ticks(busy) <= start_ticks(idle)
    assert environment(idle)[MARKER] == environment(busy)[MARKER]
    worker, sleeper = Activity(), Activity()
    worker.look([busy])
    sleeper.look([idle])
    async with ProbeWatch([busy], 0.4) as of_worker, ProbeWatch([idle], 0.4) as of_sleeper:
        await asyncio.sleep(0.4)
    assert (of_worker.wants_processor(), of_sleeper.wants_processor()) == (True, False)
    async with ProbeWatch([busy], 60.0) as at_once:
        pass
    assert at_once.wants_processor()
    await until(lambda: worker.look([busy]) > 0)
    assert sleeper.look([idle]) == 0.0
    os.kill(busy, signal.SIGSTOP)
    await until(lambda: not wants_processor([busy]))
    worker.look([busy])
    await asyncio.sleep(0.1)
    assert worker.look([busy]) == 0.0, "frozen"
    assert (start_ticks(2**22 + 1), environment(2**22 + 1)) == (0, {})


async def test_a_standstill_of_the_event_loop_is_measured() -> None:
    async with ProbeWatch([], 1.0) as whole, ProbeWatch([], 1.0) as other:
        await asyncio.sleep(0.1)
        time.sleep(0.4)  # noqa: ASYNC251 - what is measured
        await asyncio.sleep(0)
    async with ProbeWatch([], 1.0) as at_the_end:
        time.sleep(0.4)  # noqa: ASYNC251
    assert min(whole.stalled_s, other.stalled_s, at_the_end.stalled_s) >= 0.3
