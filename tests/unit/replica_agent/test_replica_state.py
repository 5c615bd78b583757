"""Tests that a replica never has two engines, and restarts within the back-off."""

from dataclasses import dataclass, replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

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
    StartEngine,
    StopEngine,
    Wanted,
    decide,
    wake_at,
)

LIMITS = EnginePatience(start_s=10.0, probe_interval_s=1.0, probe_s=1.0)
SIM = EngineSpec("sim", "a" * 64)
OTHER = EngineSpec("sim", "b" * 64)


def play(*steps: tuple[float, Event]) -> tuple[LocalReplicaState, list[Action]]:
    """Return the state after all steps, and the actions of the last step."""
    state, actions = LocalReplicaState(), []
    for now_s, event in steps:
        state, actions = decide(state, event, now_s, LIMITS)
    return state, actions


READY = ((0.0, Wanted(SIM)), (0.1, Started(1, 42)), (2.0, Probed(1)))


def test_a_wish_starts_an_engine_and_a_canary_makes_it_ready() -> None:
    assert play((0.0, Wanted(SIM)))[1] == [StartEngine(1, SIM)]
    state, actions = play((0.0, Wanted(SIM)), (0.1, Started(1, 42)))
    assert actions == [ProbeEngine(1, LIMITS.start_probe_s)]
    assert (state.phase, state.pid) == (ReplicaPhase.STARTING, 42)
    state, actions = play(*READY)
    assert (state.phase, state.message, actions) == (ReplicaPhase.READY, "", [])
    assert wake_at(state, LIMITS) == 2.0 + LIMITS.probe_interval_s


def test_canaries_that_fail_while_starting_are_repeated_until_time_is_up() -> None:
    begin = ((0.0, Wanted(SIM)), (0.1, Started(1, 42)), (0.2, Probed(1, "refused")))
    state, actions = play(*begin)
    assert (state.phase, actions) == (ReplicaPhase.STARTING, [])
    assert play(*begin, (0.4, ReplicaTick()))[1] == [ProbeEngine(1, LIMITS.start_probe_s)]
    state, actions = play(*begin, (10.0, ReplicaTick()))
    assert actions == [StopEngine(1, is_kill=True)]
    assert state.message == "not ready after 10 s; last canary: refused"


def test_two_missed_probes_kill_and_restart() -> None:
    missed = (*READY, (3.0, ReplicaTick()), (4.0, Probed(1, "silent")))
    state, actions = play(*missed)
    assert (state.phase, actions) == (ReplicaPhase.READY, [])
    dead = (*missed, (4.05, ReplicaTick()), (5.05, Probed(1, "silent")))
    state, actions = play(*dead)
    assert (state.phase, actions) == (ReplicaPhase.STOPPING, [StopEngine(1, is_kill=True)])
    state, actions = play(*dead, (5.2, EngineGone(1)))
    assert (state.phase, state.restarts, actions) == (ReplicaPhase.WAITING, 1, [])
    assert play(*dead, (5.2, EngineGone(1)), (5.3, ReplicaTick()))[1] == [StartEngine(2, SIM)]


def missed_since(begin_s: float, **work: float) -> list[tuple[float, Event]]:
    """Canaries of a starting engine that fail for a minute, at the runner's interval."""
    count = round(60.0 / LIMITS.start_poll_s)
    return [(begin_s + i * LIMITS.start_poll_s, Probed(1, "refused", **work)) for i in range(count)]


def kills_after_s(*steps: tuple[float, Event]) -> float | None:
    """Return the time when the first engine is killed, or None if none is."""
    state = LocalReplicaState()
    for now_s, event in steps:
        state, actions = decide(state, event, now_s, PATIENT)
        if any(isinstance(action, StopEngine) for action in actions):
            return now_s
    return None


PATIENT = EnginePatience(start_s=1000.0, start_stall_s=8.0)
BEGIN = ((0.0, Wanted(SIM)), (0.1, Started(1, 42)))


def test_a_starting_engine_that_does_nothing_is_frozen() -> None:
    killed_at_s = kills_after_s(*BEGIN, *missed_since(0.2))
    assert killed_at_s is not None
    assert 8.0 <= killed_at_s <= 8.5


