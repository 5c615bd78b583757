"""Switches single rules of the router's policy off, to measure the effect of each rule.

`sluice-RULE` is the policy `sluice` without RULE, and `sluice-RULE1+RULE2` is without these two
rules. A switch replaces a constant or a method of the real core during one run, so the core has no
code for ablations.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from router.core import cell, dispatch
from router.core.decide import placement
from router.core.fleet.engine_model import EngineModel
from router.core.fleet.prefix_index import PrefixIndex
from router.core.queue import tenant_queue, tier
from router.core.types.request import Request

PREFIX = "sluice-"


@dataclass(frozen=True, slots=True)
class AblatedRule:
    """A rule of the router's policy that an ablation can switch off.

    Attributes:
        text: Text of the rule, for reports.
        owner: Module or class with the constant or method.
        name: Name of the constant or method.
        instead: Replacement that switches the rule off.
    """

    text: str
    owner: Any
    name: str
    instead: Any


def _no_replica(_cell: cell.CellBook, _request: Request) -> None:
    return None


def _by_arrival(_request: Request) -> float:
    return 0.0


def _is_never_full(_model: EngineModel) -> bool:
    return False


def _forget(*_arguments: object) -> None:
    return None


def _no_allowance(_tier: tier.Tier) -> float:
    return 0.0


RULES: dict[str, AblatedRule] = {
    "late-binding": AblatedRule(
        "a replica is sent more only while its next step is not full",
        EngineModel,
        "next_is_full",
        _is_never_full,
    ),
    "shortest-first": AblatedRule(
        "a tenant's requests are served by uncached tokens, else by arrival",
        tenant_queue,
        "order_key",
        _by_arrival,
    ),
    "late-factor": AblatedRule(
        "a request that cannot meet its objective counts as 1.2 times as long",
        tenant_queue,
        "_LATE_FACTOR",
        1.0,
    ),
    "overtaking-bound": AblatedRule(
        "after 48 times its objective a request is overtaken no more",
        Request,
        "overdue_at",
        property(lambda _request: float("inf"), lambda _request, _at: None),
    ),
    "pacing": AblatedRule(
        "a prompt waits for up to 8 decode steps that keep answers in time",
        placement,
        "_PAUSES_MAX",
        0,
    ),
    "risk-cost": AblatedRule(
        "answers that a prompt would make late cost a fifth of an objective each",
        placement,
        "_RISK_SHARE",
        0.0,
    ),
    "recompute-cost": AblatedRule(
        "uncached tokens count twice in the cost: they take capacity from others",
        placement,
        "_RECOMPUTE_WEIGHT",
        0.0,
    ),
    "session-home": AblatedRule(
        "a session stays where it was, as if 16 more tokens were cached there",
        placement,
        "_HOME_TOKENS",
        0,
    ),
    "own-dispatches": AblatedRule(
        "the prefix index counts a dispatch before the engine reports its blocks",
        PrefixIndex,
        "dispatched",
        _forget,
    ),
    "look-ahead": AblatedRule(
        "behind a request that fits nowhere, those of other tenants are tried",
        dispatch,
        "_LOOK_AHEAD",
        1,
    ),
    "kept-memory": AblatedRule(
        "memory of one replica is kept for a request that fits nowhere",
        cell.CellBook,
        "held_for",
        _no_replica,
    ),
    "groups": AblatedRule(
        "late prompts are sent to a full replica in groups, 0.4 s apart",
        cell,
        "_LATE_FACTOR",
        float("inf"),
    ),
    "return-allowance": AblatedRule(
        "a tenant with running requests keeps an allowance while its queue is empty",
        tier.Tier,
        "return_allowance",
        property(_no_allowance),
    ),
}


class UnknownRuleError(ValueError):
    """Raised for an unknown name of a rule, with a message that lists all names."""


def policies() -> list[str]:
    """Return the policy names: `sluice` with all rules, and for each rule `sluice` without it."""
    return [PREFIX.removesuffix("-"), *(PREFIX + rule for rule in RULES)]


def rules_of(policy: str) -> tuple[str, ...]:
    """Return the rules that a policy's name switches off, none if the name is no ablation.

    Raises:
        UnknownRuleError: The name is an ablation, and one of its rules is unknown.
    """
    if not policy.startswith(PREFIX):
        return ()
    names = tuple(policy.removeprefix(PREFIX).split("+"))
    for name in names:
        if name not in RULES:
            raise UnknownRuleError(f"no rule {name!r}; rules: {', '.join(RULES)}")
    return names


@contextmanager
def without(names: Sequence[str]) -> Generator[None]:
    """Switch rules off by name in this process until the context ends."""
    with switched_off([RULES[name] for name in names]):
        yield


@contextmanager
def switched_off(rules: Sequence[AblatedRule]) -> Generator[None]:
    """Switch rules off in this process until the context ends."""
    before = [rule.owner.__dict__[rule.name] for rule in rules]
    for rule in rules:
        setattr(rule.owner, rule.name, rule.instead)
    try:
        yield
    finally:
        for rule, value in zip(rules, before, strict=True):
            setattr(rule.owner, rule.name, value)
