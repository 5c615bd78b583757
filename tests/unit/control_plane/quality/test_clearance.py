"""When a replica that a router accuses has cleared itself."""

from dataclasses import replace

import pytest

from control_plane.quality.askings import Asking
from control_plane.quality.clearance import are_all_right, right_answers
from control_plane.quality.ejections import Ejection
from control_plane.quality.judgement import Answer
from control_plane.quality.verdicts import RecordedAnswer, Serving, examine
from sluice.detector.consensus import Text
from sluice.detector.evidence import EvidenceKind

FIRST = Asking("default-1/b", "default", "", "b", "", (1,), 4, 60)
SECOND = replace(FIRST, id="default-2/b")
OTHER_BASE = replace(FIRST, id="default-1/c", base_digest="c")
TENANTS = replace(FIRST, id="p/b", prompt_id="p", owner="tenant")
ASKINGS = {one.id: one for one in (FIRST, SECOND, OTHER_BASE, TENANTS)}
RIGHT, LIE = Text((1, 2, 3)), Text((1, 9, 3))
NAMES = ("r0", "r1", "r2")
SERVING = [Serving(name, "p", "n") for name in NAMES]
ACCUSED = {"r0": Ejection("r0", "router-1", "c", 1, EvidenceKind.CANARY, 3, 3, 5)}


def judged(asking: Asking, text: Text | None, *, asked_at_ms: int = 6, accused=ACCUSED):
    group = ("p", asking.id)
    texts = {"r0": text, "r1": RIGHT, "r2": RIGHT}
    kept = {
        group: [
            RecordedAnswer(n, Answer(i, t), asked_at_ms) for i, (n, t) in enumerate(texts.items())
        ]
    }
    cases, failures = examine(ASKINGS, kept, SERVING, {}, accused=accused)
    assert not failures
    return cases, kept


@pytest.mark.parametrize(
    ("asking", "text", "asked_at_ms", "right"),
    [
        (FIRST, RIGHT, 6, {"r0": [FIRST.id]}),
        (FIRST, LIE, 6, {}),
        (FIRST, None, 6, {}),
        (FIRST, RIGHT, 4, {}),
        (TENANTS, RIGHT, 6, {}),
    ],
    ids=["right", "wrong", "no answer", "from before", "a tenant's prompt"],
)
def test_which_answers_speak_for_a_replica(asking, text, asked_at_ms, right) -> None:
    cases, kept = judged(asking, text, asked_at_ms=asked_at_ms)
    assert right_answers(cases, kept, ACCUSED) == right


def test_all_prompts_of_the_platform_to_the_base_are_needed() -> None:
    assert not are_all_right(ASKINGS, [])
    assert not are_all_right(ASKINGS, [FIRST.id, FIRST.id])
    assert not are_all_right(ASKINGS, [TENANTS.id])
    assert are_all_right(ASKINGS, [SECOND.id, FIRST.id])


def test_one_wrong_answer_convicts_an_accused_replica_and_no_other() -> None:
    (case,) = judged(FIRST, LIE)[0].values()
    (accusation,) = case.accusations
    assert (accusation.finding.replica_id, accusation.finding.deviations) == ("r0", 1)
    assert accusation.evidence["ejection"]["router"] == "router-1"
    (case,) = judged(FIRST, LIE, accused={})[0].values()
    assert case.accusations == ()
    mild = {"r0": replace(ACCUSED["r0"], wrong=2)}
    (case,) = judged(FIRST, LIE, accused=mild)[0].values()
    assert case.accusations == (), "two of three canaries are no accusation"
    (case,) = judged(FIRST, RIGHT)[0].values()
    assert case.accusations == (), "the guard confirms, or nobody is taken out"
