"""Artifacts become known late, wants change, nodes leave: the planner is told, nothing is lost."""

from control_plane.distribution.coordinator import Coordinator, Turn
from control_plane.distribution.model import (
    STORE,
    Artifact,
    NodePlace,
    NodeReport,
    PlannerLimits,
    Priority,
)
from control_plane.distribution.wants import Wants

A, B = "aa" * 32, "bb" * 32
PLACE = NodePlace("here", "one")
WANTS_A = {A: Priority.WARMING}


def turn(node_id: str, wanted=(), held=(), *, is_full: bool = False) -> Turn:
    return Turn(
        NodeReport(node_id, PLACE, "boot", dict(held), is_full=is_full), Wants(dict(wanted))
    )


def test_nothing_is_planned_for_an_unknown_artifact_until_it_is_known() -> None:
    coordinator = Coordinator(PlannerLimits())
    answers = coordinator.round([turn("n", WANTS_A, is_full=True)], (), 0.0)
    assert answers["n"].orders == ()
    both = [Wants(WANTS_A, {B: Priority.NEEDED})]
    assert coordinator.unknown(both) == {A, B}
    coordinator.know([Artifact(A, 2, 4 << 20)])
    assert coordinator.unknown(both) == {B}
    answers = coordinator.round([turn("n", WANTS_A)], (), 0.1)
    assert {order.source for order in answers["n"].orders} == {STORE}


def test_chunks_reported_before_their_artifact_was_known_count() -> None:
    coordinator = Coordinator(PlannerLimits(store_readers_max=1))
    coordinator.round([turn("has", held={A: 0b11}, is_full=True)], (), 0.0)
    coordinator.know([Artifact(A, 2, 4 << 20)])
    coordinator.round([turn("wants", WANTS_A, is_full=True)], (), 0.1)
    answers = coordinator.round([turn("wants", WANTS_A), turn("has")], (), 0.2)
    assert {order.source for order in answers["wants"].orders} == {"has"}
    assert answers["has"].orders == ()


def test_an_artifact_no_longer_wanted_is_given_up() -> None:
    coordinator = Coordinator(PlannerLimits())
    coordinator.know([Artifact(A, 2, 4 << 20), Artifact(B, 2, 4 << 20)])
    wants_both = WANTS_A | {B: Priority.PREFETCH}
    answers = coordinator.round([turn("n", wants_both, is_full=True)], (), 0.0)
    assert {order.digest for order in answers["n"].orders} == {A, B}
    answers = coordinator.round([turn("n", {B: Priority.NEEDED})], (), 0.1)
    assert {order.digest for order in answers["n"].orders} == {B}


def test_a_node_that_left_begins_anew() -> None:
    coordinator = Coordinator(PlannerLimits())
    coordinator.know([Artifact(A, 2, 4 << 20)])
    coordinator.round([turn("n", WANTS_A, is_full=True)], (), 0.0)
    coordinator.round([], ["n"], 0.1)
    answers = coordinator.round([turn("n", is_full=True)], (), 0.2)
    assert answers["n"].orders == ()
    answers = coordinator.round([turn("n", WANTS_A)], (), 0.3)
    assert answers["n"].orders


def test_a_node_that_the_planner_lost_is_asked_for_everything() -> None:
    coordinator = Coordinator(PlannerLimits(lost_after_s=5.0))
    coordinator.know([Artifact(A, 2, 4 << 20)])
    coordinator.round([turn("n", WANTS_A, is_full=True)], (), 0.0)
    coordinator.round([turn("other", is_full=True)], (), 6.0)
    assert coordinator.round([turn("n", WANTS_A)], (), 7.0)["n"].wants_full


def test_the_own_wishes_of_a_node_are_added_and_withdrawn() -> None:
    coordinator = Coordinator(PlannerLimits())
    coordinator.know([Artifact(A, 2, 4 << 20), Artifact(B, 2, 4 << 20)])
    report = NodeReport("n", PLACE, "boot", is_full=True)
    shared = {A: Priority.PREFETCH}

    def ordered(own) -> dict:
        answer = coordinator.round([Turn(report, Wants(shared, own))], (), 0.0)["n"]
        return {order.digest: order.priority for order in answer.orders}

    assert ordered({}) == {A: Priority.PREFETCH}
    assert ordered({B: Priority.NEEDED, A: None}) == {B: Priority.NEEDED}
    assert ordered({}) == {A: Priority.PREFETCH}
