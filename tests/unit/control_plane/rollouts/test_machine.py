"""The life of a rollout, case by case; what holds in every life is in test_machine_invariants.py."""

from dataclasses import replace

import pytest

from control_plane.rollouts.evidence import Arm, Histogram, Metric, Window
from control_plane.rollouts.machine import STEP_GAP_MAX_MS, Step, due, step
from control_plane.rollouts.plan import Gate, Plan, Stage
from control_plane.rollouts.state import (
    ENDED,
    EVENT,
    STATE,
    Abort,
    Event,
    Evidence,
    FinishRollout,
    Gone,
    NotReady,
    Pause,
    Phase,
    Prepare,
    Promote,
    Ready,
    Reason,
    Restarted,
    Resume,
    RollBack,
    Rollout,
    SentBack,
    SetShare,
    Start,
    Tick,
    explain,
)
from sluice.buckets import BUCKETS
from sluice.errors import ErrorCode, PlatformError

WINDOW_MS = 10_000
PLAN = Plan(
    stages=(
        Stage(share=100, duration_min_s=60.0, sample_min=50, duration_max_s=300.0),
        Stage(share=5_000, duration_min_s=60.0),
        Stage(share=10_000, duration_min_s=30.0),
    ),
    gates=(
        Gate(metric=Metric.ERRORS, tolerated=0.01),
        Gate(metric=Metric.SLOW_FIRST_TOKEN, tolerated=0.05),
    ),
    ready_max_s=100.0,
    quiet_max_s=120.0,
    pause_max_s=1_000.0,
)
SHADOWED = PLAN.model_copy(
    update={"stages": (Stage(share=500, duration_min_s=30.0, is_shadow=True), *PLAN.stages)}
)


def arm(requests: int, *, bad: int = 0, ttft_bucket: int = 30) -> Arm:
    counts = [0] * BUCKETS
    counts[ttft_bucket] = requests - bad
    return Arm(requests, {ErrorCode.ENGINE_FAILED: bad}, ttft_ms=Histogram(tuple(counts)))


class Life:
    """A rollout with its clock; every step goes through JSON."""

    def __init__(self, plan: Plan = PLAN, *, is_ready_at_once: bool = True) -> None:
        self.rollout = Rollout(plan)
        self.now_ms = 1_700_000_000_000
        self.actions: tuple[object, ...] = ()
        self.is_ready_at_once = is_ready_at_once

    def tell(self, event: Event) -> "Life":
        stored = STATE.validate_json(STATE.dump_json(self.rollout))
        assert stored == self.rollout
        told = EVENT.validate_json(EVENT.dump_json(event))
        assert told == event
        result: Step = step(stored, told, self.now_ms)
        self.rollout, self.actions = result.rollout, result.actions
        for action in result.actions:
            if isinstance(action, Prepare) and self.is_ready_at_once:
                self.tell(Ready(action.stage))
        return self

    def window(self, canary: Arm | None = None, control: Arm | None = None) -> "Life":
        start_ms = self.now_ms
        self.now_ms += WINDOW_MS
        arms = (arm(20) if canary is None else canary, arm(100) if control is None else control)
        return self.tell(Evidence((Window(start_ms, self.now_ms, *arms),)))

    def windows(self, count: int) -> "Life":
        for _ in range(count):
            self.window()
        return self

    def ticks(self, seconds: float) -> "Life":
        for _ in range(round(seconds / 10)):
            self.now_ms += 10_000
            self.tell(Tick())
        return self

    @property
    def standing(self) -> tuple[Phase, int, int]:
        return self.rollout.phase, self.rollout.stage, self.rollout.share


def running(plan: Plan = PLAN) -> Life:
    """A rollout in its first stage, with control well known."""
    return Life(plan).windows(5).tell(Start())


def refused(life: Life, event: Event) -> None:
    before = life.rollout
    with pytest.raises(PlatformError) as error:
        life.tell(event)
    assert error.value.code is ErrorCode.CONFLICT
    assert life.rollout is before


def test_a_good_release_is_promoted_without_a_person():
    life = running()
    assert life.standing == (Phase.RUNNING, 0, 100)
    shares = [life.windows(1).rollout.share for _ in range(16)]
    assert shares == [100] * 5 + [5_000] * 6 + [10_000] * 5
    assert life.rollout.phase is Phase.DONE
    assert life.rollout.reason is None


