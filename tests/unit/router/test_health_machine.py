"""Random histories of a pool's health: what never happens, and that all of it heals."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from router.core.fleet import health
from router.core.fleet.health import CellHealth, HealthState
from router.core.types.canary import CanaryAnswer
from sluice.detector.consensus import Text

NAMES = tuple(f"replica-{number}" for number in range(6))
ANSWERS = (
    CanaryAnswer(Text((1, 2))),
    CanaryAnswer(Text((1, 3))),
    CanaryAnswer(Text((4,))),
    CanaryAnswer(Text((1, 2), (-0.5, -0.7))),
    CanaryAnswer(Text((7, 8)), 1),
)
NOTHING = CanaryAnswer(Text(()))


class HealthMachine(RuleBasedStateMachine):
    """Two healths that hear the same decide the same; a model counts what is attached and asked."""

    def __init__(self):
        super().__init__()
        self.now = 10.0
        self.both = CellHealth(), CellHealth()
        self.attached: set[str] = set()
        self.asked: dict[str, float] = {}
        self.states: dict[str, HealthState] = {}

    def tell(self, what: str, *arguments, **more) -> None:
        for one in self.both:
            getattr(one, what)(*arguments, **more)

    @rule(name=st.sampled_from(NAMES))
    def attach(self, name):
        if name not in self.attached:
            self.attached.add(name)
            self.states.setdefault(name, HealthState.HEALTHY)
            self.tell("attached", name, self.now)
            if self.both[0].state(name) is HealthState.HEALTHY:
                self.states[name] = HealthState.HEALTHY

    @rule(name=st.sampled_from(NAMES), is_over=st.booleans())
    def leave(self, name, is_over):
        self.attached.discard(name)
        self.asked.pop(name, None)
        if is_over:
            self.tell("forget", name)
            self.states.pop(name, None)
            self.tick()
        else:
            self.tell("lost", name, self.now)

    @rule(
        name=st.sampled_from(NAMES),
        step_s=st.sampled_from((0.0, 0.01, 0.02, 0.2)),
        decodes=st.sampled_from((1, 8, 64)),
        rounds=st.sampled_from((1, 20, 150)),
    )
    def step(self, name, step_s, decodes, rounds):
        for _ in range(rounds):
            self.tell("stepped", name, step_s, self.now, decodes=decodes, prompt_tokens=0)

    @rule(step_s=st.sampled_from((0.01, 0.02)), rounds=st.sampled_from((20, 150)))
    def all_step(self, step_s, rounds):
        for name in sorted(self.attached):
            for _ in range(rounds):
                self.tell("stepped", name, step_s, self.now, decodes=8)
        self.now += 1.0

    @rule(name=st.sampled_from(NAMES), is_good=st.booleans())
    def ended(self, name, is_good):
        self.tell("succeeded" if is_good else "failed", name, self.now)

    @rule(
        name=st.sampled_from(NAMES),
        answer=st.sampled_from((*ANSWERS, NOTHING, None)),
    )
    def reply(self, name, answer):
        """Also such as nobody asked for."""
        self.asked.pop(name, None)
        if answer is None:
            self.tell("probe_failed", name, self.now)
        else:
            self.tell("answered", name, answer, self.now)

    @initialize()
    def begin(self):
        for name in NAMES[:4]:
            self.attach(name)

    @rule(name=st.sampled_from(NAMES))
    def fail_in_a_row(self, name):
        for _ in range(3):
            self.now += 0.001
            self.tell("failed", name, self.now)

    @precondition(lambda self: self.asked)
    @rule(number=st.integers(0, len(NAMES) - 1), answer=st.sampled_from(ANSWERS))
    def reply_to_a_probe(self, number, answer):
        asked = sorted(self.asked)
        self.reply(asked[number % len(asked)], answer)

    @rule(seconds=st.sampled_from((0.001, 0.1, 1.0, 7.0)))
    def pass_time(self, seconds):
        self.now += seconds

    @rule()
    def tick(self):
        probes, others = (one.tick(self.now) for one in self.both)
        assert probes == others, "the same history, the same decisions"
        assert len(set(probes)) == len(probes)
        for name in probes:
            assert name in self.attached, "only who is attached can be asked"
            since = self.asked.get(name)
            assert since is None or self.now - since >= health.PROBE_TIMEOUT_S, "one at a time"
            self.asked[name] = self.now
        assert self.both[0].tick(self.now) == [], "a tick settles what is due"
        verdicts, others = (one.verdicts() for one in self.both)
        assert verdicts == others
        for verdict in verdicts:
            if verdict.replica_id in self.states:
                self.states[verdict.replica_id] = verdict.state
        for name in self.attached:
            assert self.states[name] is self.both[0].state(name), "every change is told"

    @precondition(lambda self: self.attached)
    @rule()
    def heal(self):
        """After some minutes of good answers everybody is healthy, whatever was before."""
        until = self.now + 6 * health.BACKOFF_MAX_S
        for _ in range(2000):
            probes, others = (one.tick(self.now) for one in self.both)
            assert probes == others
            self.asked.update(dict.fromkeys(probes, self.now))
            for name in self.asked:
                self.tell("answered", name, ANSWERS[0], self.now)
            self.asked.clear()
            if self.now > until:
                break
            self.now = max(self.both[0].next_at(self.now), self.now + 0.01)
        assert {self.both[0].state(name) for name in self.attached} == {HealthState.HEALTHY}
        self.tick()

    @invariant()
    def never_more_than_a_third(self):
        ejected = {
            name for name in self.attached if self.both[0].state(name) is HealthState.EJECTED
        }
        assert len(ejected) <= len(self.attached) // 3
        for name in self.attached:
            reason = self.both[0].reason(name)
            is_healthy = self.both[0].state(name) is HealthState.HEALTHY
            assert is_healthy == (reason == "")
            assert self.both[0].may_take(name, 0) == (name not in ejected)
            assert self.both[0].may_take(name, 100) == is_healthy

    @invariant()
    def a_next_time_is_never_past(self):
        assert self.both[0].next_at(self.now) >= self.now


HealthMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestHealthMachine = HealthMachine.TestCase
