"""Following an engine step by step: what is predicted is what a simple engine does."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.engine_model import EngineModel
from router.core.fleet.speed import Speed
from sluice.wire.engine.v1 import engine_pb2 as engine

# Powers of two, so that sums of times are exact and can be compared as they are.
DECODE_STEP_S = 1 / 64
TOKEN_S = 1 / 8192
TPOT_S = 1 / 8
APART_S = 1 / (1 << 30)  # keeps arrivals off the ends of steps
NEVER = float("-inf")


@dataclass
class Step:
    """One step of the reference engine, and what was true when it ended."""

    began_at: float
    ended_at: float
    left: list[int]  # prompt tokens, by arrival
    decoding: int
    slack_s: float
    pauses: int


@dataclass
class Reference:
    """An engine that computes prompts in order of arrival, token by token, and never ends one."""

    budget: int
    arrivals: list[tuple[float, int]]  # time, tokens
    steps: list[Step] = field(default_factory=list)

    def run(self, until: float) -> None:
        left = [tokens for _, tokens in self.arrivals]
        now, decoding, slack_s, pauses = 0.0, 0, 0.0, 0
        while now <= until:
            here = [n for n, (at, _) in enumerate(self.arrivals) if at <= now and left[n]]
            if not here and not decoding:
                now = min((at for at, _ in self.arrivals if at > now), default=float("inf"))
                continue
            room = max(self.budget - decoding, 64)
            duration_s = DECODE_STEP_S
            for number in here:
                while left[number] and room:
                    left[number] -= 1
                    room -= 1
                    duration_s += TOKEN_S
                decoding += not left[number]
            slack_s += TPOT_S - duration_s
            pauses = 0 if here else pauses + 1
            ended_at = now + duration_s
            self.steps.append(Step(now, ended_at, list(left), decoding, slack_s, pauses))
            now = ended_at

    def at(self, now: float) -> tuple[float, int, int]:
        """Return the end of the step in flight, the tokens owed beyond it, and what decodes."""
        begun = [step for step in self.steps if step.began_at <= now]
        if not begun or begun[-1].ended_at <= now:
            return NEVER, 0, 0
        last = begun[-1]
        owed = sum(
            left for left, (at, _) in zip(last.left, self.arrivals, strict=True) if at <= now
        )
        return last.ended_at, owed, last.decoding


def speed(budget: int) -> Speed:
    speed = Speed(budget)
    speed.decode_step_s, speed.token_s = DECODE_STEP_S, TOKEN_S
    return speed


def engine_model(budget: int = 256) -> EngineModel:
    return EngineModel(speed(budget), budget, TPOT_S)


def followed(engine_model: EngineModel, now: float) -> tuple[float, float, int]:
    engine_model.advance(now)
    return engine_model.boundary_at, engine_model.tokens, engine_model.decoding


BUDGETS = st.sampled_from([64, 100, 256, 2048])
GAPS_S = st.sampled_from([0.0, 1 / 128, 1 / 16, 0.5])
ARRIVALS = st.lists(st.tuples(GAPS_S, st.integers(1, 1500)), min_size=1, max_size=8)


def referred(budget: int, gaps: list[tuple[float, int]]) -> Reference:
    at, arrivals = 0.0, []
    for gap_s, tokens in gaps:
        at += gap_s + APART_S
        arrivals.append((at, tokens))
    reference = Reference(budget, arrivals)
    reference.run(at + 1.0)
    return reference


@given(BUDGETS, ARRIVALS)
def test_told_of_dispatches_only_it_does_the_steps_of_the_engine(budget, gaps):
    reference = referred(budget, gaps)
    shade = engine_model(budget)
    for (at, tokens), following in pairwise([*reference.arrivals, (float("inf"), 0)]):
        shade.send(tokens, tokens * TOKEN_S, at)
        until = min(following[0], reference.steps[-1].ended_at)
        for step in reference.steps:
            middle = (step.began_at + step.ended_at) / 2
            if at <= middle < until:
                assert followed(shade, middle) == reference.at(middle)
                assert (shade.slack_s, shade.pauses) == (step.slack_s, step.pauses)


@given(BUDGETS, ARRIVALS, st.integers(0), st.sampled_from([0.0, 1 / 256, 1 / 16, 0.4]))
def test_told_the_truth_of_a_while_ago_it_agrees_from_then_on(budget, gaps, which, lag_s):
    reference = referred(budget, gaps)
    frame = reference.steps[which % len(reference.steps)]
    now = frame.ended_at + lag_s
    shade = engine_model(budget)
    shade.send(777, 1.0, 0.0)  # what it believed before does not count
    known = [
        (at, left, left * TOKEN_S)
        for left, (at, _) in zip(frame.left, reference.arrivals, strict=True)
        if left and at <= now
    ]
    shade.anchor(frame.ended_at, known, frame.decoding, frame.slack_s, pauses=frame.pauses)
    later = [arrival for arrival in reference.arrivals if arrival[0] > now]
    for step in reference.steps:
        middle = (step.began_at + step.ended_at) / 2
        while later and later[0][0] <= middle:
            at, tokens = later.pop(0)
            shade.send(tokens, tokens * TOKEN_S, at)
        if middle >= now:
            assert followed(shade, middle) == reference.at(middle)
            assert shade.slack_s == step.slack_s
            assert shade.pauses == step.pauses


PROMPTS = st.tuples(
    st.one_of(st.floats(0.0, 100.0), st.just(float("inf"))),
    st.one_of(st.just(0), st.integers(0, 10_000)),
    st.floats(0.0, 10.0),
)


@given(
    st.lists(PROMPTS, max_size=6),
    st.integers(0, 500),
    st.integers(1, 300),
    st.floats(1e-6, 1.0),
    st.lists(st.floats(0.0, 1e6), min_size=1, max_size=4),
)
def test_the_model_arrives_at_the_present_after_any_reports(
    prompts, decoding, budget, step_s, times
):
    shade = engine_model(budget)
    shade.speed.decode_step_s = step_s
    shade.anchor(50.0, prompts, decoding, 0.0, pauses=0)
    for now in sorted(times):
        shade.advance(now)
        assert shade.is_idle or shade.boundary_at > now
        assert shade.tokens > -1e-6
        assert shade.work_s > -1e-6
        assert not shade.is_idle or not (decoding or shade.tokens)


def test_a_sequence_waiting_for_memory_waits_and_the_others_go_on():
    shade = engine_model()
    shade.anchor(1.0, [(float("inf"), 100, 1.0)], 1, 0.0, pauses=0)
    shade.advance(2.0)
    assert (shade.tokens, shade.pauses) == (100, 65)
    shade.anchor(2.0, [(1.5, 100, 100 * TOKEN_S)], 1, 0.0, pauses=0)
    shade.advance(2.0)
    assert (shade.tokens, shade.decoding, shade.pauses) == (0, 2, 0)


def test_an_engine_without_anything_is_idle_until_it_is_sent_something():
    shade = engine_model()
    shade.anchor(1.0, [], 0, 0.0, pauses=0)
    shade.advance(1.0)
    assert shade.is_idle
    shade.send(10, 10 * TOKEN_S, 5.0)
    assert shade.boundary_at == 5.0 + DECODE_STEP_S + 10 * TOKEN_S
    assert not shade.next_is_full()
    shade.send(255, 255 * TOKEN_S, 5.0)
    assert shade.next_is_full()


MARGINS = st.lists(st.floats(-1.0, 1.0), max_size=30)


@given(MARGINS, st.integers(0, 2000), st.integers(1, 4000), st.sampled_from([0.25, 1.0, 8.0]))
def test_sequences_that_the_next_steps_make_late_are_at_risk(begun, owed, tokens, slowness):
    shade = engine_model()
    token_s = TOKEN_S * slowness
    shade.anchor(1.0, [(2.0, owed, owed * token_s)], 1, 0.5, pauses=0)
    for slack_s in begun:
        shade.began(slack_s)
    shade.check(begun)
    # Every step gives each of them the objective and takes its own duration.
    steps = (owed + tokens) / shade.budget
    spare_s = steps * (TPOT_S - DECODE_STEP_S) - (owed + tokens) * token_s
    margins = [0.5 - slack_s for slack_s in begun]
    expected = sum(margin + spare_s < 0 for margin in margins) if spare_s < 0 else 0
    close = any(abs(margin + spare_s) < 1e-9 for margin in margins)
    assert close or shade.at_risk(tokens, tokens * token_s) == expected


@given(MARGINS, st.data())
def test_an_ended_sequence_is_at_risk_no_more(begun, data):
    shade = engine_model()
    for slack_s in begun:
        shade.began(slack_s)
    rest = list(begun)
    for slack_s in data.draw(st.permutations(begun)) if begun else ():
        shade.ended(slack_s)
        rest.remove(slack_s)
        shade.check(rest)


def test_a_first_token_that_is_only_predicted_is_at_risk_too_until_a_frame_tells():
    shade = engine_model()
    shade.send(100, 1.0, 1.0)
    assert shade.at_risk(2000, 5.0) == 1
    shade.anchor(2.1, [], 0, 0.0, pauses=0)
    assert shade.at_risk(2000, 5.0) == 0


# --- from frames ----------------------------------------------------------------------------


@pytest.fixture
def engine_world(bench):
    """A replica whose speed is known exactly."""
    world = bench(replicas=1, step=256, sequences=64, context=8000, blocks=4096, tpot_s=TPOT_S)
    book = world.core.replicas["replica-0"]
    book.speed.decode_step_s, book.speed.token_s = DECODE_STEP_S, TOKEN_S
    return world, book


def step_us(tokens: int) -> int:
    return round((DECODE_STEP_S + tokens * TOKEN_S) * 1e6)


def test_work_computed_by_a_frame_is_not_owed_any_more(engine_world):
    world, book = engine_world
    dispatch = world.dispatch(world.submit(prompt=1000))
    world.now += step_us(256) * 1e-6
    state = engine.EngineState(
        running=1,
        prefilling=1,
        prefill_tokens_owed=744,
        step_prompt_tokens=256,
        step_us=step_us(256),
    )
    world.frame("replica-0", admitted=[dispatch], cached=0, state=state)
    assert dispatch.prefill_owed == 744
    assert book.owed_tokens(world.now) == 744 - 256, "the next step has begun"


def test_a_frame_of_several_steps_is_applied_by_its_remaining_work(engine_world):
    world, book = engine_world
    first = world.dispatch(world.submit(prompt=1000))
    state = engine.EngineState(
        running=1,
        prefilling=1,
        prefill_tokens_owed=1000 - 3 * 256,
        step_prompt_tokens=256,
        step_us=step_us(256),
    )
    world.now += 3 * step_us(256) * 1e-6
    world.frame("replica-0", admitted=[first], cached=0, steps=3, state=state)
    assert first.prefill_owed == 1000 - 3 * 256
    assert book.slack_s == pytest.approx(3 * (TPOT_S - step_us(256) * 1e-6))
    second = world.dispatch(world.submit(prompt=100))  # the engine's word does not know of it
    world.now += 0.1
    last = engine.EngineState(
        running=1, prefill_tokens_owed=0, step_prompt_tokens=232, step_us=step_us(232)
    )
    world.frame("replica-0", tokens={first: [1]}, steps=2, state=last)
    assert (first.prefill_owed, second.prefill_owed) == (0, 100)


def test_a_sign_of_life_in_the_middle_of_a_step_moves_nothing(engine_world):
    world, book = engine_world
    dispatch = world.dispatch(world.submit(prompt=1000))
    boundary_at = book.engine_model.boundary_at
    state = engine.EngineState(running=1, prefilling=1, step_us=50_000, step_prompt_tokens=256)
    world.now += 0.001
    world.frame("replica-0", steps=0, state=state)
    assert dispatch.prefill_owed == 1000
    assert book.engine_model.boundary_at == boundary_at
    assert book.slack_s == 0.0


def test_a_decoding_request_earns_credit_by_short_steps_and_loses_it_by_long_ones(engine_world):
    world, book = engine_world
    dispatch = world.dispatch(world.submit(prompt=10))
    world.frame("replica-0", admitted=[dispatch], cached=0, tokens={dispatch: [1]})
    assert dispatch.slack_s == book.slack_s
    for duration_us, gained_s in ((25_000, 0.1), (225_000, 0.0), (145_000, -0.02)):
        world.now += duration_us * 1e-6
        state = engine.EngineState(running=1, step_us=duration_us)
        world.frame("replica-0", tokens={dispatch: [1]}, state=state)
        assert book.slack_s - dispatch.slack_s == pytest.approx(gained_s)
