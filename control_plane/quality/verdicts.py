"""From the answers of pools to what follows: who is taken out, with evidence, and what to tell."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Any

from control_plane.quality.askings import Asking
from control_plane.quality.consensus import (
    RULES,
    Answer,
    Finding,
    Judgement,
    Text,
    Truth,
    decide,
    difference,
    judge,
)

Group = tuple[str, str]  # pool, asking


class Alert(StrEnum):
    """What only people can settle."""

    SPARED = "spared"  # a replica deviates and may not be taken out
    SPLIT = "split"  # no answer has a majority
    CHANGED = "changed"  # all of a pool answers otherwise than before
    UNEXPECTED = "unexpected"  # answers are not what people expect


@dataclass(frozen=True, slots=True)
class Serving:
    """A replica that serves."""

    id: str
    pool_id: str
    node_id: str


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer as it is kept."""

    replica_id: str
    answer: Answer
    asked_at_unix_ms: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A replica that is taken out, and why."""

    id: str
    replica_id: str
    pool_id: str
    node_id: str
    base_digest: str
    adapter_digest: str
    prompt_id: str
    reason: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a round of judging comes to.

    Attributes:
        quarantines: Who is taken out now.
        alerts: Of each group that was judged, what is wrong with it, and with which replicas.
        deviations: How many new answers deviate, by what they differ in.
        learned: What is right from now on.
    """

    quarantines: tuple[Quarantine, ...]
    alerts: Mapping[Group, Mapping[Alert, tuple[str, ...]]]
    deviations: Mapping[str, int]
    learned: Mapping[Group, Truth]


@dataclass(frozen=True, slots=True)
class _Case:
    asking: Asking
    judgement: Judgement
    own: Mapping[str, Sequence[Kept]]


def rule(
    askings: Mapping[str, Asking],
    kept: Mapping[Group, Sequence[Kept]],
    serving: Sequence[Serving],
    truths: Mapping[Group, Truth],
    quarantined: Mapping[str, int],
    new_id: Callable[[], str],
) -> Ruling:
    """Judge groups and decide about their pools.

    Args:
        askings: All that are put at present; answers to others are ignored.
        kept: Answers by pool and asking, the newest first.
        serving: Replicas of these pools whose answers count.
        truths: What is known to be right.
        quarantined: Of each pool, how many are being taken out already.
        new_id: Source of ids.
    """
    cases: dict[Group, _Case] = {}
    for group, all_ in kept.items():
        asking = askings.get(group[1])
        if asking is not None:
            cases[group] = _judge(group[0], asking, all_, serving, truths.get(group))
    quarantines, spared = _decide(cases, serving, quarantined, new_id)
    fresh = {one.answer.number for all_ in kept.values() for one in all_ if one.answer.is_new}
    deviations = Counter(
        str(found)
        for case in cases.values()
        for number, found in (case.judgement.deviating or {}).items()
        if number in fresh
    )
    return Ruling(
        tuple(quarantines),
        {group: _alerts(group, case, spared) for group, case in cases.items()},
        deviations,
        {
            group: case.judgement.learned
            for group, case in cases.items()
            if case.judgement.learned is not None
        },
    )


def _judge(
    pool_id: str,
    asking: Asking,
    all_: Sequence[Kept],
    serving: Sequence[Serving],
    known: Truth | None,
) -> _Case:
    own: dict[str, list[Kept]] = {one.id: [] for one in serving if one.pool_id == pool_id}
    for one in all_:
        if one.replica_id in own:
            own[one.replica_id].append(one)
    answers = {name: [one.answer for one in kept] for name, kept in own.items() if kept}
    return _Case(asking, judge(answers, known, asking.expected), own)


def _decide(
    cases: Mapping[Group, _Case],
    serving: Sequence[Serving],
    quarantined: Mapping[str, int],
    new_id: Callable[[], str],
) -> tuple[list[Quarantine], set[str]]:
    """Return who is taken out, and who deviates and may not be."""
    node_of = {one.id: one.node_id for one in serving}
    suspects: dict[str, dict[str, list[tuple[Finding, _Case]]]] = {}
    for (pool_id, _), case in sorted(cases.items()):
        for finding in case.judgement.findings:
            of_pool = suspects.setdefault(pool_id, {})
            of_pool.setdefault(finding.replica_id, []).append((finding, case))
    found: list[Quarantine] = []
    spared: set[str] = set()
    for pool_id, of_pool in sorted(suspects.items()):
        # The clearest cases first: most deviations over all prompts.
        clear = {name: sum(f.deviations for f, _ in all_) for name, all_ in of_pool.items()}
        ordered = sorted(of_pool, key=lambda name: (-clear[name], name))
        ready = [one.id for one in serving if one.pool_id == pool_id]
        verdict = decide(ordered, ready, quarantined.get(pool_id, 0))
        spared.update(verdict.spared)
        for name in verdict.quarantine:
            finding, case = max(of_pool[name], key=lambda pair: pair[0].deviations)
            asking = case.asking
            found.append(
                Quarantine(
                    new_id(),
                    name,
                    pool_id,
                    node_of[name],
                    asking.base_digest,
                    asking.adapter_digest,
                    asking.prompt_id,
                    str(finding.difference),
                    evidence(case.asking, case.judgement, finding, case.own),
                )
            )
    return found, spared


def _alerts(group: Group, case: _Case, spared: set[str]) -> dict[Alert, tuple[str, ...]]:
    judgement = case.judgement
    names = tuple(f.replica_id for f in judgement.findings if f.replica_id in spared)
    found: dict[Alert, tuple[str, ...]] = {}
    if names:
        found[Alert.SPARED] = names
    if judgement.is_split:
        found[Alert.SPLIT] = tuple(sorted(case.own))
    if judgement.is_changed:
        found[Alert.CHANGED] = (group[0],)
    if judgement.unexpected:
        found[Alert.UNEXPECTED] = judgement.unexpected
    return found


def evidence(
    asking: Asking, judgement: Judgement, finding: Finding, own: Mapping[str, Sequence[Kept]]
) -> dict[str, Any]:
    """Return what a quarantine rests on, as JSON: question, right answer, answers, times."""
    truth = judgement.truth
    assert truth is not None, "without a truth nobody deviates from it"
    newest = [all_[0].answer.text for all_ in own.values() if all_]
    agreeing = sum(text is not None and difference(text, truth.text) is None for text in newest)
    return {
        "asking": asking.id,
        "prompt": list(asking.token_ids),
        "adapter": asking.adapter_digest,
        "right": shown(truth.text) | {"source": str(truth.source)},
        "agreeing": agreeing,
        "asked": len(newest),
        "deviations": finding.deviations,
        "answers": [
            shown(one.answer.text)
            | {
                "asked_at_unix_ms": one.asked_at_unix_ms,
                "differs_in": (judgement.deviating or {}).get(one.answer.number),
            }
            for one in own[finding.replica_id][: RULES.askings]
        ],
    }


def shown(text: Text | None) -> dict[str, Any]:
    """Return an answer as JSON, which has no word for what is not a number: null."""
    if text is None:
        return {"token_ids": None, "logprobs": None}
    logprobs = [round(value, 4) if isfinite(value) else None for value in text.logprobs]
    return {"token_ids": list(text.token_ids), "logprobs": logprobs}