def test_the_actions_of_a_good_life():
    life = Life(is_ready_at_once=False).tell(Start())
    assert life.actions == (SetShare(0, 0), Prepare(0, 100))
    life.tell(Ready(0))
    assert life.actions == (SetShare(100, 0),)
    assert life.tell(Tick()).actions == ()
    life.windows(6)
    assert life.actions == (SetShare(100, 0), Prepare(1, 5_000))
    life.tell(Ready(1)).windows(6).tell(Ready(2))
    assert life.actions == (SetShare(10_000, 0),)
    life.windows(3)
    assert life.actions == (SetShare(10_000, 0), FinishRollout())


def test_errors_send_everybody_back_in_the_step_that_sees_them():
    life = running()
    while life.rollout.phase is Phase.RUNNING:
        life.window(canary=arm(20, bad=4))
    assert life.standing == (Phase.HALTED, 0, 0)
    assert life.actions == (SetShare(0, 0), RollBack(Reason.WORSE))
    verdict = life.rollout.verdict
    assert verdict is not None
    assert (verdict.metric, verdict.stage, verdict.tolerated) == (Metric.ERRORS, 0, 0.01)
    assert verdict.log_e >= verdict.log_needed > 0
    assert (verdict.suspect.ratio, verdict.reference.ratio) == (0.2, 0)
    assert verdict.window_end_ms == life.now_ms
    counted = f"{verdict.suspect.bad} of {verdict.suspect.total} in canary (20.00%)"
    assert explain(verdict).startswith(f"errors in stage 0: {counted} against 0 of ")
    assert "tolerated 1.00% more; e-value 10^" in explain(verdict)
    assert life.tell(SentBack()).rollout.phase is Phase.ROLLED_BACK
    assert life.rollout.verdict == verdict, "kept for those who ask why"


def test_fewer_refusals_are_seen_from_the_other_side():
    gate = Gate(metric=Metric.FEWER_REFUSALS, tolerated=0.02)
    life = running(PLAN.model_copy(update={"gates": (gate,)}))
    while life.rollout.phase is Phase.RUNNING and life.rollout.stage == 0:
        life.window(arm(40), replace(arm(100), refusals=30))
    verdict = life.rollout.verdict
    assert verdict is not None
    assert "in control (30.00%) against 0 of" in explain(verdict)


def test_overload_and_clients_errors_do_not_halt():
    life = running()
    for _ in range(4):
        life.window(canary=Arm(40, {ErrorCode.OVERLOADED: 20, ErrorCode.INVALID_REQUEST: 20}))
    assert life.standing == (Phase.RUNNING, 0, 100)
    assert life.rollout.sample == 0, "it has not answered anything either"


def test_too_little_traffic_extends_a_stage_and_then_pauses():
    life = running()
    for _ in range(29):
        life.window(canary=arm(1))
    assert life.standing == (Phase.RUNNING, 0, 100)
    life.window(canary=arm(1))
    assert (life.rollout.phase, life.rollout.reason) == (Phase.PAUSED, Reason.TOO_LITTLE_TRAFFIC)
    assert life.rollout.share == 100
    life.tell(Resume()).window(canary=arm(1))
    assert life.standing == (Phase.RUNNING, 0, 100), "extended once more"
    life.windows(1)
    assert life.standing == (Phase.RUNNING, 1, 5_000)


def test_too_little_traffic_may_go_on_or_roll_back():
    for choice, expected in (("go_on", Phase.RUNNING), ("roll_back", Phase.HALTED)):
        life = running(PLAN.model_copy(update={"when_short": choice}))
        for _ in range(30):
            life.window(canary=arm(1))
        assert life.rollout.phase is expected
    assert life.rollout.reason is Reason.TOO_LITTLE_TRAFFIC


def test_light_traffic_is_enough_once_the_longest_duration_is_over():
    stage = PLAN.stages[0].model_copy(update={"sample_light": 30})
    life = running(PLAN.model_copy(update={"stages": (stage, *PLAN.stages[1:])}))
    for _ in range(29):
        life.window(canary=arm(1))
    assert life.standing == (Phase.RUNNING, 0, 100)
    life.window(canary=arm(1))
    assert life.standing == (Phase.RUNNING, 1, 5_000)