def test_a_starting_engine_that_works_now_and_then_is_not_frozen() -> None:
    idle = missed_since(0.2)
    working = [
        (at_s, Probed(1, "refused", busy=1.0)) if i % 8 == 0 else (at_s, event)
        for i, (at_s, event) in enumerate(idle)
    ]
    assert kills_after_s(*BEGIN, *working) is None
    rarely = [
        (at_s, Probed(1, "refused", busy=1.0)) if i % 30 == 0 else (at_s, event)
        for i, (at_s, event) in enumerate(idle)
    ]
    killed_at_s = kills_after_s(*BEGIN, *rarely)
    assert killed_at_s is not None, "heartbeats of a server whose stub is frozen are no work"


def test_an_engine_that_worked_and_then_froze_while_starting_is_noticed_as_soon() -> None:
    killed_at_s = kills_after_s(*BEGIN, *missed_since(0.2, busy=1.0), *missed_since(60.2))
    assert killed_at_s is not None
    assert 68.0 <= killed_at_s <= 68.5


def test_a_standstill_of_ours_is_not_taken_for_one_of_a_starting_engine() -> None:
    stalled = ((0.2, Probed(1, "refused")), (30.0, Probed(1, "refused")))
    assert kills_after_s(*BEGIN, *stalled) is None


FOUND = Adopted(7, 42, SIM, was_ready=True, age_s=500.0, restarts=3)


def test_an_adopted_engine_is_asked_at_once_and_kept_when_it_answers() -> None:
    state, actions = play((100.0, FOUND))
    assert actions == [ProbeEngine(7, LIMITS.probe_s)]
    assert (state.phase, state.wanted, state.pid) == (ReplicaPhase.ADOPTING, SIM, 42)
    state, actions = play((100.0, FOUND), (100.1, Wanted(SIM)), (100.2, Probed(7)))
    assert (state.phase, state.run, state.restarts, actions) == (ReplicaPhase.READY, 7, 3, [])


def test_an_adopted_engine_that_is_silent_is_replaced_as_soon_as_a_ready_one() -> None:
    silent = ((100.0, FOUND), (100.5, Probed(7, "silent")), (101.1, Probed(7, "silent")))
    state, actions = play(*silent)
    assert (state.phase, actions) == (ReplicaPhase.STOPPING, [StopEngine(7, is_kill=True)])
    state, actions = play(*silent, (101.2, EngineGone(7)), (101.4, ReplicaTick()))
    assert (state.restarts, actions) == (4, [StartEngine(8, SIM)])


def test_an_adopted_engine_of_another_spec_is_replaced_in_order() -> None:
    state, actions = play((100.0, FOUND), (100.1, Wanted(OTHER)))
    assert (state.phase, actions) == (ReplicaPhase.STOPPING, [StopEngine(7, is_kill=False)])
    _, actions = play((100.0, FOUND), (100.1, Wanted(OTHER)), (100.2, EngineGone(7)))
    assert actions == [StartEngine(8, OTHER)]


def test_a_draining_engine_goes_on_draining_when_it_is_adopted() -> None:
    draining = (
        (100.0, FOUND),
        (100.1, Wanted(SIM, is_draining=True)),
        (100.2, Probed(7, active=1)),
    )
    state, actions = play(*draining)
    assert (state.phase, actions) == (ReplicaPhase.READY, [])
    _, actions = play(*draining, (103.0, Probed(7, active=0)))
    assert actions == [StopEngine(7, is_kill=False)]


def test_an_engine_that_was_adopted_while_it_starts_has_the_rest_of_its_time() -> None:
    young = replace(FOUND, was_ready=False, age_s=4.0)
    state, _ = play((100.0, young))
    assert (state.phase, state.phase_at_s) == (ReplicaPhase.STARTING, 96.0)
    _, actions = play((100.0, young), (106.0, ReplicaTick()))
    assert actions == [StopEngine(7, is_kill=True)]


def test_nothing_is_adopted_later() -> None:
    before, _ = play(*READY)
    state, actions = decide(before, replace(FOUND, run=2), 2.1, LIMITS)
    assert (state, actions) == (before, [])


