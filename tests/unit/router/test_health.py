"""Ejection, back-off and trial of replicas: every rule by example."""

import random
from itertools import pairwise

import pytest

from router.core.fleet import health
from router.core.fleet.health import CellHealth, HealthState, HealthVerdict
from router.core.types.canary import CanaryAnswer
from sluice.detector.consensus import Text

RIGHT, WRONG = CanaryAnswer(Text((5, 6, 7))), CanaryAnswer(Text((5, 6, 8)))
EJECTED, HALF_OPEN, HEALTHY = HealthState.EJECTED, HealthState.HALF_OPEN, HealthState.HEALTHY


class Pool:
    """Replicas that answer every probe at once, and what became of them."""

    def __init__(self, replicas: int = 6) -> None:
        self.health = CellHealth()
        self.names = [f"replica-{number}" for number in range(replicas)]
        self.answers: dict[str, CanaryAnswer | None] = dict.fromkeys(self.names, RIGHT)
        self.slips: dict[str, int] = {}  # wrong answers to come
        self.probes: list[tuple[float, str]] = []
        self.verdicts: list[tuple[float, HealthVerdict]] = []
        self.now = 0.0
        for name in self.names:
            self.health.attached(name, 0.0)

    def step_until(self, until: float) -> None:
        """Let time pass, stopping wherever something is due."""
        while True:
            due = max(self.health.next_at(self.now), self.now)
            if due > until:
                break
            self.now = due
            self.settle()
        self.now = until
        self.settle()

    def settle(self) -> None:
        while probes := self.health.tick(self.now):
            for name in probes:
                self.probes.append((self.now, name))
                answer = self.answers[name]
                if self.slips.get(name):
                    self.slips[name] -= 1
                    answer = WRONG
                if answer is None:
                    self.health.probe_failed(name, self.now)
                else:
                    self.health.answered(name, answer, self.now)
        self.verdicts += [(self.now, verdict) for verdict in self.health.verdicts()]

    def state(self, number: int) -> tuple[HealthState, str]:
        name = self.names[number]
        return self.health.state(name), self.health.reason(name)

    def steps(self, seconds: dict[int, float], rounds: int = 250, **size: int) -> None:
        """Let replicas do steps of these durations, one each per 10 ms."""
        for _ in range(rounds):
            self.now += 0.01
            for number, step_s in seconds.items():
                self.health.stepped(self.names[number], step_s, self.now, **size)
            self.settle()


def test_a_pool_that_agrees_stays_healthy_and_is_probed_all_the_time():
    pool = Pool()
    pool.step_until(60.0)
    assert not pool.verdicts
    times = [at for at, name in pool.probes if name == pool.names[0]]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps
    assert all(
        0.7 * health.PROBE_INTERVAL_S <= gap <= 1.3 * health.PROBE_INTERVAL_S for gap in gaps
    )


def test_a_liar_is_asked_three_times_and_ejected():
    pool = Pool()
    pool.answers[pool.names[2]] = WRONG
    pool.step_until(0.5)
    assert pool.state(2) == (EJECTED, "lying")
    assert [(it.wrong, it.asked) for _, it in pool.verdicts] == [(3, 3)]
    assert [name for _, name in pool.probes].count(pool.names[2]) == 3
    assert [pool.state(number)[0] for number in (0, 1, 3, 4, 5)] == [HEALTHY] * 5


@pytest.mark.parametrize(("times", "verdicts"), [(1, 0), (2, 0), (3, 1)])
def test_few_different_answers_in_a_row_are_forgiven(times: int, verdicts: int):
    pool = Pool()
    pool.step_until(20.0)
    pool.slips[pool.names[1]] = times
    pool.step_until(26.5)
    assert pool.slips[pool.names[1]] == 0
    assert len([entry for _, entry in pool.verdicts if entry.state is EJECTED]) == verdicts


@pytest.mark.parametrize("answers", [(RIGHT, WRONG), (RIGHT, RIGHT, WRONG, WRONG), (RIGHT,)])
def test_a_tie_or_too_few_answers_eject_no_replica(answers):
    pool = Pool(len(answers))
    pool.answers.update(zip(pool.names, answers, strict=True))
    pool.step_until(60.0)
    assert not pool.verdicts


