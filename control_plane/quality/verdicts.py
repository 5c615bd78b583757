"""Turns answers to golden prompts into their consequences, which are quarantines and alerts."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from types import MappingProxyType
from typing import Any

from control_plane.fleet.model import Holdback
from control_plane.quality.askings import Asking
from control_plane.quality.ejections import Ejection
from control_plane.quality.judgement import (
    ASKINGS,
    Answer,
    Finding,
    Judgement,
    Truth,
    decide,
    judge,
)
from sluice.detector.consensus import Text, difference

Group = tuple[str, str]  # id of a pool, id of an asking


class Alert(StrEnum):
    """The kinds of alerts that need an operator."""

    SPARED = "spared"  # a replica deviates, but must stay in service
    # a replica is quarantined and not replaced now, because the budget of replacements is used up
    HELD = "held"
    SPLIT = "split"  # no answer has a majority
    CHANGED = "changed"  # all replicas of a pool agree on another answer than before
    UNEXPECTED = "unexpected"  # answers differ from the expected answer
    TENANT = "tenant"  # any of these kinds for a prompt of a tenant, which causes no quarantine
    UNJUDGED = "unjudged"  # answers repeatedly could not be judged


@dataclass(frozen=True, slots=True)
class Serving:
    """A replica that serves."""

    id: str
    pool_id: str
    node_id: str


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """A stored answer, with its replica and the time at which the prompt was sent."""

    replica_id: str
    answer: Answer
    asked_at_unix_ms: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A replica to quarantine, with the evidence."""

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
class ReplacementBudget:
    """The largest numbers of quarantined replicas that are replaced within a period.

    Attributes:
        pool_hour: Largest number of replacements per pool and hour.
        node_day: Largest number of replacements per node and day.
    """

    pool_hour: int = 3
    node_day: int = 3


@dataclass(frozen=True, slots=True)
class Spent:
    """The numbers of quarantines, by pool in the last hour and by node in the last day.

    Attributes:
        pools: Number of quarantines by pool, including lifted quarantines.
        nodes: Number of quarantines by node, including lifted quarantines.
        open_pools: Number of quarantines by pool that were not lifted.
        open_nodes: Number of quarantines by node that were not lifted.
    """

    pools: Mapping[str, int]
    nodes: Mapping[str, int]
    open_pools: Mapping[str, int] = field(default_factory=dict[str, int])
    open_nodes: Mapping[str, int] = field(default_factory=dict[str, int])

    def holdback(self, budget: ReplacementBudget) -> Holdback:
        """Return the limits on new replicas that follow from the quarantines and the budget.

        If an operator lifts a quarantine, its replica is replaced.
        """
        return Holdback(
            {
                pool_id: min(self.open_pools.get(pool_id, 0), count - budget.pool_hour)
                for pool_id, count in self.pools.items()
                if count > budget.pool_hour and self.open_pools.get(pool_id)
            },
            frozenset(n for n, count in self.open_nodes.items() if count > budget.node_day),
        )


@dataclass(frozen=True, slots=True)
class HeldReplica:
    """A replica that is quarantined beyond the budget of its pool or its node.

    Until the period of the budget is over, the pool receives no replacement (budget `pool`), or the
    node receives no new replica (budget `node`).
    """

    replica_id: str
    pool_id: str
    node_id: str
    budget: str


@dataclass(frozen=True, slots=True)
class Accusation:
    """A suspected replica, with the evidence."""

    finding: Finding
    evidence: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AskingCase:
    """The judgement of a pool's answers to one golden prompt (`Asking`).

    Attributes:
        asking: The asking that was answered.
        judgement: The verdict on the answers.
        replicas: Ids of the replicas that received the prompt.
        accusations: Suspected replicas with evidence. There are none if a tenant owns the asking.
    """

    asking: Asking
    judgement: Judgement
    replicas: tuple[str, ...]
    accusations: tuple[Accusation, ...]


@dataclass(frozen=True, slots=True)
class Ruling:
    """The consequences of the judgements of a batch.

    Attributes:
        quarantines: Replicas to quarantine now.
        held: Quarantined replicas that are not replaced now, because the budget is used up.
        alerts: Alerts and their replicas, by judged group.
        deviations: Numbers of new deviating answers, by the kind of difference.
        learned: New right answers.
        spared: Replicas that deviate and must stay in service.
    """

    quarantines: tuple[Quarantine, ...]
    held: tuple[HeldReplica, ...]
    alerts: Mapping[Group, Mapping[Alert, tuple[str, ...]]]
    deviations: Mapping[str, int]
    learned: Mapping[Group, Truth]
    spared: frozenset[str] = frozenset()


