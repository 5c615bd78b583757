import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.drivers.options import OptionsError
from replica.drivers.sim import load_sim
from replica.drivers.sim_faults import EngineFault, FaultFile, FaultKind, FaultPlan, parse_faults
from replica.engine.types import Finish, SequenceRequest

FREE = {"cost_step_s": 1.0, "cost_decode_row_s": 0, "cost_prefill_token_s": 0}


class DiedError(Exception):
    """Replaces the end of the process."""


def die() -> None:
    raise DiedError


@pytest.fixture
def make(clock):
    def make_engine(*faults: dict, **options):
        options = {**FREE, "cost_context_token_s": 0, "faults": json.dumps(faults), **options}
        return load_sim(None, "base", options, clock=clock, sleep=clock.sleep, die=die)

    return make_engine


def steps_of(engine, clock, *, output: int = 10) -> list[float]:
    """Run one sequence, and return the duration of each step."""
    engine.add(SequenceRequest(1, [5], output))
    taken = []
    while engine.has_work:
        began_s = clock.now_s
        engine.step()
        taken.append(clock.now_s - began_s)
    return taken


def test_a_stall_is_one_long_step(make, clock) -> None:
    taken = steps_of(make({"kind": "stall", "at_step": 3, "amount": 7}), clock)
    assert taken == [1.0] * 3 + [8.0] + [1.0] * 6


def test_slowness_lasts_as_long_as_it_was_told_to(make, clock) -> None:
    taken = steps_of(make({"kind": "slow", "at_s": 3, "amount": 5, "for_s": 7}), clock)
    assert taken == [1.0] * 3 + [5.0] * 2 + [1.0] * 5
    assert steps_of(make({"kind": "slow", "amount": 2}), clock) == [2.0] * 10


def test_failed_steps_end_the_sequences_in_them_and_no_others(make) -> None:
    engine = make({"kind": "fail", "at_step": 2, "amount": 2})

    def ended() -> dict[int, Finish]:
        return {event.key: event.reason for event in engine.step().finished}

    engine.add(SequenceRequest(1, [5], 2))
    engine.add(SequenceRequest(2, [6], 5))
    assert ended() == {}
    assert ended() == {1: Finish.LENGTH}
    assert ended() == {2: Finish.FAILED}
    engine.add(SequenceRequest(3, [5], 5))
    assert ended() == {3: Finish.FAILED}
    engine.add(SequenceRequest(4, [5], 2))
    assert ended() == {}
    assert ended() == {4: Finish.LENGTH}


def test_a_corrupt_token_is_one_wrong_token_that_the_rest_builds_upon(make) -> None:
    def tokens(*faults: dict) -> list[int]:
        engine = make(*faults)
        engine.add(SequenceRequest(1, [5], 10))
        found = []
        while engine.has_work:
            found += engine.step().tokens
        return found

    right, wrong = tokens(), tokens({"kind": "corrupt", "at_step": 4})
    assert right[:4] == wrong[:4]
    assert right[4] != wrong[4]
    assert right[5:] != wrong[5:]


def test_death_is_death(make, clock) -> None:
    engine = make({"kind": "die", "at_s": 2.5})
    with pytest.raises(DiedError):
        steps_of(engine, clock)
    assert clock.now_s == 103.0


def test_a_file_commands_faults_while_the_engine_runs(make, clock, tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    engine = make(faults_file=str(path))
    assert steps_of(engine, clock, output=2) == [1.0] * 2
    path.write_text('[{"kind": "stall", "amount": 2}, {"kind": "stall", "at_step": 2}]')
    assert steps_of(engine, clock, output=4) == [3.0, 1.0, 2.0, 1.0]
    # every fault of the plan has been applied
    assert steps_of(engine, clock, output=2) == [1.0] * 2
    path.write_text('[{"kind": "stall", "amount"')
    assert steps_of(engine, clock, output=2) == [1.0] * 2  # a mistake in the file has no effect
    path.write_text('[{"kind": "slow", "amount": 2}]')
    assert steps_of(engine, clock, output=2) == [2.0] * 2
    path.unlink()
    assert steps_of(engine, clock, output=2) == [1.0] * 2


def test_a_file_is_read_once_per_change(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    file = FaultFile(path)
    assert file.read() is None
    path.write_text('[{"kind": "die"}]')
    assert file.read() == [EngineFault(FaultKind.DIE)]
    assert file.read() is None
    os.utime(path, ns=(1, 1))
    assert file.read() == [EngineFault(FaultKind.DIE)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "a JSON array"),
        ("[7]", "7 is not a fault; its fields are amount, at_s, at_step, for_s, kind"),
        ('[{"kind": "explode"}]', "'explode' is no kind of fault; known are stall, slow, die"),
        ('[{"kind": "die", "at_s": "soon"}]', "at_s of the fault die is 'soon'; a number"),
        ('[{"kind": "die", "when": 1}]', "is not a fault"),
        ('[{"kind": "stall", "at_s": -1}]', "must not be negative"),
        ('[{"kind": "slow", "amount": 0}]', "slow: above 0"),
    ],
)
def test_plans_that_cannot_be_meant_are_refused(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_faults(text)
    with pytest.raises(OptionsError, match="engine option faults: "):
        load_sim(None, "base", {"faults": text})


@given(
    st.lists(
        st.builds(EngineFault, st.sampled_from(FaultKind), st.integers(0, 20), st.integers(0, 20))
    ),
    st.integers(0, 5),
)
def test_every_fault_is_taken_once_and_not_before_its_time(faults, first_step) -> None:
    plan = FaultPlan(faults, 100.0, first_step)
    taken = []
    for step in range(first_step, first_step + 42):
        now_s = 100.0 + (step - first_step) * 0.5
        for fault in plan.take(now_s, step):
            assert fault.at_s <= now_s - 100.0
            assert fault.at_step <= step - first_step
            taken.append(fault)
    assert sorted(map(repr, taken)) == sorted(map(repr, faults))