def test_a_liar_among_three_is_ejected_and_taken_back_when_it_answers_right():
    pool = Pool(3)
    pool.answers[pool.names[0]] = WRONG
    pool.step_until(10.0)
    assert pool.state(0) == (EJECTED, "lying")
    pool.answers[pool.names[0]] = RIGHT
    pool.step_until(30.0)
    assert pool.state(0) == (HEALTHY, "")


def test_the_back_off_doubles_up_to_its_end():
    pool = Pool()
    pool.answers[pool.names[0]] = WRONG
    pool.step_until(400.0)
    times = [at for at, name in pool.probes if name == pool.names[0]][3:]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[:6] == pytest.approx([2.0, 4.0, 8.0, 16.0, 32.0, 60.0])
    assert gaps[6:] == pytest.approx([health.BACKOFF_MAX_S] * len(gaps[6:]))


def test_a_slow_replica_is_ejected_tried_and_taken_back():
    pool = Pool()
    everybody = dict.fromkeys(range(6), 0.02)
    pool.steps(everybody, decodes=8)
    assert not pool.verdicts
    pool.steps(everybody | {4: 0.1}, rounds=20, decodes=8)
    assert pool.state(4) == (EJECTED, "slow")
    assert not pool.health.may_take(pool.names[4], 0)
    pool.step_until(pool.now + health.BACKOFF_FIRST_S + 0.05)
    assert pool.state(4) == (HALF_OPEN, "slow")
    assert pool.health.may_take(pool.names[4], health.TRIAL_ACTIVE - 1)
    assert not pool.health.may_take(pool.names[4], health.TRIAL_ACTIVE)
    pool.steps(everybody, rounds=60, decodes=8)
    pool.step_until(pool.now + 2.0)
    assert pool.state(4) == (HEALTHY, "")
    reasons = [(verdict.state, verdict.reason) for _, verdict in pool.verdicts]
    assert reasons == [(EJECTED, "slow"), (HALF_OPEN, "slow"), (HEALTHY, "")]


def test_a_replica_that_stays_slow_fails_its_trial():
    pool = Pool()
    everybody = dict.fromkeys(range(6), 0.02)
    pool.steps(everybody, decodes=8)
    pool.steps(everybody | {4: 0.1}, rounds=1000, decodes=8)
    states = [verdict.state for _, verdict in pool.verdicts]
    assert states[:4] == [EJECTED, HALF_OPEN, EJECTED, HALF_OPEN]
    assert HEALTHY not in states


def test_a_replica_with_fuller_steps_is_not_slow():
    pool = Pool()
    for _ in range(300):
        pool.steps(dict.fromkeys(range(5), 0.01), rounds=1, decodes=4)
        pool.steps({5: 0.08}, rounds=1, decodes=60, prompt_tokens=2000)
    assert not pool.verdicts


def test_small_steps_are_compared_with_fuller_ones_when_there_are_no_others():
    pool = Pool()
    pool.steps(dict.fromkeys(range(6), 0.02), decodes=8)
    pool.steps({5: 0.1}, rounds=20, decodes=2)
    assert pool.state(5) == (EJECTED, "slow")


def test_two_replicas_have_no_pool_to_be_compared_with():
    pool = Pool(2)
    pool.steps({0: 0.01, 1: 0.5}, rounds=400, decodes=8)
    assert not pool.verdicts


def test_rare_hiccups_are_not_slow():
    pool = Pool()
    choose = random.Random(7)
    for _ in range(2000):
        pool.now += 0.01
        for name in pool.names:
            is_long = choose.random() < 0.02
            pool.health.stepped(name, 0.2 if is_long else 0.02, pool.now, decodes=8)
        pool.settle()
    assert not pool.verdicts


def test_two_slow_steps_are_an_accident():
    pool = Pool()
    everybody = dict.fromkeys(range(6), 0.02)
    pool.steps(everybody, decodes=8)
    for _ in range(3):
        pool.steps(everybody | {4: 0.2}, rounds=2, decodes=8)
        pool.steps(everybody, rounds=300, decodes=8)
    assert not pool.verdicts


