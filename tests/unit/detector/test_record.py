"""From evidence to suspicion: each row of the table, and what never happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.detector.evidence import AnswerVerdict, EvidenceKind
from sluice.detector.record import CLEAN, THRESHOLDS, Record, Suspicion

RIGHT, WRONG = AnswerVerdict.RIGHT, AnswerVerdict.WRONG
UNANSWERED, UNJUDGED = AnswerVerdict.UNANSWERED, AnswerVerdict.UNJUDGED
LIFE, CANARY = EvidenceKind.LIFE, EvidenceKind.CANARY
GOLDEN = EvidenceKind.GOLDEN
TRUSTED, DOUBTED = Suspicion.TRUSTED, Suspicion.DOUBTED
ACCUSED, CONFIRMED = Suspicion.ACCUSED, Suspicion.CONFIRMED
VERDICTS = st.sampled_from(AnswerVerdict)
HISTORIES = st.lists(st.tuples(st.sampled_from(EvidenceKind), VERDICTS), max_size=20)


def record_of(*evidence: tuple[EvidenceKind, AnswerVerdict]) -> Record:
    record = CLEAN
    for kind, verdict in evidence:
        record = record.with_answer(kind, verdict)
    return record


@pytest.mark.parametrize(
    ("evidence", "suspicion"),
    [
        ([], TRUSTED),
        ([(CANARY, WRONG)] * 2, DOUBTED),
        ([(CANARY, WRONG)] * 3, ACCUSED),
        ([(CANARY, WRONG), (CANARY, WRONG), (CANARY, RIGHT), (CANARY, WRONG)], DOUBTED),
        ([(CANARY, UNJUDGED)] * 3, TRUSTED),
        ([(LIFE, WRONG)], DOUBTED),
        ([(LIFE, WRONG)] * 2, ACCUSED),
        ([(LIFE, UNANSWERED)] * 2, TRUSTED),
        ([(GOLDEN, WRONG)], DOUBTED),
        ([(CANARY, WRONG)] * 3 + [(GOLDEN, WRONG)], CONFIRMED),
        ([(GOLDEN, WRONG)] + [(CANARY, WRONG)] * 3, CONFIRMED),
        ([(CANARY, WRONG)] * 2 + [(GOLDEN, WRONG)], DOUBTED),
        ([(CANARY, WRONG)] * 3 + [(GOLDEN, RIGHT)], ACCUSED),
        ([(LIFE, WRONG)] * 2 + [(GOLDEN, WRONG)], ACCUSED),
        ([(GOLDEN, WRONG), (GOLDEN, UNANSWERED), (GOLDEN, WRONG)], CONFIRMED),
        ([(GOLDEN, WRONG), (GOLDEN, RIGHT), (GOLDEN, RIGHT), (GOLDEN, WRONG)], DOUBTED),
    ],
)
def test_evidence_amounts_to_its_suspicion(evidence, suspicion) -> None:
    assert record_of(*evidence).suspicion is suspicion


@given(st.sampled_from(EvidenceKind), st.integers(0, 10))
def test_evidence_of_another_part_counts_as_observed_here(kind, wrong) -> None:
    assert CLEAN.found(kind, wrong) == record_of(*[(kind, WRONG)] * wrong)


@given(HISTORIES)
def test_golden_prompts_alone_confirm(history) -> None:
    others = [(kind, verdict) for kind, verdict in history if kind is not GOLDEN]
    assert record_of(*others).suspicion < CONFIRMED


@given(HISTORIES)
def test_only_the_last_answers_of_each_kind_count(history) -> None:
    record = record_of(*history)
    last: list[tuple[EvidenceKind, AnswerVerdict]] = []
    for kind, threshold in THRESHOLDS.items():
        last += [one for one in history if one[0] is kind][-threshold.of :]
    assert record == record_of(*last)


@given(HISTORIES, st.sampled_from(EvidenceKind))
def test_a_wrong_answer_never_clears_and_right_ones_do(history, kind) -> None:
    record = record_of(*history)
    assert record.with_answer(kind, WRONG).suspicion >= min(record.suspicion, DOUBTED)
    for one in EvidenceKind:
        for _ in range(THRESHOLDS[one].of):
            record = record.with_answer(one, RIGHT)
    assert record.suspicion is TRUSTED