def test_a_good_probe_forgives_a_missed_one() -> None:
    state, _ = play(*READY, (4.0, Probed(1, "silent")), (4.1, Probed(1)))
    assert (state.misses, state.phase) == (0, ReplicaPhase.READY)


def test_our_own_stall_is_not_the_engines_fault() -> None:
    late = [(10.0 + i, Probed(1, "late", stalled_s=0.4)) for i in range(LIMITS.busy_misses_max)]
    state, actions = play(*READY, *late[:-1])
    assert (state.phase, actions) == (ReplicaPhase.READY, [])
    assert play(*READY, *late)[1] == [StopEngine(1, is_kill=True)], "but not for ever"
    missed = (*READY, *late[:3], (20.0, Probed(1, "silent")), (21.0, Probed(1, "silent")))
    assert play(*missed[:-1])[1] == []
    assert play(*missed)[1] == [StopEngine(1, is_kill=True)]


def test_a_busy_engine_gets_more_patience_but_not_endless() -> None:
    busy = [(3.0 + i, Probed(1, "silent", busy=0.9)) for i in range(LIMITS.busy_misses_max)]
    state, actions = play(*READY, *busy[:-1])
    assert (state.phase, actions) == (ReplicaPhase.READY, [])
    _, actions = play(*READY, *busy)
    assert actions == [StopEngine(1, is_kill=True)]
    frozen_since = (*READY, *busy[:3], (7.0, Probed(1, "silent", busy=0.01)))
    assert play(*frozen_since)[1] == [StopEngine(1, is_kill=True)]


def test_being_busy_does_not_excuse_a_wrong_answer() -> None:
    wrong = [(3.0 + i, Probed(1, "no frame", busy=0.9, is_wrong=True)) for i in range(2)]
    state, actions = play(*READY, wrong[0])
    assert (state.phase, actions) == (ReplicaPhase.READY, [])
    state, actions = play(*READY, *wrong)
    assert actions == [StopEngine(1, is_kill=True)]
    assert state.message == "answers wrongly: no frame"
    between = (*READY, wrong[0], (3.5, Probed(1)), wrong[1])
    assert play(*between)[1] == [], "one that is right again is asked again"


def test_an_engine_that_ends_is_cleaned_up_before_the_next_start() -> None:
    state, actions = play(*READY, (3.0, ProcessEnded(1, "signal 9")))
    assert actions == [StopEngine(1, is_kill=True)]
    assert (state.phase, state.message) == (ReplicaPhase.STOPPING, "signal 9")


def test_no_longer_wanted_is_asked_to_stop_and_then_finished() -> None:
    state, actions = play(*READY, (3.0, Wanted(None)))
    assert actions == [StopEngine(1, is_kill=False)]
    assert not state.is_finished
    state, actions = play(*READY, (3.0, Wanted(None)), (5.0, EngineGone(1)))
    assert (state.is_finished, actions) == (True, [])


def test_another_spec_replaces_the_engine_without_back_off() -> None:
    _, actions = play(*READY, (3.0, Wanted(OTHER)))
    assert actions == [StopEngine(1, is_kill=False)]
    _, actions = play(*READY, (3.0, Wanted(OTHER)), (5.0, EngineGone(1)))
    assert actions == [StartEngine(2, OTHER)]


def test_a_draining_replica_is_probed_and_not_restarted() -> None:
    drain = (*READY, (2.5, Wanted(SIM, is_draining=True)))
    state, actions = play(*drain)
    assert (state.phase, actions) == (ReplicaPhase.READY, [])
    assert play(*drain, (3.0, ReplicaTick()))[1] == [ProbeEngine(1, LIMITS.probe_s)]
    ended = (*drain, (3.0, ProcessEnded(1, "signal 9")), (3.1, EngineGone(1)), (9.0, ReplicaTick()))
    state, actions = play(*ended)
    assert (state.phase, actions) == (ReplicaPhase.IDLE, [])
    assert play(*ended, (9.5, Wanted(SIM)))[1] == [StartEngine(2, SIM)]


DRAINING = (*READY, (2.5, Wanted(SIM, is_draining=True)))