def examine(
    askings: Mapping[str, Asking],
    kept: Mapping[Group, Sequence[RecordedAnswer]],
    serving: Sequence[Serving],
    truths: Mapping[Group, Truth],
    begins: Callable[[Group], bool] = lambda _: True,
    accused: Mapping[str, Ejection] = MappingProxyType({}),
) -> tuple[dict[Group, AskingCase], dict[Group, Exception]]:
    """Judge each group separately, and return the cases and the errors of groups that failed.

    The function may run for seconds, so callers must not run it in the event loop.

    Args:
        askings: All present askings. Answers to other askings are ignored.
        kept: Answers by pool and asking, the newest first.
        serving: Replicas of these pools whose answers count.
        truths: Stored right answers.
        begins: Called before each group is judged. If it returns False, the remaining groups are
            skipped.
        accused: Replicas that routers have ejected for wrong answers.
    """
    of_pool: dict[str, list[str]] = {}
    for one in serving:
        of_pool.setdefault(one.pool_id, []).append(one.id)
    cases: dict[Group, AskingCase] = {}
    failures: dict[Group, Exception] = {}
    for group, all_ in kept.items():
        asking = askings.get(group[1])
        if asking is None:
            continue
        if not begins(group):
            break
        try:
            cases[group] = _examine(
                asking, all_, of_pool.get(group[0], ()), truths.get(group), accused
            )
        except Exception as error:  # noqa: BLE001 - any error concerns only this group
            failures[group] = error
    return cases, failures


def _examine(
    asking: Asking,
    all_: Sequence[RecordedAnswer],
    serving: Sequence[str],
    known: Truth | None,
    accused: Mapping[str, Ejection],
) -> AskingCase:
    own: dict[str, list[RecordedAnswer]] = {name: [] for name in serving}
    for one in all_:
        if one.replica_id in own:
            own[one.replica_id].append(one)
    answers = {name: [one.answer for one in kept] for name, kept in own.items() if kept}
    records = {name: accused[name].record for name in answers if name in accused}
    judgement = judge(answers, known, asking.expected, records=records)
    # Varying answers of a tenant's adapter are no evidence against the replicas, which other
    # tenants also use.
    findings = judgement.findings if not asking.owner else ()
    newest = [kept[0].answer.text for kept in own.values() if kept]
    agreeing = _agreeing(newest, judgement) if findings else 0
    accusations = (
        Accusation(
            finding,
            evidence(asking, judgement, finding, own[finding.replica_id])
            | {"agreeing": agreeing, "asked": len(newest)}
            | _said_of(accused.get(finding.replica_id)),
        )
        for finding in findings
    )
    return AskingCase(asking, judgement, tuple(sorted(own)), tuple(accusations))


def _said_of(ejection: Ejection | None) -> dict[str, Any]:
    """Return a router's report on a replica as a part of the evidence."""
    return {} if ejection is None else {"ejection": ejection.shown()}


def rule(
    cases: Mapping[Group, AskingCase],
    kept: Mapping[Group, Sequence[RecordedAnswer]],
    serving: Sequence[Serving],
    quarantined: Mapping[str, int],
    spent: Spent,
    budget: ReplacementBudget,
    new_id: Callable[[], str],
) -> Ruling:
    """Decide on quarantines and alerts for the pools of judged groups.

    Args:
        cases: Results of `examine`.
        kept: Answers on which the judgements are based.
        serving: Replicas of these pools that serve now.
        quarantined: Number of quarantined replicas without a replacement yet, by pool.
        spent: Numbers of recent quarantines.
        budget: Largest numbers of replaced replicas.
        new_id: Returns a new id for a quarantine.
    """
    suspects: dict[str, dict[str, list[tuple[Accusation, AskingCase]]]] = {}
    for (pool_id, _), case in sorted(cases.items()):
        for accusation in case.accusations:
            of_pool = suspects.setdefault(pool_id, {})
            of_pool.setdefault(accusation.finding.replica_id, []).append((accusation, case))
    found: list[Quarantine] = []
    spared: set[str] = set()
    held: list[HeldReplica] = []
    pools, nodes = Counter(spent.pools), Counter(spent.nodes)
    for pool_id, of_pool in sorted(suspects.items()):
        ready = {one.id: one.node_id for one in serving if one.pool_id == pool_id}
        # The replicas with the most deviations over all prompts are first, as the strongest
        # evidence.
        clear = {name: sum(a.finding.deviations for a, _ in all_) for name, all_ in of_pool.items()}
        ordered = [n for n in sorted(of_pool, key=lambda n: (-clear[n], n)) if n in ready]
        verdict = decide(ordered, ready, quarantined.get(pool_id, 0))
        spared.update(verdict.spared)
        for name in verdict.quarantine:
            node_id = ready[name]
            pools[pool_id] += 1
            nodes[node_id] += 1
            found.append(_quarantine(new_id(), pool_id, node_id, of_pool[name]))
            if nodes[node_id] > budget.node_day:
                held.append(HeldReplica(name, pool_id, node_id, "node"))
            elif pools[pool_id] > budget.pool_hour:
                held.append(HeldReplica(name, pool_id, node_id, "pool"))
    names = frozenset(one.replica_id for one in held)
    return Ruling(
        tuple(found),
        tuple(held),
        {group: _alerts(group, case, spared, names) for group, case in cases.items()},
        _deviations(cases, kept),
        {
            group: case.judgement.learned
            for group, case in cases.items()
            if case.judgement.learned is not None
        },
        frozenset(spared),
    )


