"""Tests that a broken accelerator has one cordon until an operator lifts it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.agent.hardware import (
    CORDON_XIDS,
    GpuReading,
    HardwareState,
    Readings,
    Xid,
    judge,
    lift,
)
from replica.agent.hardware_watch import CordonFile

A = GpuReading(0, "GPU-a", "H100", memory_bytes=80 << 30)
B = GpuReading(1, "GPU-b", "H100", memory_bytes=80 << 30)


def after(*readings: Readings, state: HardwareState | None = None) -> HardwareState:
    state = state or HardwareState()
    for now_s, reading in enumerate(readings):
        state = judge(state, reading, 1000.0 + now_s)
    return state


def reasons(state: HardwareState) -> dict[str, str]:
    return {uuid: cordon.reason for uuid, cordon in state.cordons.items()}


def test_healthy_accelerators_serve() -> None:
    harmless = (Xid("GPU-a", 13), Xid("GPU-a", 43), Xid("GPU-b", 63), Xid("GPU-b", 92))
    state = after(Readings((A, B)), Readings((A, B), harmless))
    assert (state.cordons, [gpu.uuid for gpu in state.gpus]) == ({}, ["GPU-a", "GPU-b"])
    assert state.cordon_of(()) is None


@pytest.mark.parametrize("number", CORDON_XIDS)
def test_a_grave_xid_cordons_its_gpu_alone(number: int) -> None:
    state = after(Readings((A, B), (Xid("GPU-b", number),)))
    assert list(state.cordons) == ["GPU-b"]
    assert reasons(state)["GPU-b"].startswith(f"XID {number}: ")
    assert state.cordon_of([1]) == state.cordon_of(()) == state.cordons["GPU-b"]
    assert state.cordon_of([0]) is None


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (replace(A, ecc_uncorrected=2), "2 uncorrected ECC errors"),
        (replace(A, has_remap_failure=True), "could not be replaced"),
        (replace(A, is_lost=True), "cannot reach it"),
    ],
)
def test_a_gpu_that_reports_an_error_is_cordoned(broken: GpuReading, words: str) -> None:
    assert words in reasons(after(Readings((broken, B))))["GPU-a"]
    assert list(after(Readings((broken, B))).cordons) == ["GPU-a"]


def test_an_error_of_a_gpu_that_cannot_be_named_cordons_all() -> None:
    assert set(after(Readings((A, B), (Xid("", 79),))).cordons) == {"GPU-a", "GPU-b"}


def test_a_gpu_that_vanishes_is_cordoned_and_remembered() -> None:
    state = after(Readings((A, B)), Readings((A,)))
    assert list(state.cordons) == ["GPU-b"]
    assert [gpu.is_lost for gpu in state.gpus] == [False, True]


def test_the_first_reason_stays() -> None:
    state = after(Readings((A,), (Xid("GPU-a", 79),)), Readings((replace(A, is_lost=True),)))
    assert reasons(state) == {"GPU-a": "XID 79: the GPU has fallen off the bus"}
    assert state.cordons["GPU-a"].since_unix_s == 1000.0


def test_a_lifted_cordon_comes_back_only_for_something_new() -> None:
    worn = replace(A, ecc_uncorrected=2)
    state = after(Readings((worn,)))
    (cordon,) = state.cordons.values()
    assert lift(state, ["GPU-a@1.000"]) == state, "of an earlier cordon"
    state = lift(state, [cordon.id])
    assert after(Readings((worn,)), state=state).cordons == {}
    assert reasons(after(Readings((replace(A, ecc_uncorrected=3),)), state=state))
    assert reasons(after(Readings((worn,), (Xid("GPU-a", 48),)), state=state))


GPUS = st.builds(
    replace,
    st.sampled_from([A, B]),
    ecc_uncorrected=st.integers(0, 2),
    has_remap_failure=st.booleans(),
    is_lost=st.booleans(),
)
READINGS = st.builds(
    Readings,
    st.lists(GPUS, max_size=2, unique_by=lambda gpu: gpu.uuid).map(tuple),
    st.lists(
        st.builds(Xid, st.sampled_from(["", "GPU-a", "GPU-b"]), st.sampled_from([13, 48, 79])),
        max_size=2,
    ).map(tuple),
)


@given(st.lists(READINGS, max_size=8), READINGS)
def test_only_a_lift_ends_a_cordon_and_a_lift_holds(past: list[Readings], last: Readings) -> None:
    before = after(*past)
    state = judge(before, last, 2000.0)
    assert before.cordons.items() <= state.cordons.items()
    assert {gpu.uuid for gpu in before.gpus} <= {gpu.uuid for gpu in state.gpus}
    lifted = lift(state, [cordon.id for cordon in state.cordons.values()])
    assert lifted.cordons == {}
    assert judge(lifted, replace(last, xids=()), 2001.0).cordons == {}


def test_cordons_survive_on_disk_and_removing_the_file_lifts_them(tmp_path: Path) -> None:
    file = CordonFile(tmp_path)
    assert file.load() == HardwareState()
    state = after(Readings((replace(A, ecc_uncorrected=2), B), (Xid("GPU-b", 79),)))
    state = lift(state, [state.cordons["GPU-a"].id])
    file.save(state)
    assert (file.load().cordons, file.load().accepted) == (state.cordons, state.accepted)
    assert file.remove() == ["XID 79: the GPU has fallen off the bus"]
    assert file.remove() == []
    for content in ("", "{}", '{"cordons": [{"uuid": 1}], "accepted": []}'):
        file.path.write_text(content)
        assert file.load() == HardwareState()
    CordonFile(tmp_path / "missing").save(state)