def test_a_gate_can_ask_for_a_sample_of_its_own():
    golden = Gate(metric=Metric.GOLDEN, tolerated=0.05, sample_min=100)
    life = running(PLAN.model_copy(update={"gates": (*PLAN.gates, golden)}))
    life.windows(5)
    asked = [replace(some, golden_runs=10) for some in (arm(20), arm(100))]
    for _ in range(9):
        life.window(*asked)
    assert life.standing == (Phase.RUNNING, 0, 100)
    assert life.window(*asked).standing == (Phase.RUNNING, 1, 5_000)


def test_failures_before_control_is_known_do_not_let_the_share_grow():
    eager = PLAN.stages[0].model_copy(update={"duration_min_s": 5.0, "sample_min": 20})
    life = Life(PLAN.model_copy(update={"stages": (eager, *PLAN.stages[1:])})).tell(Start())
    for _ in range(10):
        life.window(canary=arm(4, bad=4), control=arm(10))
        assert life.rollout.stage == 0
    assert (life.rollout.phase, life.rollout.reason) == (Phase.HALTED, Reason.WORSE)


def test_a_shadow_stage_shows_no_caller_an_answer():
    life = running(SHADOWED)
    assert (life.standing, life.rollout.mirrored) == ((Phase.SHADOW, 0, 0), 500)
    life.windows(3)
    assert (life.standing, life.rollout.mirrored) == ((Phase.RUNNING, 1, 100), 0)
    bad = running(SHADOWED)
    while bad.rollout.phase is Phase.SHADOW:
        bad.window(canary=arm(20, bad=10))
    assert (bad.rollout.phase, bad.rollout.mirrored) == (Phase.HALTED, 0)


def test_a_pause_holds_the_share_and_keeps_watching():
    life = running().windows(2).tell(Pause()).windows(20)
    assert life.standing == (Phase.PAUSED, 0, 100)
    assert life.rollout.reason is Reason.BY_HAND
    life.tell(Resume()).windows(3)
    assert life.standing == (Phase.RUNNING, 0, 100), "paused time does not count"
    assert life.windows(1).standing == (Phase.RUNNING, 1, 5_000)
    life.tell(Pause())
    while life.rollout.phase is Phase.PAUSED:
        life.window(canary=arm(100, bad=30))
    assert life.rollout.phase is Phase.HALTED


def test_a_hand_on_a_paused_rollout_keeps_it_from_going_on_by_itself():
    life = running().ticks(130)
    assert life.rollout.reason is Reason.NO_EVIDENCE
    paused_ms = life.rollout.paused_ms
    life.tell(Pause()).windows(3)
    assert (life.rollout.phase, life.rollout.reason) == (Phase.PAUSED, Reason.BY_HAND)
    assert life.rollout.paused_ms == paused_ms
    waits = Life(is_ready_at_once=False).tell(Start()).ticks(110)
    assert waits.tell(Pause()).actions == (SetShare(0, 0),), "the fleet is not wanted any more"


def test_paused_for_too_long_is_rolled_back():
    life = running().windows(2).tell(Pause()).ticks(1_000)
    assert life.rollout.phase is Phase.PAUSED
    assert life.ticks(10).rollout.reason is Reason.PAUSED_TOO_LONG
    assert life.standing == (Phase.HALTED, 0, 0)


def test_promoting_by_hand_ends_this_stage_and_no_other():
    life = running().window()
    life.tell(Promote(0))
    assert life.standing == (Phase.RUNNING, 1, 5_000)
    refused(life, Promote(0))
    life.tell(Pause()).tell(Promote(1))
    assert life.standing == (Phase.RUNNING, 2, 10_000)
    assert life.tell(Promote(2)).rollout.phase is Phase.DONE


def test_impossible_actions_are_refused():
    life = Life(is_ready_at_once=False)
    for event in (Pause(), Resume(), Promote(0), Promote(-1)):
        refused(life, event)
    life.tell(Start())
    for event in (Start(), Resume(), Promote(0), Promote(-1)):
        refused(life, event)
    life.tell(Abort())
    for event in (Start(), Pause(), Resume(), Abort(), Promote(0)):
        refused(life, event)


