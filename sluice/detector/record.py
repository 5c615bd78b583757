"""From evidence to suspicion: one state machine per replica, for routers, agents and the guard.

| suspicion | when | what follows |
| --- | --- | --- |
| TRUSTED | no answer that counts was wrong | |
| DOUBTED | some were, fewer than the threshold of their kind | it is asked again |
| ACCUSED | the threshold of LIFE or CANARY is reached | agent: restart; router: ejection |
| CONFIRMED | that of GOLDEN is; or that of CANARY, and one of GOLDEN is wrong | quarantine |

Pure: a `Record` never changes, and a right answer leads back by pushing a wrong one out of the last
answers that count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Self

from sluice.detector.evidence import AnswerVerdict, EvidenceKind


class Suspicion(IntEnum):
    """How much speaks against a replica."""

    TRUSTED = 0
    DOUBTED = 1
    ACCUSED = 2
    CONFIRMED = 3


@dataclass(frozen=True, slots=True)
class Threshold:
    """So many `wrong` ones among the last `of` answers make a finding."""

    wrong: int
    of: int


THRESHOLDS: Mapping[EvidenceKind, Threshold] = MappingProxyType(
    {
        EvidenceKind.LIFE: Threshold(2, 2),
        # Token ids alone cannot tell a near tie that another batch rounds otherwise from a lie.
        EvidenceKind.CANARY: Threshold(3, 3),
        EvidenceKind.GOLDEN: Threshold(2, 3),
    }
)


@dataclass(frozen=True, slots=True)
class Record:
    """The evidence on one replica.

    Attributes:
        recent: The last answers of each kind that count, the newest last.
        suspicion: Suspicion that follows from these answers.
    """

    recent: Mapping[EvidenceKind, tuple[AnswerVerdict, ...]]
    suspicion: Suspicion

    def heard(self, kind: EvidenceKind, verdict: AnswerVerdict) -> Self:
        """Return the record with one more answer."""
        before = self.recent.get(kind, ())
        last = (*before, verdict)[-THRESHOLDS[kind].of :]
        if last == before:
            return self
        recent = {**self.recent, kind: last}
        return replace(self, recent=recent, suspicion=_suspicion(recent))

    def found(self, kind: EvidenceKind, wrong: int) -> Self:
        """Return the record with what another part of the platform found: so many wrong answers."""
        record = self
        for _ in range(min(wrong, THRESHOLDS[kind].of)):
            record = record.heard(kind, AnswerVerdict.WRONG)
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
