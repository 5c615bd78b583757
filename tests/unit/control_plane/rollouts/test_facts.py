"""What the loop tells the machine: order, bounds of evidence, what counts as confirmed."""

from dataclasses import replace

import pytest

from control_plane.rollouts.evidence import Arm, Window
from control_plane.rollouts.facts import (
    Facts,
    GatewayFacts,
    events,
    evidence_span,
    evidence_until,
    fault,
    held_stages,
    is_confirmed,
    is_on_trial,
    may_settle,
    must_store,
    stages_in_question,
    wanted_split,
)
from control_plane.rollouts.plan import Plan
from control_plane.rollouts.state import (
    NO_STAGE,
    Evidence,
    Expectations,
    Gone,
    NotReady,
    Phase,
    Ready,
    Reason,
    Restarted,
    Rollout,
    SentBack,
    Tick,
)

NOW = 1_000_000
PLANNED = Rollout(Plan())
RUNNING = replace(PLANNED, phase=Phase.RUNNING, stage=1, wanted=1, share=1_000, is_ready=True)
WAITING = replace(RUNNING, wanted=2)
HALTED = replace(RUNNING, phase=Phase.HALTED, share=0)
WINDOW = Window(0, 10, Arm(), Arm())


def test_nothing_new_is_time_that_passes() -> None:
    assert events(PLANNED, Facts()) == (Tick(),)
    assert events(RUNNING, Facts(ready=frozenset({1}))) == (Tick(),)


def test_evidence_is_applied_before_readiness() -> None:
    facts = Facts(is_taken_over=True, ready=frozenset({2}), windows=(WINDOW,))
    assert events(WAITING, facts) == (Restarted(), Evidence((WINDOW,)), Ready(2))


def test_prompts_are_told_once_and_before_evidence() -> None:
    facts = Facts(windows=(WINDOW,), has_prompts=True)
    assert events(RUNNING, facts) == (Expectations(exist=True), Evidence((WINDOW,)))
    known = replace(RUNNING, has_prompts=True)
    assert events(known, facts) == (Evidence((WINDOW,)),)
    assert events(known, Facts(has_prompts=False)) == (Expectations(exist=False),)
    assert events(known, Facts()) == (Tick(),), "unknown: as before"


def test_nothing_else_matters_once_the_subject_is_gone() -> None:
    facts = Facts(is_taken_over=True, windows=(WINDOW,), gone=Reason.MODEL_CHANGED)
    assert events(RUNNING, facts) == (Gone(Reason.MODEL_CHANGED),)
    confirmed = replace(facts, is_taken_over=False, windows=(), is_confirmed=True)
    assert events(HALTED, confirmed) == (SentBack(),), "they are sent back already"


def test_a_fleet_that_lost_something_is_told_once_and_so_is_its_return() -> None:
    lost = Facts(not_ready=frozenset({1}))
    assert events(RUNNING, lost) == (NotReady(1),)
    short = replace(RUNNING, is_ready=False)
    assert events(short, lost) == (Tick(),)
    assert events(short, Facts(ready=frozenset({1}))) == (Ready(1),)


def test_a_gateway_without_the_base_holds_the_next_stages_and_the_end() -> None:
    base, last = "b" * 64, len(PLANNED.plan.stages) - 1
    lacks = GatewayFacts(7, 0, NOW, frozenset({base}))
    has, gone = GatewayFacts(7, 0, NOW), replace(lacks, seen_ms=NOW - 15_001)
    assert held_stages(WAITING, [has, lacks], base, NOW) == {2, last}
    assert held_stages(RUNNING, [lacks], base, NOW) == {last}, "what goes on does no harm"
    at_the_end = replace(RUNNING, stage=last, wanted=last)
    assert held_stages(at_the_end, [lacks], base, NOW) == {last}
    assert held_stages(WAITING, [has, gone], base, NOW) == frozenset()
    assert held_stages(WAITING, [lacks], "c" * 64, NOW) == frozenset()
    assert held_stages(WAITING, [], base, NOW) == frozenset()


def test_only_a_halt_that_was_there_before_can_be_confirmed() -> None:
    confirmed = Facts(is_confirmed=True)
    assert events(HALTED, confirmed) == (SentBack(),)
    assert events(RUNNING, confirmed) == (Tick(),)
    assert events(HALTED, Facts()) == (Tick(),)


