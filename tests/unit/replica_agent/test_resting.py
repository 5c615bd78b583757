"""Tests that an engine sleeps only after routers are informed, and without sequences."""

from replica.agent.fleet import reported_state
from replica.agent.replica_state import (
    Action,
    Adopted,
    EngineGone,
    EnginePatience,
    EngineSpec,
    Event,
    LocalReplicaState,
    Probed,
    ProbeEngine,
    ProcessEnded,
    ReplicaPhase,
    ReplicaTick,
    Started,
    Wanted,
    decide,
)
from replica.agent.resting import Rested, RestEngine
from sluice.wire.control.v1 import control_pb2 as control

LIMITS = EnginePatience(start_s=10.0, probe_interval_s=1.0, probe_s=1.0)
SIM = EngineSpec("sim", "a" * 64)
READY = ((0.0, Wanted(SIM)), (0.1, Started(1, 42)), (2.0, Probed(1)))


def play(*steps: tuple[float, Event]) -> tuple[LocalReplicaState, list[Action]]:
    """Return the state after all steps, and the actions of the last step."""
    state, actions = LocalReplicaState(), []
    for now_s, event in steps:
        state, actions = decide(state, event, now_s, LIMITS)
    return state, actions


ASLEEP = (
    *READY,
    (3.0, Wanted(SIM, sleeps=True)),
    (6.0, ReplicaTick()),
    (6.1, Probed(1)),
    (6.2, Rested(1, is_asleep=True)),
)


def test_an_engine_is_asked_to_sleep_once_routers_know_and_it_holds_nothing() -> None:
    wished = (*READY, (3.0, Wanted(SIM, sleeps=True)))
    state, actions = play(*wished)
    assert state.rest.is_hidden
    assert actions == [ProbeEngine(1, LIMITS.probe_s)]
    busy = (*wished, (3.1, Probed(1, active=2)), (6.0, ReplicaTick()))
    assert play(*busy)[1] == [ProbeEngine(1, LIMITS.probe_s)]
    assert play(*busy, (6.1, Probed(1)))[1] == [RestEngine(1, is_asleep=True)]
    state, actions = play(*ASLEEP)
    assert (state.rest.is_asleep, state.phase, actions) == (True, ReplicaPhase.READY, [])


def test_a_replica_is_reported_as_sleeping_once_its_engine_has_released_its_memory() -> None:
    wished = (*READY, (3.0, Wanted(SIM, sleeps=True)), (6.0, ReplicaTick()), (6.1, Probed(1)))
    assert reported_state(play(*wished)[0]) == control.REPLICA_STATE_READY
    assert reported_state(play(*ASLEEP)[0]) == control.REPLICA_STATE_SLEEPING
    waking = (*ASLEEP, (9.0, Wanted(SIM)))
    assert reported_state(play(*waking)[0]) == control.REPLICA_STATE_SLEEPING
    assert reported_state(play(*waking, (9.5, Rested(1, False)))[0]) == control.REPLICA_STATE_READY


def test_a_sleeping_engine_is_woken_at_once() -> None:
    state, actions = play(*ASLEEP, (9.0, Wanted(SIM)))
    assert RestEngine(1, is_asleep=False) in actions
    assert state.rest.is_hidden
    state, _ = play(*ASLEEP, (9.0, Wanted(SIM)), (9.5, Rested(1, is_asleep=False)))
    assert not state.rest.is_hidden


def test_an_engine_that_has_no_memory_to_wake_is_asked_again() -> None:
    failed = Rested(1, is_asleep=True, problem="no memory")
    tried = (*ASLEEP, (9.0, Wanted(SIM)), (9.1, Probed(1)), (9.5, failed))
    assert play(*tried)[0].rest.problem == "no memory"
    assert RestEngine(1, is_asleep=False) in play(*tried, (10.6, ReplicaTick()))[1]


def test_an_engine_that_cannot_sleep_is_reported_as_ready_with_the_reason() -> None:
    refused = Rested(1, is_asleep=False, problem="cannot sleep", is_refused=True)
    wished = (*READY, (3.0, Wanted(SIM, sleeps=True)), (6.0, Probed(1)), (6.1, refused))
    state, _ = play(*wished)
    assert reported_state(state) == control.REPLICA_STATE_READY
    assert state.rest.problem == "cannot sleep"
    assert not any(isinstance(it, RestEngine) for it in play(*wished, (20.0, Probed(1)))[1])


def test_an_adopted_sleeper_stays_one_until_something_else_is_wished() -> None:
    found = Adopted(3, 42, SIM, was_ready=True, age_s=9.0, is_asleep=True)
    state, actions = play((0.0, found), (0.1, Probed(3)))
    assert state.rest.is_asleep
    assert not any(isinstance(it, RestEngine) for it in actions)
    assert (
        RestEngine(3, is_asleep=False)
        in play((0.0, found), (0.1, Probed(3)), (1.0, Wanted(SIM)))[1]
    )


def test_an_engine_that_replaces_a_sleeper_begins_awake() -> None:
    state, _ = play(*ASLEEP, (7.0, ProcessEnded(1, "killed")), (7.1, EngineGone(1)))
    assert (state.rest.is_asleep, state.rest.sleeps) == (False, True)
