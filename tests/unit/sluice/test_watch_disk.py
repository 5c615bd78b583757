"""The snapshot on disk: writers that are killed, disks that are full, and how old it says it is."""

import asyncio
import errno
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sluice import watch
from sluice.watch import ControlState, ControlWatcher, read_snapshot, write_snapshot
from sluice.wire.control.v1 import control_pb2 as wire

_WRITER = """
import sys
from pathlib import Path
from sluice.watch import ControlState, write_snapshot
from sluice.wire.control.v1 import control_pb2 as wire
state = ControlState()
for version in range(1, 10**6):
    tiers = [wire.Tier(id=str(number), rpm=version) for number in range(5000)]
    objects = wire.Objects(tiers=tiers)
    state.apply(wire.WatchResponse(version=version, upserts=objects))
    write_snapshot(state.serialized(), Path(sys.argv[1]))
    print(version, flush=True)
"""


def _state(version: int) -> ControlState:
    state = ControlState()
    objects = wire.Objects(tiers=[wire.Tier(id="t", rpm=version)])
    state.apply(wire.WatchResponse(version=version, upserts=objects))
    return state


def _watcher(file: Path) -> ControlWatcher:
    return ControlWatcher("127.0.0.1:1", wire.ROLE_GATEWAY, "g", "", file)


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "control.snapshot"
    for number in range(4):
        command = [sys.executable, "-c", _WRITER, str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(0.003 * number)  # other moments of the next write
            writer.kill()
        found = read_snapshot(file)
        assert len(found.upserts.tiers) == 5000
        assert {tier.rpm for tier in found.upserts.tiers} == {found.version}


def test_leftovers_of_a_killed_writer_go_with_a_later_write(tmp_path: Path) -> None:
    file = tmp_path / "control.snapshot"
    old, new, other = (
        tmp_path / name for name in (".control.snapshot_1", ".control.snapshot_2", "x")
    )
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (time.time() - 3600,) * 2)
    write_snapshot(_state(7).serialized(), file)
    assert sorted(tmp_path.iterdir()) == sorted((file, new, other)), "another writer may be at work"


async def _run_until(watcher: ControlWatcher, file: Path, version: int) -> None:
    """Let a watcher that hears version 9 run until the file has a version."""

    async def responses(_: object) -> AsyncIterator[wire.WatchResponse]:
        yield wire.WatchResponse(version=9, is_snapshot=True)
        await asyncio.Event().wait()

    watcher._responses = responses  # type: ignore[assignment,method-assign]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        while read_snapshot(file).version != version:  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.001)
        running.cancel()


async def test_a_full_disk_keeps_the_old_file_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "control.snapshot"
    write_snapshot(_state(7).serialized(), file)
    seen: list[int] = []
    fsync = os.fsync

    def full_at_first(descriptor: int) -> None:
        seen.append(read_snapshot(file).version)
        if len(seen) <= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(watch.os, "fsync", full_at_first)
    monkeypatch.setattr(watch, "_SAVE_DELAY_S", 0.001)
    monkeypatch.setattr(watch, "_SAVE_RETRY_S", 0.001)
    with capture_logs() as lines:
        await _run_until(_watcher(file), file, 9)
    assert seen == [7, 7, 7]
    assert [it["event"] for it in lines].count("control_snapshot_not_saved") == 2
    assert list(tmp_path.iterdir()) == [file], "nothing half-written stays"


async def test_the_file_says_when_its_state_was_last_true_not_when_it_was_written(
    tmp_path: Path,
) -> None:
    file = tmp_path / "control.snapshot"
    write_snapshot(_state(7).serialized(), file, true_at_unix_s=time.time() - 3600)
    watcher = _watcher(file)
    assert watcher.load_from_disk()
    assert 3600 <= watcher.age_s() < 3700
    watcher._touch(file)  # nothing was heard since
    assert time.time() - file.stat().st_mtime >= 3600
    await watcher._receive(wire.WatchResponse(version=0, is_heartbeat=True))
    assert watcher.age_s() >= 3600, "a greeting confirms nothing"
    await watcher._receive(wire.WatchResponse(version=7, is_heartbeat=True))
    watcher._touch(file)
    again = _watcher(file)
    assert again.load_from_disk()
    assert again.age_s() < 60


async def test_a_state_without_changes_stays_young_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "control.snapshot"
    touched = asyncio.Event()
    touch = ControlWatcher._touch

    def seen(watcher: ControlWatcher, at: Path) -> None:
        touch(watcher, at)
        touched.set()

    monkeypatch.setattr(watch, "_TOUCH_S", 0.001)
    monkeypatch.setattr(ControlWatcher, "_touch", seen)
    write_snapshot(_state(9).serialized(), file, true_at_unix_s=time.time() - 3600)
    watcher = _watcher(file)
    assert watcher.load_from_disk()

    async def responses(_: object) -> AsyncIterator[wire.WatchResponse]:
        yield wire.WatchResponse(version=9, is_heartbeat=True)
        touched.clear()
        await asyncio.Event().wait()

    watcher._responses = responses  # type: ignore[assignment,method-assign]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        while time.time() - file.stat().st_mtime > 60:
            await touched.wait()
            touched.clear()
        running.cancel()
