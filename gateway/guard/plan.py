"""The compiled rules for one caller and model, separated into acting and counting rules. Pure.

A plan is compiled once per combination of rule sets, and shared by all callers that have it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gateway.guard.fence import FencePolicy
from gateway.guard.json_text import quoted
from gateway.guard.verdicts import JudgedRule
from sluice.guard.matcher import RuleMatcher
from sluice.guard.rules import (
    FENCE_TOKENS,
    OF_REQUESTS,
    THRESHOLD_DEFAULT,
    GuardAction,
    GuardFence,
    GuardRule,
    GuardTarget,
)
from sluice.wire.control.v1 import control_pb2 as wire

_CHANGE_TEXTS = frozenset({GuardAction.BLOCK, GuardAction.REWRITE})


class TargetRules(NamedTuple):
    """Compiled rules for one kind of text.

    Attributes:
        acting: Rules that block or rewrite, or None if there are none.
        counted: Rules that mark or only count, including rules in shadow, or None.
    """

    acting: RuleMatcher | None
    counted: RuleMatcher | None


class GuardPlan:
    """The compiled rules of all kinds of text.

    Attributes:
        targets: Rules by kind of text, for kinds that have rules.
        judged: Rules with classifiers by kind of text, for kinds with such rules.
        fence: Policy that decides when judged parts of an answer are released.
        unbilled: Ids of rules whose withheld tokens are not billed.
    """

    def __init__(self, sets: Sequence[wire.GuardSet]) -> None:
        """Compile the rules, in about 100 ms for large dictionaries."""
        acting, counted = list[GuardRule](), list[GuardRule]()
        judged = [it for one in sets for it in _judged_rules(one)]
        self.judged: Mapping[GuardTarget, Sequence[JudgedRule]] = {
            target: found
            for target in GuardTarget
            if (found := tuple([it for it in judged if target in it.rule.targets]))
        }
        self.judged_of_answers = frozenset(self.judged) - OF_REQUESTS
        self.fence = _fence(sets)
        for it in sets:
            for rule in it.active_rules:
                named = _rule(it.id, rule)
                if named.classifier:
                    continue
                (acting if named.action in _CHANGE_TEXTS else counted).append(named)
            if it.version != it.active_version:
                shadow = [_rule(f"{it.id}@{it.version}", rule) for rule in it.rules]
                shadow = [rule for rule in shadow if not rule.classifier]
                counted += [replace(rule, action=GuardAction.COUNT) for rule in shadow]
        free = tuple([f"{it.id}/" for it in sets if it.is_withheld_free])
        blocking = [*acting, *[it.rule for it in judged]]
        self.unbilled = frozenset([it.id for it in blocking if free and it.id.startswith(free)])
        self.targets: Mapping[GuardTarget, TargetRules] = {
            target: found
            for target in GuardTarget
            if (found := TargetRules(_matcher(acting, target), _matcher(counted, target)))
            != (None, None)
        }


def _judged_rules(one: wire.GuardSet) -> list[JudgedRule]:
    """Return the rules of a set that have classifiers. Rules in shadow only count matches."""
    found = [_rule(one.id, it) for it in one.active_rules if it.classifier]
    if one.version != one.active_version:
        shadow = [_rule(f"{one.id}@{one.version}", it) for it in one.rules if it.classifier]
        found += [replace(it, action=GuardAction.COUNT) for it in shadow]
    return [JudgedRule(it, one.is_closed_on_failure) for it in found]


def _fence(sets: Sequence[wire.GuardSet]) -> FencePolicy:
    """Return the strictest fence of all sets whose classifiers block answers. Default: `none`."""
    order = list(GuardFence)
    wanted = [
        FencePolicy(GuardFence(one.fence or GuardFence.SENTENCE), one.fence_tokens or FENCE_TOKENS)
        for one in sets
        if any(_blocks_answers(it) for it in one.active_rules)
    ]
    if not wanted:
        return FencePolicy(GuardFence.NONE)
    strictest = max([it.kind for it in wanted], key=order.index)
    return FencePolicy(strictest, min([it.tokens for it in wanted if it.kind is strictest]))


def _blocks_answers(it: wire.GuardRule) -> bool:
    blocks = bool(it.classifier) and it.action == GuardAction.BLOCK
    return blocks and not OF_REQUESTS.issuperset(it.targets)


def _rule(set_id: str, it: wire.GuardRule) -> GuardRule:
    return GuardRule(
        id=f"{set_id}/{it.id}",
        action=GuardAction(it.action),
        targets=frozenset(map(GuardTarget, it.targets)),
        words=tuple(it.words),
        expression=it.expression,
        named=it.named,
        is_case_sensitive=it.is_case_sensitive,
        is_within_words=it.is_within_words,
        replacement=it.replacement or f"[{it.id}]",
        classifier=it.classifier,
        category=it.category,
        threshold=it.threshold or THRESHOLD_DEFAULT,
    )


def _matcher(rules: Sequence[GuardRule], target: GuardTarget) -> RuleMatcher | None:
    found = [it for it in rules if target in it.targets]
    if target is GuardTarget.TOOL_ARGUMENTS:
        found = [replace(it, replacement=quoted(it.replacement)) for it in found]
    return RuleMatcher(found) if found else None
