"""Matches of rules in texts, for events, metrics, and the annotations sent to clients. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from sluice.guard.rules import GuardAction

_RULES_MAX = 16  # Maximum number of rule ids in one event.
# Actions that clients are informed of. The value is whether the action withholds text.
_FILTERED = {GuardAction.BLOCK: True, GuardAction.REWRITE: True, GuardAction.MARK: False}


class RuleMatch(NamedTuple):
    """A rule that has matched.

    Attributes:
        rule: Id of the rule, prefixed with the id of its rule set.
        action: Action of the rule. `COUNT` also stands for rules that are only tried out ("in
            shadow").
    """

    rule: str
    action: GuardAction

    @property
    def acts(self) -> bool:
        """Whether the match had an effect beyond being counted."""
        return self.action is not GuardAction.COUNT


Findings = Counter[RuleMatch]


def rule_ids(found: Mapping[RuleMatch, int]) -> str:
    """Return the ids of at most 16 matched rules, separated by spaces."""
    return " ".join(sorted({it.rule for it in found})[:_RULES_MAX])


def has_marks(found: Mapping[RuleMatch, int]) -> bool:
    """Return whether a client receives annotations even without requesting them."""
    return any(it.action is GuardAction.MARK for it in found)


def annotations(
    found: Mapping[RuleMatch, int], unjudged: frozenset[str] = frozenset()
) -> dict[str, object]:
    """Return matched rules in the form of Azure's custom blocklists.

    Args:
        found: Matches.
        unjudged: Classifiers that did not answer.
    """
    details = [
        {"id": it.rule, "filtered": _FILTERED[it.action]}
        for it in sorted(found)
        if it.action in _FILTERED
    ]
    is_filtered = any(it["filtered"] for it in details)
    told: dict[str, object] = {"custom_blocklists": {"filtered": is_filtered, "details": details}}
    if unjudged:
        names = ", ".join(sorted(unjudged))
        text = f"Some text was not judged: no answer of {names}."
        told["error"] = {"code": "content_filter_error", "message": text}
    return told