def test_an_abort_sends_everybody_back():
    life = running().windows(8)
    assert life.rollout.share == 5_000
    life.tell(Abort())
    assert (life.standing, life.actions) == ((Phase.ABORTED, 1, 0), (SetShare(0, 0),))


@pytest.mark.parametrize("phase", [*Phase])
def test_a_rollout_without_a_subject_is_aborted_in_any_phase(phase):
    life = Life()
    life.rollout = replace(life.rollout, phase=phase, stage=0, wanted=0, share=100)
    if phase is Phase.HALTED:
        life.rollout = replace(life.rollout, share=0, reason=Reason.WORSE)
    before = life.rollout
    life.tell(Gone(Reason.RELEASE_GONE))
    if phase in ENDED or phase is Phase.HALTED:
        found = (life.rollout.phase, life.rollout.reason, life.rollout.share)
        assert found == (before.phase, before.reason, before.share)
        return
    found = life.rollout
    assert (found.phase, found.reason) == (Phase.ABORTED, Reason.RELEASE_GONE)
    assert life.actions == (SetShare(0, 0),)


def test_a_stage_waits_for_the_fleet_and_the_one_before_is_watched_meanwhile():
    life = running()
    life.is_ready_at_once = False
    life.windows(9)
    assert life.standing == (Phase.RUNNING, 0, 100)
    assert life.rollout.is_waiting
    life.tell(Ready(2)).tell(Ready(0))
    assert life.rollout.share == 100, "that is not the stage that is waited for"
    while life.rollout.phase is Phase.RUNNING:
        life.window(canary=arm(20, bad=10))
    assert life.standing == (Phase.HALTED, 0, 0)
    assert life.tell(Ready(1)).rollout.share == 0


def test_a_fleet_that_does_not_get_ready_pauses_the_rollout_until_it_is():
    life = Life(is_ready_at_once=False).tell(Start()).ticks(100)
    assert life.rollout.phase is Phase.RUNNING
    life.ticks(10)
    assert life.rollout.reason is Reason.NOT_READY
    assert life.actions == (SetShare(0, 0), Prepare(0, 100)), "still wanted"
    assert life.tell(Ready(1)).rollout.phase is Phase.PAUSED
    assert life.tell(Ready(0)).standing == (Phase.RUNNING, 0, 100)
    again = Life(is_ready_at_once=False).tell(Start()).ticks(110).tell(Resume())
    assert again.actions == (SetShare(0, 0), Prepare(0, 100))


def test_the_end_waits_for_gateways_that_cannot_serve_it_yet():
    life = running().windows(6).windows(6)
    assert life.standing == (Phase.RUNNING, 2, 10_000)
    life.is_ready_at_once = False
    life.tell(NotReady(2)).windows(5)
    assert life.standing == (Phase.RUNNING, 2, 10_000), "long enough, but control is needed yet"
    refused(life, Promote(2))
    life.ticks(110)
    assert (life.rollout.phase, life.rollout.reason) == (Phase.PAUSED, Reason.NOT_READY)
    life.tell(Ready(2)).windows(4)
    assert life.rollout.phase is Phase.DONE


def test_a_manual_pause_waits_for_a_manual_resume():
    life = Life(is_ready_at_once=False).tell(Start()).tell(Pause())
    assert life.tell(Ready(0)).windows(1).standing == (Phase.PAUSED, -1, 0)


def test_time_without_a_fleet_does_not_count():
    life = running()
    life.is_ready_at_once = False
    life.windows(3).tell(NotReady(0))
    assert life.actions == (SetShare(100, 0), Prepare(0, 100))
    life.windows(5).tell(Ready(0)).windows(2)
    assert life.rollout.watched_ms == 50_000
    assert life.windows(1).rollout.is_waiting
    lost = running().tell(NotReady(0))
    lost.is_ready_at_once = False
    assert lost.tell(NotReady(1)).windows(11).rollout.phase is Phase.RUNNING


