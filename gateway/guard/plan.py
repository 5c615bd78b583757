"""The rules for one caller and model, compiled: those that act, and those that are counted. Pure.

A plan is compiled once for the sets that it is made of, and shared by all who have these sets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gateway.guard.json_text import quoted
from sluice.guard.matcher import RuleMatcher
from sluice.guard.rules import GuardAction, GuardRule, GuardTarget
from sluice.wire.control.v1 import control_pb2 as wire

_CHANGE_TEXTS = frozenset({GuardAction.BLOCK, GuardAction.REWRITE})


class TargetRules(NamedTuple):
    """Rules for one kind of text.

    Attributes:
        acting: Rules that block and rewrite; None: there are none.
        counted: All others, those that mark and those in shadow among them; None: there are none.
    """

    acting: RuleMatcher | None
    counted: RuleMatcher | None


class GuardPlan:
    """Rules by the kind of text.

    Attributes:
        targets: Rules by the kind of text; kinds without rules are left out.
        unbilled: Ids of rules whose blocked tokens are not billed.
    """

    def __init__(self, sets: Sequence[wire.GuardSet]) -> None:
        """Compile: takes some 100 ms for large dictionaries."""
        acting, counted = list[GuardRule](), list[GuardRule]()
        for it in sets:
            for rule in it.active_rules:
                named = _rule(it.id, rule)
                (acting if named.action in _CHANGE_TEXTS else counted).append(named)
            if it.version != it.active_version:
                shadow = [_rule(f"{it.id}@{it.version}", rule) for rule in it.rules]
                counted += [replace(rule, action=GuardAction.COUNT) for rule in shadow]
        free = tuple([f"{it.id}/" for it in sets if it.is_withheld_free])
        self.unbilled = frozenset([it.id for it in acting if free and it.id.startswith(free)])
        self.targets: Mapping[GuardTarget, TargetRules] = {
            target: found
            for target in GuardTarget
            if (found := TargetRules(_matcher(acting, target), _matcher(counted, target)))
            != (None, None)
        }


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
    )


def _matcher(rules: Sequence[GuardRule], target: GuardTarget) -> RuleMatcher | None:
    found = [it for it in rules if target in it.targets]
    if target is GuardTarget.TOOL_ARGUMENTS:
        found = [replace(it, replacement=quoted(it.replacement)) for it in found]
    return RuleMatcher(found) if found else None