@pytest.mark.parametrize(
    ("rollout", "stages"),
    [
        (PLANNED, set()),
        (replace(PLANNED, phase=Phase.RUNNING, wanted=0), {0}),
        (RUNNING, {1}),
        (WAITING, {1, 2}),
        (replace(WAITING, phase=Phase.PAUSED), {1, 2}),
        (HALTED, set()),
        (replace(RUNNING, phase=Phase.DONE), set()),
    ],
)
def test_the_fleet_is_asked_about_the_stages_in_question(
    rollout: Rollout, stages: set[int]
) -> None:
    assert PLANNED.stage == NO_STAGE
    assert stages_in_question(rollout) == stages


def test_gateways_confirm_all_of_them_or_none_is_there_for_long() -> None:
    new, old = GatewayFacts(7, 0, NOW - 1_000), GatewayFacts(6, 0, NOW - 2_000)
    silent = GatewayFacts(6, 0, NOW - 15_001)
    assert is_confirmed([new, silent], 7, NOW, NOW)
    assert not is_confirmed([new, old], 7, NOW, NOW)
    assert not is_confirmed([silent], 7, NOW - 15_000, NOW)
    assert is_confirmed([silent], 7, NOW - 15_001, NOW)
    assert is_confirmed([], 7, NOW - 15_001, NOW)


def test_evidence_waits_for_open_requests_but_not_for_ever() -> None:
    idle, busy = GatewayFacts(7, 0, NOW - 500), GatewayFacts(7, NOW - 20_000, NOW)
    assert evidence_until([idle], NOW) == NOW - 1_500, "it says nothing about what came since"
    assert evidence_until([idle, busy], NOW) == NOW - 21_000
    assert evidence_until([GatewayFacts(7, NOW - 90_000, NOW)], NOW) == NOW - 60_000
    assert evidence_until([], NOW) == NOW - 60_000


def test_reading_continues_where_it_ended_and_is_bounded() -> None:
    assert evidence_span(PLANNED, NOW, NOW + 10_000) == (NOW, NOW + 10_000)
    later = replace(RUNNING, window_end_ms=NOW + 5_000)
    assert evidence_span(later, NOW, NOW + 10_000) == (NOW + 5_000, NOW + 10_000)
    assert evidence_span(later, NOW, NOW + 9_000_000) == (NOW + 5_000, NOW + 305_000)
    assert evidence_span(later, NOW, NOW + 5_000) is None
    assert evidence_span(HALTED, NOW, NOW + 10_000) is None


def test_time_alone_is_stored_now_and_then() -> None:
    assert not must_store(RUNNING, replace(RUNNING, stepped_ms=4_999))
    assert must_store(RUNNING, replace(RUNNING, stepped_ms=5_000))
    assert must_store(RUNNING, replace(RUNNING, window_end_ms=10))


def test_a_split_lasts_from_the_plan_until_no_gateway_needs_it() -> None:
    assert wanted_split(PLANNED, is_live=True) == (0, 0)
    assert wanted_split(RUNNING, is_live=True) == (1_000, 0)
    assert wanted_split(HALTED, is_live=True) == (0, 0)
    aborted = replace(HALTED, phase=Phase.ABORTED)
    assert wanted_split(aborted, is_live=True) == (0, 0)
    assert wanted_split(aborted, is_live=False) is None
    for phase in (Phase.DONE, Phase.ROLLED_BACK):
        assert wanted_split(replace(HALTED, phase=phase), is_live=True) is None


def test_an_ended_rollout_is_put_away_once_no_gateway_uses_it() -> None:
    assert not may_settle(RUNNING, is_confirmed=True)
    assert may_settle(replace(HALTED, phase=Phase.ROLLED_BACK), is_confirmed=False)
    for phase in (Phase.DONE, Phase.ABORTED):
        assert not may_settle(replace(HALTED, phase=phase), is_confirmed=False)
        assert may_settle(replace(HALTED, phase=phase), is_confirmed=True)


def test_nothing_opens_before_a_node_has_loaded_the_adapter() -> None:
    waiting = replace(PLANNED, phase=Phase.RUNNING, wanted=0)
    tried, refused = frozenset({""}), frozenset({"", "adapter_invalid"})
    assert is_on_trial(waiting, "ab", frozenset())
    assert not is_on_trial(waiting, "ab", tried)
    assert not is_on_trial(waiting, "", frozenset()), "a base alone is loaded by ready replicas"
    assert not is_on_trial(RUNNING, "ab", frozenset()), "it began before there were trials"
    assert [fault(waiting, codes) for codes in (frozenset[str](), tried)] == [None, None]
    assert fault(waiting, refused) is Reason.NOT_LOADED
    assert fault(RUNNING, refused) is None, "its gates judge"
