"""The state that gateways and routers decide from: snapshots, deltas, and the file on disk."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from sluice import watch
from sluice.watch import KINDS, ControlState, ControlWatcher, key_of, read_snapshot, write_snapshot
from sluice.wire.control.v1 import control_pb2 as wire

_IDS = st.sampled_from(["a", "b", "c", "d"])
_CLASSES = {
    "tiers": wire.Tier,
    "tenants": wire.Tenant,
    "keys": wire.ApiKey,
    "bases": wire.Base,
    "models": wire.Model,
    "pools": wire.Pool,
    "cells": wire.Cell,
    "replicas": wire.Replica,
    "aliases": wire.Alias,
    "releases": wire.Release,
    "splits": wire.Split,
    "budget_stops": wire.BudgetStops,
    "text_policies": wire.TextPolicy,
    "guard_sets": wire.GuardSet,
    "server_tools": wire.ServerTool,
    "auto_policies": wire.AutoPolicy,
    "warm_prompts": wire.WarmPrompts,
    "model_pools": wire.ModelPools,
    "content_keys": wire.ContentKeys,
}
_FIELDS = {
    "tiers": "rpm",
    "tenants": "weight",
    "keys": "rpm",
    "bases": "context_tokens_max",
    "models": "created_at_unix_s",
    "pools": "replicas_wanted",
    "cells": "epoch",
    "replicas": "state",
    "aliases": "target",
    "releases": "pool_id",
    "splits": "share",
    "budget_stops": "stops",
    "text_policies": "share",
    "guard_sets": "version",
    "server_tools": "timeout_ms",
    "auto_policies": "scheme",
    "warm_prompts": "prompts",
    "model_pools": "pools",
    "content_keys": "erased_at_unix_ms",
}
# A change: (kind, id, new value or None to remove).
_CHANGE = st.tuples(st.sampled_from(KINDS), _IDS, st.none() | st.integers(0, 5))


def _message(kind: str, key: str, value: int) -> object:
    name = "digest" if kind == "bases" else "id"
    content = str(value) if kind in {"aliases", "releases"} else value
    if kind == "budget_stops":
        content = [wire.BudgetStop(amount=value)]
    if kind == "warm_prompts":
        content = [str(value)]
    if kind == "model_pools":
        content = [wire.ModelPool(pool_id=str(value))]
    return _CLASSES[kind](**{name: key, _FIELDS[kind]: content})


def _content(state: ControlState) -> dict[str, dict[str, object]]:
    return {kind: dict(state.of_kind(kind)) for kind in KINDS}


def _delta(version: int, changes: dict[tuple[str, str], int | None]) -> wire.WatchResponse:
    response = wire.WatchResponse(version=version)
    for (kind, key), value in changes.items():
        if value is None:
            getattr(response.removals, kind).append(key)
        else:
            getattr(response.upserts, kind).append(_message(kind, key, value))
    return response


def _snapshot(state: ControlState) -> wire.WatchResponse:
    return wire.WatchResponse.FromString(b"".join(state.serialized()))


@given(st.lists(st.lists(_CHANGE, max_size=8), max_size=6), st.integers(0, 6))
def test_snapshot_and_deltas_give_the_direct_state(
    batches: list[list[tuple[str, str, int | None]]], joined_at: int
) -> None:
    truth, direct, joined = {}, ControlState(), ControlState()
    joined.apply(_delta(1, {("tiers", "stale"): 1}))
    for number, batch in enumerate(batches):
        if number == joined_at:
            assert joined.apply(_snapshot(direct))
        changes = {(kind, key): value for kind, key, value in batch}
        truth |= changes
        delta = _delta(10 + number, changes)
        assert direct.apply(delta)
        if number >= joined_at:
            assert joined.apply(delta)
            assert not joined.apply(delta), "a delta that is known must change nothing"
    if joined_at >= len(batches):
        joined.apply(_snapshot(direct))
    expected = {
        kind: {
            k: _message(kind, k, v) for (of, k), v in truth.items() if of == kind and v is not None
        }
        for kind in KINDS
    }
    assert _content(direct) == expected
    assert _content(joined) == expected
    assert joined.version == direct.version


def test_heartbeats_and_old_deltas_change_nothing_but_an_older_snapshot_counts() -> None:
    state = ControlState()
    state.apply(_delta(7, {("pools", "p"): 1}))
    assert not state.apply(wire.WatchResponse(version=9, is_heartbeat=True))
    assert not state.apply(_delta(7, {("pools", "p"): 2}))
    assert state.version == 7
    assert state.apply(wire.WatchResponse(version=3, is_snapshot=True))
    assert (state.version, state.pools) == (3, {})


def test_later_changes_do_not_reach_a_snapshot_that_was_begun() -> None:
    state = ControlState()
    state.apply(_delta(7, {("pools", "p"): 1}))
    pieces = state.serialized()
    state.apply(_delta(8, {("pools", "p"): None, ("cells", "c"): 1}))
    response = wire.WatchResponse.FromString(b"".join(pieces))
    assert (response.version, len(response.upserts.pools), len(response.upserts.cells)) == (7, 1, 0)


def test_more_objects_than_one_piece_holds(tmp_path: Path) -> None:
    state = ControlState()
    state.apply(_delta(1, {("keys", str(number)): 1 for number in range(5001)}))
    write_snapshot(state.serialized(), tmp_path / "s")
    read = ControlState()
    read.apply(read_snapshot(tmp_path / "s"))
    assert _content(read) == _content(state)


async def test_a_saved_state_is_loaded_and_its_age_known(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "control.snapshot"
    state = ControlState()
    state.apply(_delta(7, {("bases", "sha"): 1}))
    write_snapshot(state.serialized(), file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    watcher = _watcher(file)
    told: list[int] = []
    watcher.on_change(lambda response: told.append(response.version))
    assert math.isinf(watcher.age_s())
    assert watcher.load_from_disk()
    assert watcher.age_s() < 60
    assert await watcher.wait_synced(0.01)
    assert (told, key_of("bases", watcher.state.bases["sha"])) == ([7], "sha")


@pytest.mark.parametrize("kinds", [b"", b" tiers,tenants", b" future"])
async def test_a_file_with_other_kinds_is_used_until_there_is_a_snapshot(
    tmp_path: Path, kinds: bytes
) -> None:
    """One that was written before there were aliases has none: no delta would bring them."""
    file = tmp_path / "s"
    state = ControlState()
    state.apply(_delta(7, {("tenants", "t"): 1}))
    write_snapshot(state.serialized(), file)
    header, _, payload = file.read_bytes().partition(b"\n")
    file.write_bytes(b" ".join(header.split(b" ")[:2]) + kinds + b"\n" + payload)
    watcher = _watcher(file)
    assert watcher.load_from_disk()
    assert (watcher.state.version, list(watcher.state.tenants)) == (0, ["t"])
    assert math.isfinite(watcher.age_s())


def _parts(state: ControlState) -> list[wire.WatchResponse]:
    return [wire.WatchResponse.FromString(part) for part in state.serialized()]


async def test_a_snapshot_in_parts_is_taken_when_its_last_part_is_here() -> None:
    truth = ControlState()
    truth.apply(_delta(7, {("keys", str(number)): 1 for number in range(5001)}))
    watcher = _watcher(None)
    told: list[wire.WatchResponse] = []
    watcher.on_change(told.append)
    *parts, last = _parts(truth)
    assert len(parts) == 3
    for part in parts:
        await watcher._receive(part)
        assert (watcher.state.version, watcher.state.keys) == (0, {})
        assert math.isinf(watcher.age_s())
    await watcher._receive(last)
    assert _content(watcher.state) == _content(truth)
    assert [(it.version, it.is_snapshot) for it in told] == [(7, True)]


async def test_parts_of_a_broken_stream_are_not_mixed_with_the_next_ones() -> None:
    def state(version: int, prefix: str) -> ControlState:
        made = ControlState()
        made.apply(_delta(version, {("keys", f"{prefix}{number}"): 1 for number in range(4001)}))
        return made

    before, after = state(7, "old"), state(9, "new")
    streams = [_parts(before)[:2], _parts(after)]
    asked: list[int] = []
    asked_again = asyncio.Event()

    async def responses(_: object) -> AsyncIterator[wire.WatchResponse]:
        asked.append(watcher.state.version)
        if not streams:
            asked_again.set()
            await asyncio.Event().wait()
        for response in streams.pop(0):
            yield response

    watcher = _watcher(None)
    watcher._responses = responses  # type: ignore[assignment,method-assign]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        await asked_again.wait()
        running.cancel()
    assert asked == [0, 0, 9]
    assert _content(watcher.state) == _content(after)


def test_an_older_reader_takes_the_parts_in_a_row_for_one_snapshot() -> None:
    truth = ControlState()
    truth.apply(_delta(7, {("keys", str(number)): 1 for number in range(5001)}))
    reader = ControlState()
    assert reader.apply(_snapshot(truth))
    assert _content(reader) == _content(truth)
    assert not ControlState().apply(_parts(truth)[0]), "a part alone changes nothing"


async def test_there_is_a_state_when_the_server_says_that_it_is_the_newest() -> None:
    watcher = _watcher(None)
    await watcher._receive(wire.WatchResponse(version=0, is_heartbeat=True))
    assert watcher.is_connected
    assert math.isinf(watcher.age_s())
    assert not await watcher.wait_synced(0.0)
    await watcher._receive(wire.WatchResponse(version=9, is_snapshot=True))
    assert watcher.age_s() < 60
    assert not await watcher.wait_synced(0.0), "others may have seen more"
    await watcher._receive(_delta(10, {("tiers", "new"): 1}))
    await watcher._receive(wire.WatchResponse(version=10, is_heartbeat=True))
    assert await watcher.wait_synced(0.0)
    assert "new" in watcher.state.tiers


async def test_a_snapshot_is_taken_at_once_while_others_run_and_deltas_wait(monkeypatch) -> None:
    """Readers see what was before or what comes after, whole; preparation has seen all of it."""
    monkeypatch.setattr(watch, "_SLICE_S", 0.0)
    many, few = 50 * watch.STEP_OBJECTS, 20 * watch.STEP_OBJECTS

    def snapshot(version: int, ids: range) -> wire.WatchResponse:
        keys = [wire.ApiKey(id=str(number)) for number in ids]
        tenants = [wire.Tenant(id=str(number)) for number in ids]
        objects = wire.Objects(keys=keys, tenants=tenants)
        return wire.WatchResponse(version=version, is_snapshot=True, upserts=objects)

    first, second = snapshot(1, range(many)), snapshot(4, range(few))
    deltas = [_delta(version, {("keys", str(many + version)): 1}) for version in (2, 3, 5, 6)]
    told: list[tuple[int, int, int]] = []
    prepared: list[tuple[int, int, int]] = []

    def sizes(state: ControlState) -> tuple[int, int, int]:
        return state.version, len(state.keys), len(state.tenants)

    def prepare(coming: ControlState) -> Iterator[None]:
        prepared.append((len(told), *sizes(coming)[1:]))
        yield

    async def responses(_: object) -> AsyncIterator[wire.WatchResponse]:
        for response in (first, *deltas[:2], second, *deltas[2:]):
            yield response
        await asyncio.Event().wait()

    watcher = _watcher(None)
    watcher._responses = responses  # type: ignore[assignment,method-assign]
    watcher.before_snapshot(prepare)
    watcher.on_change(lambda _: told.append(sizes(watcher.state)))
    seen: dict[tuple[int, int, int], int] = {}
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        while len(told) < 6:
            now = sizes(watcher.state)
            seen[now] = seen.get(now, 0) + 1
            await asyncio.sleep(0)
        running.cancel()
    assert told == [
        *((1, many, many), (2, many + 1, many), (3, many + 2, many)),
        *((4, few, few), (5, few + 1, few), (6, few + 2, few)),
    ]
    assert prepared == [(0, many, many), (3, few, few)]
    assert seen.keys() <= {(0, 0, 0), *told}
    assert seen[0, 0, 0] >= 100, "others have a turn at every step"
    assert seen[3, many + 2, many] >= 40


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"sluice-snapshot-0" + data[17:],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: b"\x00" * len(data),
    ],
)
async def test_a_bad_file_is_ignored_with_a_log_line(tmp_path: Path, damage) -> None:
    file = tmp_path / "s"
    state = ControlState()
    state.apply(_delta(7, {("tenants", "t"): 1}))
    write_snapshot(state.serialized(), file)
    file.write_bytes(damage(file.read_bytes()))
    watcher = _watcher(file)
    with capture_logs() as lines:
        assert not watcher.load_from_disk()
    assert [line["event"] for line in lines] == ["control_snapshot_ignored"]
    assert (watcher.state.version, await watcher.wait_synced(0.0)) == (0, False)


async def test_no_file_and_an_unreadable_one(tmp_path: Path) -> None:
    assert not _watcher(None).load_from_disk()
    assert not _watcher(tmp_path / "none").load_from_disk()
    assert not _watcher(tmp_path).load_from_disk()  # a directory


def _watcher(file: Path | None) -> ControlWatcher:
    return ControlWatcher("127.0.0.1:1", wire.ROLE_GATEWAY, "g", "", file)