def test_steps_of_no_length_compare_as_equal():
    pool = Pool()
    pool.steps(dict.fromkeys(range(5), 0.0001) | {5: 0.0015}, rounds=400, decodes=8)
    assert not pool.verdicts


def test_failures_in_a_row_eject_and_a_success_between_does_not():
    pool = Pool()
    for at in range(6):
        pool.now += 1.0
        pool.health.failed(pool.names[0], pool.now)
        if at % 2:
            pool.health.succeeded(pool.names[0], pool.now)
    assert pool.state(0) == (HEALTHY, "")
    for _ in range(3):
        pool.now += 0.1
        pool.health.failed(pool.names[0], pool.now)
    assert pool.state(0) == (EJECTED, "failing")


def test_a_step_that_fails_all_its_sequences_is_one_incident():
    pool = Pool()
    for _ in range(64):
        pool.health.failed(pool.names[0], 1.0)
    assert pool.state(0) == (HEALTHY, "")


def test_a_failure_in_the_trial_ejects_again_for_longer():
    pool = Pool()
    name = pool.names[0]
    for at in range(3):
        pool.health.failed(name, at * 0.01)
    pool.step_until(1.1)
    assert pool.state(0) == (HALF_OPEN, "failing")
    pool.health.failed(name, pool.now)
    ejected_at = pool.now
    assert pool.state(0) == (EJECTED, "failing")
    pool.step_until(ejected_at + 1.9)
    assert pool.state(0)[0] is EJECTED
    pool.step_until(ejected_at + 2.1)
    assert pool.state(0)[0] is HALF_OPEN


def test_probes_without_an_answer_eject():
    pool = Pool()
    pool.answers[pool.names[3]] = None
    pool.step_until(20.0)
    assert pool.state(3) == (EJECTED, "failing")


def test_an_unanswered_probe_is_given_up_and_is_no_failure():
    pool = Pool()
    name = pool.names[0]
    asked = 0
    while pool.now < 60.0:
        for probed in pool.health.tick(pool.now):
            asked += probed == name
            if probed != name:
                pool.health.answered(probed, RIGHT, pool.now)
        pool.now = max(pool.now + 0.001, pool.health.next_at(pool.now))
    assert asked >= 5
    assert pool.state(0) == (HEALTHY, "")


def test_never_more_than_a_third_is_ejected():
    pool = Pool(7)
    for name in pool.names:
        for at in range(3):
            pool.health.failed(name, 1.0 + at)
    ejected = [name for name in pool.names if pool.health.state(name) is EJECTED]
    assert len(ejected) == 2


def test_the_mildest_case_comes_back_when_others_are_lost():
    pool = Pool(6)
    everybody = dict.fromkeys(range(6), 0.02)
    pool.steps(everybody, decodes=8)
    pool.steps(everybody | {4: 0.1}, rounds=20, decodes=8)
    for at in range(3):
        pool.health.failed(pool.names[5], pool.now + at * 0.001)
    assert pool.state(4) == (EJECTED, "slow")
    assert pool.state(5) == (EJECTED, "failing")
    pool.health.lost(pool.names[0], pool.now + 0.1)
    assert pool.state(4) == (HALF_OPEN, "slow")
    assert pool.state(5) == (EJECTED, "failing")


def test_the_mildest_case_comes_back_when_others_leave_the_cell():
    pool = Pool(6)
    for number in (1, 2):
        for at in range(3):
            pool.health.failed(pool.names[number], number + at * 0.001)
    assert pool.state(1)[0] is pool.state(2)[0] is EJECTED
    pool.health.forget(pool.names[0])
    pool.health.tick(2.1)
    assert (pool.state(1)[0], pool.state(2)[0]) == (HALF_OPEN, EJECTED)


def test_the_answer_of_a_lost_replica_does_not_count():
    """Two that disagree are a tie, whatever a third one said before it was lost."""
    pool = Pool(3)
    pool.step_until(1.0)
    pool.health.lost(pool.names[0], 1.0)
    pool.answers[pool.names[1]] = WRONG
    pool.step_until(60.0)
    assert not pool.verdicts