def test_silence_pauses_until_there_is_evidence_again():
    life = running().windows(2).ticks(120)
    silent_ms = life.now_ms
    assert life.rollout.phase is Phase.RUNNING
    assert life.ticks(10).rollout.reason is Reason.NO_EVIDENCE
    assert life.rollout.share == 100
    old = Window(silent_ms - WINDOW_MS, silent_ms, arm(20), arm(100))
    assert life.tell(Evidence((old,))).rollout.phase is Phase.PAUSED, "that is of the time before"
    assert life.window().standing == (Phase.RUNNING, 0, 100)
    assert life.rollout.watched_ms == 20_000, "counted again from here on"


def test_a_stage_without_control_proves_nothing():
    life = running()
    for _ in range(8):
        life.window(control=Arm())
    assert life.windows(2).standing == (Phase.RUNNING, 0, 100)
    assert life.windows(1).standing == (Phase.RUNNING, 1, 5_000)


def test_unobserved_time_does_not_count():
    life = running().windows(3)
    assert life.rollout.watched_ms == 30_000
    missed_ms = life.now_ms
    life.now_ms += 3_600_000
    life.tell(Restarted())
    assert life.actions == (SetShare(100, 0),)
    assert life.rollout.phase is Phase.RUNNING, "an hour of our own absence is no silence"
    late = tuple(
        Window(missed_ms + n * WINDOW_MS, missed_ms + (n + 1) * WINDOW_MS, arm(20), arm(100))
        for n in range(100)
    )
    life.tell(Evidence(late))
    assert (life.rollout.watched_ms, life.rollout.stage) == (30_000, 0)
    assert life.rollout.tests[Metric.ERRORS].canary.total == 20 * 103, "but it is evidence"
    life.windows(3)
    assert life.standing == (Phase.RUNNING, 1, 5_000)


def test_a_loop_that_stood_still_is_like_a_restart():
    life = running().windows(3)
    missed_ms = life.now_ms
    life.now_ms += STEP_GAP_MAX_MS + 1
    life.tell(Evidence((Window(missed_ms, missed_ms + WINDOW_MS, arm(20), arm(100)),)))
    assert life.rollout.watched_ms == 30_000


def test_bad_evidence_of_unobserved_time_halts():
    life = running().windows(3)
    missed_ms = life.now_ms
    life.now_ms += 3_600_000
    life.tell(Restarted())
    bad = Window(missed_ms, missed_ms + WINDOW_MS, arm(50, bad=40), arm(100))
    assert life.tell(Evidence((bad,))).rollout.phase is Phase.HALTED


def test_evidence_that_is_told_twice_counts_once():
    life = running()
    window = Window(life.now_ms, life.now_ms + WINDOW_MS, arm(20), arm(100))
    life.now_ms += WINDOW_MS
    once = life.tell(Evidence((window,))).rollout
    assert life.tell(Evidence((window, window))).rollout == once


def test_windows_from_before_the_stage_are_no_evidence():
    life = Life().windows(5).ticks(20)
    start_ms = life.now_ms - 1
    life.tell(Start())
    life.now_ms += WINDOW_MS
    life.tell(Evidence((Window(start_ms, life.now_ms, arm(50, bad=50), arm(100)),)))
    assert life.standing == (Phase.RUNNING, 0, 100)
    assert life.rollout.sample == 0


def test_a_clock_that_is_set_back_changes_nothing():
    life = running().windows(3)
    life.now_ms -= 1_000_000
    before = life.rollout
    assert life.tell(Tick()).rollout == before


def test_after_a_restart_everything_is_asked_for_again():
    life = running()
    while life.rollout.phase is Phase.RUNNING:
        life.window(canary=arm(20, bad=10))
    assert life.tell(Tick()).actions == ()
    assert life.tell(Restarted()).actions == (SetShare(0, 0), RollBack(Reason.WORSE))
    life.tell(SentBack())
    ended = life.rollout
    assert life.tell(Restarted()).actions == due(ended) == (SetShare(0, 0),)
    assert life.windows(3).rollout == ended, "nothing happens to what has ended"


def test_a_rollout_that_is_over_has_the_evidence_of_every_stage() -> None:
    life = running()
    while life.rollout.phase is not Phase.DONE:
        life.windows(5)
    assert [past.stage for past in life.rollout.past] == list(range(len(PLAN.stages) - 1))
    first = life.rollout.past[0]
    assert first.sample >= PLAN.stages[0].sample_min
    assert all(gate.canary.total and gate.control.total for gate in first.gates[:1])