def test_a_drained_engine_is_stopped_once_routers_must_have_heard_of_it() -> None:
    _, actions = play(*DRAINING, (3.0, Probed(1, active=0)))
    assert actions == [], "a router may still be about to send something"
    _, actions = play(*DRAINING, (5.0, Probed(1, active=1)))
    assert actions == [], "it still works"
    _, actions = play(*DRAINING, (5.0, Probed(1, active=0)))
    assert actions == [StopEngine(1, is_kill=False)]


def test_a_drain_does_not_last_for_ever() -> None:
    end_s = 2.5 + LIMITS.drain_s
    assert play(*DRAINING, (end_s - 1, Probed(1, active=1)))[1] == []
    state, actions = play(*DRAINING, (end_s, Probed(1, active=1)), (end_s + 1, EngineGone(1)))
    assert (state.phase, actions) == (ReplicaPhase.IDLE, [])


def test_an_engine_that_starts_to_drain_before_it_is_ready_is_stopped() -> None:
    _, actions = play(*READY[:2], (1.0, Wanted(SIM, is_draining=True)))
    assert actions == [StopEngine(1, is_kill=False)]


def test_a_drain_that_is_taken_back_leaves_the_engine_alone() -> None:
    state, actions = play(*DRAINING, (3.0, Wanted(SIM)), (9.0, Probed(1, active=0)))
    assert (state.phase, actions) == (ReplicaPhase.READY, [])


def test_health_resets_the_back_off() -> None:
    tired = replace(play(*READY)[0], failures=6)
    state, _ = decide(tired, ProcessEnded(1, "x"), 3.0, LIMITS)
    state, _ = decide(state, EngineGone(1), 3.0, LIMITS)
    assert state.retry_at_s == 3.0 + LIMITS.backoff_first_s * 2**6
    state, _ = decide(tired, ProcessEnded(1, "x"), 2.0 + LIMITS.healthy_s, LIMITS)
    state, _ = decide(state, EngineGone(1), 40.0, LIMITS)
    assert state.retry_at_s == 40.0 + LIMITS.backoff_first_s


@given(st.integers(0, 10_000))
def test_back_off_is_bounded_however_often_it_fails(failures: int) -> None:
    state = replace(play((0.0, Wanted(SIM)))[0], failures=failures)
    state, _ = decide(state, ProcessEnded(1, "x"), 1.0, LIMITS)
    state, _ = decide(state, EngineGone(1), 1.0, LIMITS)
    assert 0 < state.retry_at_s - 1.0 <= LIMITS.backoff_max_s


@dataclass
class Engine:
    """An engine process from StartEngine to EngineGone, as the runner knows it."""

    spec: EngineSpec
    is_stopping: bool = False
    is_dead: bool = False


