"""Turns evidence into suspicion by a state machine per replica, for routers, agents and the guard.

| suspicion | condition | consequence |
| --- | --- | --- |
| TRUSTED | no recent answer was wrong | |
| DOUBTED | fewer recent answers were wrong than the threshold of their kind | another prompt |
| ACCUSED | the threshold of LIFE or CANARY is reached | restart by agent, or ejection by router |
| CONFIRMED | threshold of GOLDEN, or threshold of CANARY and one wrong GOLDEN | quarantine |

Pure, because a `Record` is immutable. A right answer lowers the suspicion again, since it displaces
a wrong answer from the recent answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Self

from sluice.detector.evidence import AnswerVerdict, EvidenceKind


class Suspicion(IntEnum):
    """The degree of suspicion against a replica, in ascending order."""

    TRUSTED = 0
    DOUBTED = 1
    ACCUSED = 2
    CONFIRMED = 3


@dataclass(frozen=True, slots=True)
class Threshold:
    """The least number of wrong answers (`wrong`) among the last `of` answers for a finding."""

    wrong: int
    of: int


THRESHOLDS: Mapping[EvidenceKind, Threshold] = MappingProxyType(
    {
        EvidenceKind.LIFE: Threshold(2, 2),
        # With token ids alone, a wrong answer cannot be distinguished from a near tie that another
        # batch rounds differently.
        EvidenceKind.CANARY: Threshold(3, 3),
        EvidenceKind.GOLDEN: Threshold(2, 3),
    }
)


@dataclass(frozen=True, slots=True)
class Record:
    """The evidence on one replica.

    Attributes:
        recent: Verdicts on the last answers of each kind, as many as the kind's threshold needs,
            the newest last.
        suspicion: Suspicion that follows from the verdicts.
    """

    recent: Mapping[EvidenceKind, tuple[AnswerVerdict, ...]]
    suspicion: Suspicion

    def with_answer(self, kind: EvidenceKind, verdict: AnswerVerdict) -> Self:
        """Return the record with one more answer."""
        before = self.recent.get(kind, ())
        last = (*before, verdict)[-THRESHOLDS[kind].of :]
        if last == before:
            return self
        recent = {**self.recent, kind: last}
        return replace(self, recent=recent, suspicion=_suspicion(recent))

    def found(self, kind: EvidenceKind, wrong: int) -> Self:
        """Return the record with `wrong` more wrong answers, found by another platform process."""
        record = self
        for _ in range(min(wrong, THRESHOLDS[kind].of)):
            record = record.with_answer(kind, AnswerVerdict.WRONG)
        return record


CLEAN = Record(MappingProxyType({}), Suspicion.TRUSTED)


def _suspicion(recent: Mapping[EvidenceKind, tuple[AnswerVerdict, ...]]) -> Suspicion:
    wrong = {kind: last.count(AnswerVerdict.WRONG) for kind, last in recent.items()}
    found = {kind for kind, count in wrong.items() if count >= THRESHOLDS[kind].wrong}
    is_confirmed = EvidenceKind.CANARY in found and wrong.get(EvidenceKind.GOLDEN)
    if EvidenceKind.GOLDEN in found or is_confirmed:
        return Suspicion.CONFIRMED
    if found:
        return Suspicion.ACCUSED
    return Suspicion.DOUBTED if any(wrong.values()) else Suspicion.TRUSTED