def _quarantine(
    key: str, pool_id: str, node_id: str, accused: Sequence[tuple[Accusation, AskingCase]]
) -> Quarantine:
    accusation, case = max(accused, key=lambda pair: pair[0].finding.deviations)
    return Quarantine(
        key,
        accusation.finding.replica_id,
        pool_id,
        node_id,
        case.asking.base_digest,
        case.asking.adapter_digest,
        case.asking.prompt_id,
        str(accusation.finding.difference),
        accusation.evidence,
    )


def _deviations(
    cases: Mapping[Group, AskingCase], kept: Mapping[Group, Sequence[RecordedAnswer]]
) -> Mapping[str, int]:
    return Counter(
        str(case.judgement.deviating[one.answer.number])
        for group, case in cases.items()
        for one in kept[group]
        if case.judgement.deviating
        and one.answer.is_new
        and one.answer.number in case.judgement.deviating
    )


def _alerts(
    group: Group, case: AskingCase, spared: AbstractSet[str], held: AbstractSet[str]
) -> dict[Alert, tuple[str, ...]]:
    judgement = case.judgement
    suspects = [finding.replica_id for finding in judgement.findings]
    found: dict[Alert, tuple[str, ...]] = {}
    if case.asking.owner:
        is_odd = bool(suspects) or judgement.is_split or judgement.is_changed
        names = sorted({*suspects, *judgement.unexpected})
        return {Alert.TENANT: tuple(names) or (group[0],)} if is_odd or names else {}
    if names := tuple(name for name in suspects if name in spared):
        found[Alert.SPARED] = names
    if names := tuple(name for name in suspects if name in held):
        found[Alert.HELD] = names
    if judgement.is_split:
        found[Alert.SPLIT] = case.replicas
    if judgement.is_changed:
        found[Alert.CHANGED] = (group[0],)
    if judgement.unexpected:
        found[Alert.UNEXPECTED] = judgement.unexpected
    return found


def _agreeing(newest: Iterable[Text | None], judgement: Judgement) -> int:
    truth = judgement.truth
    assert truth is not None, "without a known answer no replica deviates"
    return sum(text is not None and difference(text, truth.text) is None for text in newest)


def evidence(
    asking: Asking, judgement: Judgement, finding: Finding, own: Sequence[RecordedAnswer]
) -> dict[str, Any]:
    """Return the evidence of a quarantine as JSON, with prompt, answers and times."""
    truth = judgement.truth
    assert truth is not None, "without a known answer no replica deviates"
    return {
        "asking": asking.id,
        "prompt": list(asking.token_ids),
        "adapter": asking.adapter_digest,
        "right": shown(truth.text) | {"source": str(truth.source)},
        "deviations": finding.deviations,
        "answers": [
            shown(one.answer.text)
            | {
                "asked_at_unix_ms": one.asked_at_unix_ms,
                "differs_in": (judgement.deviating or {}).get(one.answer.number),
            }
            for one in own[:ASKINGS]
        ],
    }


def shown(text: Text | None) -> dict[str, Any]:
    """Return an answer as JSON, with null for NaN."""
    if text is None:
        return {"token_ids": None, "logprobs": None}
    logprobs = [round(value, 4) if isfinite(value) else None for value in text.logprobs]
    return {"token_ids": list(text.token_ids), "logprobs": logprobs}