class AgentMachine(RuleBasedStateMachine):
    """The runner with every possible order of events, including late and repeated events."""

    def __init__(self) -> None:
        super().__init__()
        self.state = LocalReplicaState()
        self.now_s = 0.0
        self.engines: dict[int, Engine] = {}
        self.probes: list[int] = []

    @initialize(
        found=st.none()
        | st.builds(
            Adopted,
            run=st.integers(1, 5),
            pid=st.just(42),
            spec=st.sampled_from([SIM, OTHER]),
            was_ready=st.booleans(),
            age_s=st.floats(0, 40),
        )
    )
    def begin(self, found: Adopted | None) -> None:
        if found is not None:
            self.engines[found.run] = Engine(found.spec)
            self.feed(found)

    def feed(self, event: Event) -> None:
        before = self.state
        self.state, actions = decide(self.state, event, self.now_s, LIMITS)
        for action in actions:
            match action:
                case StartEngine(run, spec):
                    assert not self.engines, "two engines of one replica"
                    assert run > before.run
                    assert spec == self.state.wanted
                    self.engines[run] = Engine(spec)
                case StopEngine(run):
                    assert not self.engines[run].is_stopping
                    self.engines[run].is_stopping = True
                case ProbeEngine(run):
                    assert run not in self.probes, "two probes of one engine at once"
                    self.probes.append(run)

    @rule(
        spec=st.sampled_from([None, SIM, OTHER]),
        is_draining=st.booleans(),
    )
    def wish(self, spec: EngineSpec | None, is_draining: bool) -> None:
        self.feed(Wanted(spec, is_draining))

    @rule(step_s=st.floats(0, 40))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        self.feed(ReplicaTick())

    @precondition(lambda self: self.engines)
    @rule()
    def process_runs(self) -> None:
        self.feed(Started(max(self.engines), 42))

    @precondition(lambda self: self.engines)
    @rule()
    def process_ends(self) -> None:
        run = max(self.engines)
        self.engines[run].is_dead = True
        self.feed(ProcessEnded(run, "signal 9"))

    @precondition(lambda self: self.probes)
    @rule(
        problem=st.sampled_from(["", "silent"]),
        active=st.integers(0, 1),
        busy=st.floats(0, 2),
        stalled_s=st.floats(0, 1),
        is_wrong=st.booleans(),
    )
    def probe_ends(
        self, problem: str, active: int, busy: float, stalled_s: float, is_wrong: bool
    ) -> None:
        run = self.probes.pop(0)
        self.feed(Probed(run, problem, active, busy, stalled_s, is_wrong and bool(problem)))

    @precondition(lambda self: any(engine.is_stopping for engine in self.engines.values()))
    @rule()
    def engine_is_gone(self) -> None:
        run = max(self.engines)
        del self.engines[run]
        self.feed(EngineGone(run))

    @rule(
        run=st.integers(0, 3),
        kind=st.sampled_from([Adopted, Started, ProcessEnded, EngineGone, Probed]),
    )
    def late_event(self, run: int, kind: type) -> None:
        if run < self.state.run and run not in self.probes:
            late = {
                Adopted: Adopted(run, 7, OTHER, was_ready=True, age_s=1.0),
                Started: Started(run, 7),
                ProcessEnded: ProcessEnded(run, "late"),
                EngineGone: EngineGone(run),
                Probed: Probed(run, "late"),
            }[kind]
            before = self.state
            self.feed(late)
            assert self.state.phase is before.phase or self.state.run > before.run

    @invariant()
    def engine_exists_exactly_in_the_phases_that_have_one(self) -> None:
        has_process = self.state.phase not in (ReplicaPhase.IDLE, ReplicaPhase.WAITING)
        assert bool(self.engines) == has_process
        if self.state.phase is ReplicaPhase.STOPPING:
            assert self.engines[self.state.run].is_stopping

    @invariant()
    def back_off_is_bounded(self) -> None:
        if self.state.phase is ReplicaPhase.WAITING:
            assert self.state.retry_at_s <= self.now_s + LIMITS.backoff_max_s

    @invariant()
    def it_never_sleeps_for_ever_while_somebody_waits_for_it(self) -> None:
        if self.state.phase in (ReplicaPhase.STARTING, ReplicaPhase.WAITING):
            assert wake_at(self.state, LIMITS) < inf
        if self.state.phase in (ReplicaPhase.ADOPTING, ReplicaPhase.READY):
            assert wake_at(self.state, LIMITS) < inf or self.state.run in self.probes

    def teardown(self) -> None:
        """If no fault remains, a desired replica becomes ready within a bounded time."""
        self.feed(Wanted(SIM))
        deadline_s = self.now_s + LIMITS.start_s + LIMITS.backoff_max_s + 1.0
        while self.state.phase is not ReplicaPhase.READY or self.state.running != SIM:
            assert self.now_s < deadline_s, self.state
            self._world_answers()
        assert list(self.engines) == [self.state.run]

    def _world_answers(self) -> None:
        run = self.state.run
        engine = self.engines.get(run)
        if engine is not None and engine.is_stopping:
            self.engine_is_gone()
        elif engine is not None and not self.state.pid:
            self.feed(Started(run, 42))
        elif self.probes:
            self.feed(Probed(self.probes.pop(0)))
        else:
            self.now_s = max(self.now_s, min(wake_at(self.state, LIMITS), self.now_s + 50))
            self.feed(ReplicaTick())


AgentMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestAgentMachine = AgentMachine.TestCase
