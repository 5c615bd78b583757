"""Children end with their whole group, whatever interrupts their owner."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from sluice import process as process_module
from sluice.ids import new_id
from sluice.process import (
    ChildProcess,
    ProcessFailedError,
    ProcessSpec,
    free_port,
    keep_running,
    marked_processes,
    port_answers,
    port_is_free,
)
from sluice.procfs import cpu_s, first_end, group_processes, kill_marked, memory_bytes, program_name

pytestmark = pytest.mark.real

# Two processes: a shell that ends on SIGTERM, and its child that ignores it, as Triton's stub does.
STUBBORN = "(trap '' TERM; while :; do sleep 0.2; done) & echo up; wait"


async def ready_at_once() -> None:
    return None


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., ProcessSpec]:
    def make(script: str, **changes: object) -> ProcessSpec:
        spec = ProcessSpec(
            name="child",
            command=["/bin/sh", "-c", script],
            env={"PATH": "/usr/bin:/bin"},
            log_file=tmp_path / "logs" / "child.log",
            ready=ready_at_once,
            stop_grace_s=3.0,
        )
        return replace(spec, **changes)  # type: ignore[arg-type]

    return make


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - watches processes, which set no event
            await asyncio.sleep(0.01)


async def test_stop_ends_descendants_that_ignore_the_signal(make_spec) -> None:
    cleaned: list[bool] = []
    child = await ChildProcess.start(make_spec(STUBBORN, cleanup=lambda: cleaned.append(True)))
    await until(lambda: len(group_processes(child.pid)) >= 2)
    assert memory_bytes(group_processes(child.pid)) > 0
    await child.stop()
    await child.stop()
    assert group_processes(child.pid) == []
    assert (child.is_running, child.status, cleaned) == (False, -signal.SIGTERM, [True])


async def test_group_of_a_crashed_leader_is_ended(make_spec) -> None:
    child = await ChildProcess.start(make_spec(STUBBORN))
    await until(lambda: len(group_processes(child.pid)) >= 2)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    assert group_processes(child.pid) != []
    await child.stop()
    assert group_processes(child.pid) == []


async def test_cancelled_stop_kills_at_once_and_cleans_up(make_spec) -> None:
    cleaned: list[bool] = []
    spec = make_spec("trap '' TERM; echo up; while :; do sleep 0.2; done", stop_grace_s=100.0)
    child = await ChildProcess.start(replace(spec, cleanup=lambda: cleaned.append(True)))
    await until(lambda: b"up" in spec.log_file.read_bytes())
    async with asyncio.TaskGroup() as group:
        stopping = group.create_task(child.stop())
        await asyncio.sleep(0.05)
        stopping.cancel()
    assert stopping.cancelled()
    assert (group_processes(child.pid), cleaned) == ([], [True])


async def test_keep_running_leaves_nothing_when_cancelled_at_any_time(make_spec) -> None:
    marker = new_id("test")
    spec = make_spec(STUBBORN, env={"PATH": "/usr/bin:/bin", "SLUICE_STACK": marker})
    for pause_s in (0.0, 0.005, 0.05):
        async with asyncio.TaskGroup() as group:
            running = group.create_task(
                keep_running(spec, ready_timeout_s=60, on_change=lambda *_: None)
            )
            await asyncio.sleep(pause_s)
            running.cancel()
        assert marked_processes(marker) == []


async def test_keep_running_hears_a_cancellation_while_a_check_fails(make_spec) -> None:
    loop = asyncio.get_running_loop()

    async def ready() -> None:
        loop.call_soon(task.cancel)  # arrives while the failure is being handled
        raise OSError("not yet")

    spec = make_spec("sleep 60", ready=ready)
    task = loop.create_task(
        keep_running(spec, ready_timeout_s=60, on_change=lambda *_: None, backoff_max_s=0.01)
    )
    done, _ = await asyncio.wait([task], timeout=60)
    assert done
    assert task.cancelled()


async def test_keep_running_restarts_and_reports(make_spec) -> None:
    states: list[str] = []
    async with asyncio.TaskGroup() as group:
        running = group.create_task(
            keep_running(
                make_spec("echo once more; exit 3"),
                ready_timeout_s=60,
                on_change=lambda child, text: states.append(text if child else f"down {text}"),
            )
        )
        await until(lambda: sum(state.startswith("down") for state in states) >= 2)
        running.cancel()
    assert states[0] == "starting"
    assert any("status 3" in state and "once more" in state for state in states)


async def test_keep_running_tries_a_missing_program_again(make_spec) -> None:
    states: list[str] = []
    spec = make_spec("", command=["/nonexistent/program"])
    async with asyncio.TaskGroup() as group:
        running = group.create_task(
            keep_running(spec, ready_timeout_s=60, on_change=lambda _, text: states.append(text))
        )
        await until(lambda: len(states) >= 2)
        running.cancel()
    assert all("/nonexistent/program" in state for state in states)


async def test_wait_ready_ends_with_the_child_even_while_a_check_hangs(make_spec) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    child = await ChildProcess.start(make_spec("echo no luck; sleep 0.1; exit 7", ready=never))
    with pytest.raises(ProcessFailedError, match=r"status 7 .*no luck"):
        await child.wait_ready(60)
    await child.stop()


async def test_a_child_may_end_between_two_checks(make_spec, tmp_path: Path) -> None:
    checked = tmp_path / "checked"

    async def ready() -> None:
        checked.touch()
        raise OSError("not yet")

    errors: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    script = f"until [ -e {checked} ]; do sleep 0.01; done; exit 3"
    child = await ChildProcess.start(make_spec(script, ready=ready))
    with pytest.raises(ProcessFailedError, match="status 3"):
        await child.wait_ready(60, poll_s=0.5)
    assert not errors


async def test_wait_ready_names_the_last_problem_when_time_runs_out(make_spec) -> None:
    port = free_port()
    spec = make_spec("sleep 60", ready=lambda: port_answers("127.0.0.1", port))
    child = await ChildProcess.start(spec)
    with pytest.raises(ProcessFailedError, match="ConnectionRefused"):
        await child.wait_ready(0.3)
    await child.stop()


async def test_a_ready_answer_of_another_process_does_not_count(make_spec) -> None:
    child = await ChildProcess.start(make_spec("exit 4"))
    await child.wait()
    with pytest.raises(ProcessFailedError, match="status 4"):
        await child.wait_ready(60)
    await child.stop()


async def test_long_log_is_rotated_at_start(make_spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "LOG_BYTES_MAX", 10)
    spec = make_spec("echo something longer than that")
    for _ in range(3):
        child = await ChildProcess.start(spec)
        await child.wait()
        await child.stop()
    assert spec.log_file.read_text() == "something longer than that\n"
    assert spec.log_file.with_name("child.log.1").read_text() == "something longer than that\n"
    assert len(list(spec.log_file.parent.iterdir())) == 2


async def test_starting_leaks_no_file_handles(make_spec) -> None:
    async def once() -> None:
        child = await ChildProcess.start(make_spec("exit 0"))
        await child.wait()
        await child.stop()
        with pytest.raises(OSError, match="nonexistent"):
            await ChildProcess.start(make_spec("", command=["/nonexistent"]))

    await once()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        await once()
    # Fewer: something of an earlier test was collected meanwhile.
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


async def test_children_hold_none_of_our_file_handles(make_spec) -> None:
    child = await ChildProcess.start(make_spec("ls /proc/self/fd | wc -l"))
    await child.wait()
    await child.stop()
    assert int(child.spec.log_file.read_text()) <= 4  # 0, 1, 2, and that of ls itself


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start processes of other users")
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_child_runs_as_another_user(make_spec, run, tmp_path: Path) -> None:
    async def scenario() -> str:
        child = await ChildProcess.start(make_spec("id -u; id -G", uid=65534, gid=65534))
        await child.wait()
        await child.stop()
        return child.spec.log_file.read_text()

    assert run(scenario()) == "65534\n65534\n"


async def test_marked_processes_are_found_and_killed(make_spec) -> None:
    marker = new_id("test")
    spec = make_spec(STUBBORN, env={"PATH": "/usr/bin:/bin", "SLUICE_STACK": marker})
    child = await ChildProcess.start(spec)
    await until(lambda: len(group_processes(child.pid)) >= 2)
    await until(lambda: set(marked_processes(marker)) >= set(group_processes(child.pid)))
    killed = await kill_marked(marker)
    assert child.pid in killed
    assert marked_processes(marker) == []
    assert await child.wait() == -signal.SIGKILL
    await child.stop()
    assert await kill_marked(marker) == []


def test_port_is_free_sees_a_listener_and_ignores_lingering_connections() -> None:
    port = free_port()
    assert port_is_free("127.0.0.1", port)

    async def serve_once() -> None:
        async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()  # the server closes first, so its side lingers in TIME_WAIT
            await writer.wait_closed()

        server = await asyncio.start_server(close, "127.0.0.1", port)
        assert not port_is_free("127.0.0.1", port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.read()
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    asyncio.run(serve_once())
    assert port_is_free("127.0.0.1", port)


async def test_processes_that_are_not_our_children_are_watched_and_measured(make_spec) -> None:
    child = await ChildProcess.start(make_spec("(exec sleep 60) & exec cat /dev/zero > /dev/null"))
    await until(lambda: "sleep" in [program_name(pid) for pid in group_processes(child.pid)])
    (sleeper,) = [pid for pid in group_processes(child.pid) if program_name(pid) == "sleep"]
    await until(lambda: cpu_s([child.pid, sleeper]) > 0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        watch = group.create_task(first_end([child.pid, sleeper]))
        await asyncio.sleep(0.05)
        assert not watch.done()
        os.kill(sleeper, signal.SIGKILL)
    assert watch.result() == sleeper
    assert await first_end([sleeper]) == sleeper
    await child.stop()
    assert (memory_bytes([child.pid]), cpu_s([child.pid])) == (0, 0.0)


@pytest.fixture
def inherits_orphans() -> Iterator[None]:
    """Make this process the parent of orphaned descendants, as process 1 of a container is."""
    set_child_subreaper = 36
    libc = ctypes.CDLL(None)
    assert libc.prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(set_child_subreaper, 0, 0, 0, 0) == 0


@pytest.mark.usefixtures("inherits_orphans")
async def test_orphans_that_fall_to_us_do_not_stay_as_zombies(make_spec) -> None:
    child = await ChildProcess.start(make_spec(STUBBORN))
    await until(lambda: len(group_processes(child.pid)) >= 2)
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    await child.stop()
    with pytest.raises(ProcessLookupError):  # which a zombie would prevent
        os.killpg(child.pid, 0)
