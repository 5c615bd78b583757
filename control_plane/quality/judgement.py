"""Judges the answers of a pool to one golden prompt, and selects replicas to quarantine. Pure.

The vote is `sluice.detector.consensus`. A pool with fewer than three answers is compared with its
earlier right answer. `sluice.detector.record` sums up the evidence against a replica.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from sluice.detector.consensus import (
    RULES,
    Difference,
    Rules,
    Text,
    consensus,
    difference,
    fitted,
)
from sluice.detector.evidence import AnswerVerdict, EvidenceKind
from sluice.detector.quota import room
from sluice.detector.record import CLEAN, THRESHOLDS, Record, Suspicion

# number of a replica's latest answers that are stored per prompt
ASKINGS = THRESHOLDS[EvidenceKind.GOLDEN].of


class RightAnswerSource(StrEnum):
    """The origin of a right answer."""

    CONSENSUS = "consensus"
    HISTORY = "history"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one replica to a golden prompt.

    Attributes:
        number: Number of the answer. Later answers have greater numbers.
        text: Text of the answer, or None if the replica did not answer. A missing answer is not
            judged, but is one of the replica's latest answers.
        is_new: Whether the answer was not judged before.
    """

    number: int
    text: Text | None
    is_new: bool = True


@dataclass(frozen=True, slots=True)
class Truth:
    """A right answer, with its origin."""

    text: Text
    source: RightAnswerSource


@dataclass(frozen=True, slots=True)
class Finding:
    """The evidence against a suspected replica.

    Attributes:
        replica_id: Id of the suspected replica.
        difference: Kind of difference between the newest deviating answer and the right answer.
        deviations: Number of the replica's latest answers that deviate.
        answer: Newest deviating answer.
    """

    replica_id: str
    difference: Difference
    deviations: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judgement of a pool's answers to one prompt.

    Attributes:
        truth: Right answer, or None if unknown.
        findings: Evidence against suspected replicas, in the order of ids.
        deviating: Kind of difference, by number of the deviating answer.
        is_split: Whether no answer has a majority.
        is_changed: Whether the pool agrees on an answer that differs from its earlier right answer.
        unexpected: Replicas whose newest answer does not begin with the expected tokens.
        learned: New right answer, or None if the right answer has not changed.
    """

    truth: Truth | None
    findings: tuple[Finding, ...] = ()
    deviating: Mapping[int, Difference] | None = None
    is_split: bool = False
    is_changed: bool = False
    unexpected: tuple[str, ...] = ()
    learned: Truth | None = None


@dataclass(frozen=True, slots=True)
class PoolVerdict:
    """The replicas of a pool to quarantine, and the suspects that must stay in service."""

    quarantine: tuple[str, ...]
    spared: tuple[str, ...]


def judge(
    answers: Mapping[str, Sequence[Answer]],
    known: Truth | None = None,
    expected: tuple[int, ...] = (),
    rules: Rules = RULES,
    records: Mapping[str, Record] = MappingProxyType({}),
) -> Judgement:
    """Return the judgement of a pool's answers to one prompt.

    Args:
        answers: Answers of each serving replica, the newest first.
        known: Earlier right answer of the same base, adapter and engine, or None if unknown.
        expected: Tokens with which an answer should begin. If there are none, any answer is
            accepted.
        rules: Rules of comparison.
        records: Findings of routers about replicas.
    """
    recent = {name: list(all_)[:ASKINGS] for name, all_ in sorted(answers.items())}
    newest = {
        name: next((answer.text for answer in all_ if answer.text is not None), None)
        for name, all_ in recent.items()
    }
    voters = {name: text for name, text in newest.items() if text is not None}
    unexpected = tuple(
        name for name, text in voters.items() if text.token_ids[: len(expected)] != expected
    )
    if len(voters) < rules.voters_min:
        return _judge_few(recent, voters, known, unexpected, rules, records)
    common = consensus(list(voters.values()), rules)
    if common is None:
        return Judgement(None, is_split=True, unexpected=unexpected)
    truth = Truth(common, RightAnswerSource.CONSENSUS)
    is_changed = known is not None and difference(common, known.text, rules) is not None
    told = ([it.text for it in all_ if it.text is not None] for all_ in recent.values())
    strict = fitted(common, told, rules)
    findings, deviating = _compare(recent, common, strict, records)
    learned = truth if known is None or known.source is not RightAnswerSource.CONSENSUS else None
    return Judgement(
        truth,
        findings,
        deviating,
        is_changed=is_changed,
        unexpected=unexpected,
        learned=None if is_changed else learned,
    )


def _judge_few(
    recent: Mapping[str, Sequence[Answer]],
    voters: Mapping[str, Text],
    known: Truth | None,
    unexpected: tuple[str, ...],
    rules: Rules,
    records: Mapping[str, Record],
) -> Judgement:
    """Judge a pool with too few answers for a vote by its earlier right answer.

    Without an earlier right answer, equal answers of all replicas are stored as the right answer.
    """
    if known is not None:
        findings, deviating = _compare(recent, known.text, rules, records)
        return Judgement(known, findings, deviating, unexpected=unexpected)
    texts = [answer.text for all_ in recent.values() for answer in all_]
    first = next(iter(voters.values()), None)
    is_steady = all(len(all_) == ASKINGS for all_ in recent.values())
    if first is None or not is_steady or unexpected:
        return Judgement(None, unexpected=unexpected)
    if any(text is None or difference(text, first, rules) is not None for text in texts):
        return Judgement(None, unexpected=unexpected)
    return Judgement(None, learned=Truth(first, RightAnswerSource.HISTORY))


def _compare(
    recent: Mapping[str, Sequence[Answer]],
    truth: Text,
    rules: Rules,
    records: Mapping[str, Record],
) -> tuple[tuple[Finding, ...], dict[int, Difference]]:
    """Return the evidence against suspects, and the deviating answers."""
    findings: list[Finding] = []
    deviating: dict[int, Difference] = {}
    for name, all_ in recent.items():
        own = {
            answer.number: found
            for answer in all_
            if answer.text is not None
            and (found := difference(answer.text, truth, rules)) is not None
        }
        deviating |= own
        record = _record(records.get(name, CLEAN), all_, own)
        if own and record.suspicion is Suspicion.CONFIRMED:
            newest = next(answer for answer in all_ if answer.number in own)
            findings.append(Finding(name, own[newest.number], len(own), newest))
    return tuple(findings), deviating


def _record(record: Record, all_: Sequence[Answer], deviating: Mapping[int, Difference]) -> Record:
    """Return the record of a replica, extended by its answers to one prompt (newest first)."""
    for answer in reversed(all_):
        verdict = AnswerVerdict.WRONG if answer.number in deviating else AnswerVerdict.RIGHT
        verdict = AnswerVerdict.UNANSWERED if answer.text is None else verdict
        record = record.with_answer(EvidenceKind.GOLDEN, verdict)
    return record


def decide(suspects: Iterable[str], ready: Iterable[str], quarantined: int) -> PoolVerdict:
    """Return the suspects of a pool to quarantine now, and the suspects that must stay.

    Args:
        suspects: Suspected replicas, the strongest evidence first.
        ready: Replicas of the pool that serve, including suspects.
        quarantined: Number of the pool's replicas that are already in quarantine.
    """
    serving = set(ready)
    # at least one serving replica remains
    left = max(0, room(len(serving) + quarantined, quarantined))
    cases = [name for name in dict.fromkeys(suspects) if name in serving]
    return PoolVerdict(tuple(cases[:left]), tuple(cases[left:]))
