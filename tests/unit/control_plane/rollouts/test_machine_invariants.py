"""What holds in every life of a rollout, whatever happens to it and however often it is killed."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from control_plane.rollouts.evidence import Arm, Metric, Window
from control_plane.rollouts.machine import step
from control_plane.rollouts.plan import Gate, Plan, Stage
from control_plane.rollouts.state import (
    ENDED,
    STATE,
    Abort,
    Event,
    Evidence,
    Expectations,
    Gone,
    NotReady,
    Pause,
    Phase,
    Promote,
    Ready,
    Reason,
    Restarted,
    Resume,
    Rollout,
    SentBack,
    Start,
    Tick,
)
from sluice.errors import ErrorCode, PlatformError

WINDOW_MS = 10_000
GATES = (Gate(metric=Metric.ERRORS, tolerated=0.01), Gate(metric=Metric.REFUSALS, tolerated=0.02))
STAGES = (
    Stage(share=100, duration_min_s=20.0, sample_min=30, duration_max_s=60.0),
    Stage(share=1_000, duration_min_s=10.0),
    Stage(share=10_000, duration_min_s=10.0),
)
SHADOW = Stage(share=500, duration_min_s=10.0, is_shadow=True)
SENT_BACK = {Phase.HALTED, Phase.ROLLED_BACK, Phase.ABORTED}
# Where each phase may lead to in one step.
NEXT = {
    Phase.PLANNED: {Phase.SHADOW, Phase.RUNNING, Phase.ABORTED},
    Phase.SHADOW: {Phase.RUNNING, Phase.PAUSED, Phase.HALTED, Phase.ABORTED},
    Phase.RUNNING: {Phase.PAUSED, Phase.HALTED, Phase.ABORTED, Phase.DONE},
    Phase.PAUSED: {Phase.SHADOW, Phase.RUNNING, Phase.HALTED, Phase.ABORTED, Phase.DONE},
    Phase.HALTED: {Phase.ROLLED_BACK},
}
COMMANDS = (Start(), Pause(), Resume(), Abort())


def arms(canary: int, bad: int) -> tuple[Arm, Arm]:
    return Arm(canary, {ErrorCode.INTERNAL: min(bad, canary)}), Arm(100)


class Lives(RuleBasedStateMachine):
    """Any events in any order; the state goes through JSON before each of them."""

    @initialize(
        has_shadow=st.booleans(), when_short=st.sampled_from(("pause", "go_on", "roll_back"))
    )
    def plan(self, has_shadow: bool, when_short: str):
        plan = Plan(
            stages=(SHADOW, *STAGES) if has_shadow else STAGES,
            gates=GATES,
            when_short=when_short,  # type: ignore[arg-type]
            ready_max_s=60.0,
            quiet_max_s=60.0,
            pause_max_s=300.0,
        )
        self.rollout = Rollout(plan)
        self.now_ms = 1_000_000
        self.read_ms = self.now_ms  # windows up to here have been told
        self.told: list[tuple[Event, int]] = []
        self.stored = [STATE.dump_json(self.rollout)]

    def tell(self, event: Event) -> None:
        before = STATE.validate_json(self.stored[-1])
        try:
            result = step(before, event, self.now_ms)
        except PlatformError as error:
            assert error.code is ErrorCode.CONFLICT
            assert isinstance(event, (*map(type, COMMANDS), Promote))
            return
        self.told.append((event, self.now_ms))
        self.stored.append(STATE.dump_json(result.rollout))
        self.check(before, event, result.rollout)
        self.rollout = result.rollout

    def check(self, before: Rollout, event: Event, after: Rollout) -> None:
        """One step."""
        assert after.phase in {before.phase} | NEXT.get(before.phase, set())
        assert after.stage in (before.stage, before.stage + 1)
        if after.stage > before.stage:
            assert event == Ready(after.stage)
            assert before.wanted == after.stage, "the one before it had ended"
        if after.share > before.share:
            assert after.stage == before.stage + 1
        if after.share < before.share:
            assert after.share == 0
            assert after.phase in SENT_BACK
        if after.wanted > before.wanted:
            self.check_end(before, event, after)
        if before.phase in ENDED:
            assert after == before

    def check_end(self, before: Rollout, event: Event, after: Rollout) -> None:
        """A stage ended, or the first was wanted: not before its time, unless by hand."""
        assert after.wanted == before.wanted + 1
        if before.phase is Phase.PLANNED:
            assert isinstance(event, Start)
        elif not isinstance(event, Promote):
            stage = before.current
            assert after.watched_ms >= stage.duration_min_s * 1000
            is_short = before.plan.when_short == "go_on"
            assert after.sample >= stage.sample_min or is_short

    @rule(command=st.sampled_from(COMMANDS))
    def command(self, command: Event):
        self.tell(command)

    @precondition(lambda self: self.rollout.phase is Phase.PLANNED)
    @rule()
    def start(self):
        self.tell(Start())

    @rule(stage=st.integers(-1, 3))
    def promote(self, stage: int):
        self.tell(Promote(stage))

    @rule(stage=st.integers(-1, 4), is_lost=st.booleans())
    def fleet(self, stage: int, is_lost: bool):
        self.tell(NotReady(stage) if is_lost else Ready(stage))

    @rule()
    def ready(self):
        self.tell(Ready(self.rollout.wanted))

    @rule(seconds=st.sampled_from((0, 1, 10, 40, 400)))
    def tick(self, seconds: int):
        self.now_ms += seconds * 1000
        self.tell(Tick())

    @rule(seconds=st.sampled_from((0, 100, 10_000)))
    def killed(self, seconds: int):
        self.now_ms += seconds * 1000
        self.tell(Restarted())

    @rule(
        canary=st.sampled_from((0, 1, 15, 60)),
        bad=st.sampled_from((0, 0, 0, 2, 60)),
        count=st.integers(1, 3),
        is_told_twice=st.booleans(),
    )
    def windows(self, canary: int, bad: int, count: int, is_told_twice: bool):
        start_ms = max(self.read_ms, self.now_ms)
        some = tuple(
            Window(start_ms + n * WINDOW_MS, start_ms + (n + 1) * WINDOW_MS, *arms(canary, bad))
            for n in range(count)
        )
        self.now_ms = self.read_ms = some[-1].end_ms
        self.tell(Evidence(some))
        if is_told_twice:
            before = self.rollout
            self.tell(Evidence(some))
            assert (self.rollout.tests, self.rollout.sample) == (before.tests, before.sample)

    @rule(exist=st.booleans())
    def prompts(self, exist: bool):
        self.tell(Expectations(exist=exist))

    @rule()
    def sent_back(self):
        self.tell(SentBack())

    @precondition(lambda self: len(self.told) > 12)  # most lives end otherwise
    @rule(reason=st.sampled_from((Reason.RELEASE_GONE, Reason.OWNER_DISABLED)))
    def gone(self, reason: Reason):
        self.tell(Gone(reason))

    @invariant()
    def the_share_is_that_of_the_stage(self):
        if not hasattr(self, "rollout"):
            return
        rollout = self.rollout
        if rollout.phase in SENT_BACK or rollout.stage == -1:
            assert (rollout.share, rollout.mirrored) == (0, 0)
        else:
            assert rollout.share + rollout.mirrored == rollout.current.share
            assert bool(rollout.mirrored) == rollout.current.is_shadow
        assert (rollout.verdict is not None) <= (rollout.phase in SENT_BACK)

    def teardown(self):
        if not hasattr(self, "rollout"):
            return
        self.same_after_any_crash()
        self.ends_when_left_alone()
        self.ends_well_with_good_evidence()

    def same_after_any_crash(self) -> None:
        """From any stored state the rest of the story leads to the same end."""
        for begin in range(0, len(self.stored), max(1, len(self.stored) // 4)):
            rollout = STATE.validate_json(self.stored[begin])
            for event, now_ms in self.told[begin:]:
                rollout = step(rollout, event, now_ms).rollout
            assert rollout == self.rollout

    def ends_when_left_alone(self) -> None:
        """Without evidence, fleet or people a rollout that was started goes back in the end."""
        rollout, now_ms = self.rollout, self.now_ms
        if rollout.phase is Phase.PLANNED:
            return
        for _ in range(60):
            now_ms += 10_000
            rollout = step(rollout, Tick(), now_ms).rollout
        assert step(rollout, SentBack(), now_ms).rollout.phase in ENDED

    def ends_well_with_good_evidence(self) -> None:
        rollout, now_ms = self.rollout, max(self.now_ms, self.read_ms)
        begun = rollout.phase
        for _ in range(80):
            helps: list[Event] = [Start()] if rollout.phase is Phase.PLANNED else []
            helps += [Resume()] if rollout.phase is Phase.PAUSED else []
            helps += [Ready(rollout.wanted), SentBack()]
            now_ms += WINDOW_MS
            helps.append(Evidence((Window(now_ms - WINDOW_MS, now_ms, *arms(60, 0)),)))
            for event in helps:
                rollout = step(rollout, event, now_ms).rollout
        assert rollout.phase in ENDED
        if begun not in SENT_BACK:
            assert rollout.phase is Phase.DONE


TestLives = pytest.mark.timeout(300)(Lives.TestCase)
TestLives.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