def test_a_replica_that_was_lost_once_is_tried_at_once():
    pool = Pool()
    pool.step_until(5.0)
    pool.health.lost(pool.names[0], 5.0)
    assert pool.state(0) == (EJECTED, "lost")
    pool.step_until(9.0)
    pool.health.attached(pool.names[0], 9.0)
    assert pool.state(0) == (HALF_OPEN, "lost")
    pool.step_until(10.0)
    assert pool.state(0) == (HEALTHY, "")


def test_a_replica_that_flaps_waits_longer_every_time():
    pool = Pool()
    waits: list[float] = []
    for _ in range(6):
        pool.health.lost(pool.names[0], pool.now)
        pool.step_until(pool.now + 0.5)
        pool.health.attached(pool.names[0], pool.now)
        begin = pool.now
        while pool.state(0)[0] is EJECTED:
            pool.step_until(pool.now + 0.25)
        waits.append(pool.now - begin)
        pool.step_until(pool.now + 0.3)
    assert waits == pytest.approx([0.0, 1.0, 2.0, 4.0, 8.0, 16.0], abs=0.3)


def test_a_long_time_of_health_is_a_new_beginning():
    pool = Pool()
    for _ in range(3):
        pool.health.lost(pool.names[0], pool.now)
        pool.health.attached(pool.names[0], pool.now)
        pool.step_until(pool.now + 10.0 + health.FORGIVE_S)
    pool.health.lost(pool.names[0], pool.now)
    pool.health.attached(pool.names[0], pool.now)
    assert pool.state(0) == (HALF_OPEN, "lost")


def test_answers_of_an_older_attachment_are_ignored():
    pool = Pool(3)
    pool.now = 0.5
    assert pool.names[0] in pool.health.tick(0.5)
    pool.health.lost(pool.names[0], 0.6)
    pool.health.answered(pool.names[0], WRONG, 0.7)
    pool.health.attached(pool.names[0], 0.8)
    pool.health.answered(pool.names[0], WRONG, 0.8)
    pool.answers[pool.names[0]] = RIGHT
    pool.step_until(5.0)
    assert pool.state(0) == (HEALTHY, "")


def test_an_unknown_replica_has_no_verdict_and_a_forgotten_one_leaves_none():
    pool = Pool(3)
    pool.health.lost("stranger", 1.0)
    pool.health.failed("stranger", 1.0)
    pool.health.stepped("stranger", 1.0, 1.0)
    pool.health.answered("stranger", RIGHT, 1.0)
    assert pool.health.may_take("stranger", 100)
    for at in range(3):
        pool.health.failed(pool.names[0], 1.0 + at)
    pool.health.forget(pool.names[0])
    assert not pool.health.verdicts()
    assert CellHealth().next_at(3.0) == float("inf")


def test_answers_to_different_questions_are_not_compared() -> None:
    pool = Pool(3)
    pool.step_until(10.0)
    for name in pool.names[:2]:  # the base's own prompt has become known
        pool.answers[name] = CanaryAnswer(Text((9, 9, 9)), 1)
    pool.step_until(30.0)
    pool.answers[pool.names[2]] = CanaryAnswer(Text((9, 9, 9)), 1)
    pool.step_until(60.0)
    assert not pool.verdicts
    pool.answers[pool.names[2]] = CanaryAnswer(Text((9, 9, 8)), 1)
    pool.step_until(90.0)
    assert pool.state(2) == (EJECTED, "lying")


def test_a_fork_between_equally_probable_tokens_is_no_lie() -> None:
    pool = Pool(3)
    pool.answers[pool.names[0]] = CanaryAnswer(Text((5, 7, 1), (-0.1, -0.8, -0.1)))
    for name in pool.names[1:]:
        pool.answers[name] = CanaryAnswer(Text((5, 6, 7), (-0.1, -0.75, -0.1)))
    pool.step_until(60.0)
    assert not pool.verdicts
    pool.answers[pool.names[0]] = CanaryAnswer(Text((5, 6, 7), (-0.1, -3.75, -0.1)))
    pool.step_until(90.0)
    assert pool.state(0) == (EJECTED, "lying"), "equal tokens, and quite other probabilities"
