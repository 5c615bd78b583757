"""Rules on texts in the form that admins write, and their activation after a shadow phase. Pure."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from control_plane.fields import AdminBody, Count, Id
from sluice.errors import ErrorCode, PlatformError
from sluice.guard.rules import (
    FENCE_TOKENS,
    RULES_MAX,
    THRESHOLD_DEFAULT,
    WORDS_MAX,
    GuardAction,
    GuardFence,
    GuardTarget,
    check,
    rules_from,
)

# Largest request body, which is the largest JSON of rules within their bounds.
BODY_BYTES_MAX = 4 << 20
_NAMES_MAX = 100


class GuardRuleBody(AdminBody):
    """A rule, with exactly one of `words`, `expression`, `named` and `classifier`.

    `classifier` is a name in the gateways' configuration. A text matches if its score of `category`
    is at least `threshold`. An empty category means the highest score of all categories.
    """

    id: Id
    action: Annotated[GuardAction, Field(strict=False)]
    targets: Annotated[
        list[Annotated[GuardTarget, Field(strict=False)]],
        Field(default_factory=lambda: [GuardTarget.ANSWER, GuardTarget.TOOL_ARGUMENTS]),
        Field(min_length=1, max_length=len(GuardTarget)),
    ]
    words: Annotated[list[str], Field(max_length=WORDS_MAX, default_factory=list[str])]
    expression: str = ""
    named: str = ""
    is_case_sensitive: bool = False
    is_within_words: bool = False
    replacement: str = ""
    classifier: Annotated[str, Field(pattern=r"^([\w.-]{1,64})?$")] = ""
    category: Annotated[str, Field(max_length=100)] = ""
    threshold: Annotated[float, Field(gt=0, le=1, strict=False)] = THRESHOLD_DEFAULT


def _checked(rules: list[GuardRuleBody]) -> list[GuardRuleBody]:
    """Return valid rules.

    Raises:
        GuardRuleError: A rule is not valid. The error is a ValueError, and its text has the fix.
    """
    check(rules_from([it.model_dump() for it in rules]))
    return rules


class GuardSetBody(AdminBody):
    """Rules on the texts of a tenant's requests and answers.

    New `rules` have the next `version`, and at first only count their matches (shadow). The rules
    of `active_version` are in effect, and 0 means no rules. `models` and `keys` restrict the set to
    requests with these models and keys. An empty list is no restriction. With `is_withheld_free`,
    tokens that a block withholds from the client are not billed. `fence` is the piece of an answer
    that is withheld until blocking classifiers have judged it. With `is_closed_on_failure`, a text
    that a classifier could not judge is blocked by the classifier's rules.
    """

    owner_tenant_id: Id
    models: Annotated[list[Id], Field(max_length=_NAMES_MAX, default_factory=list[str])]
    keys: Annotated[list[Id], Field(max_length=_NAMES_MAX, default_factory=list[str])]
    rules: Annotated[
        list[GuardRuleBody],
        Field(max_length=RULES_MAX, default_factory=list[GuardRuleBody]),
        AfterValidator(_checked),
    ]
    active_version: Count = 0
    is_withheld_free: bool = False
    fence: Annotated[GuardFence, Field(strict=False)] = GuardFence.SENTENCE
    fence_tokens: Annotated[int, Field(ge=1, le=10_000)] = FENCE_TOKENS
    is_closed_on_failure: bool = False


def staged(known: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that complete a write, which are the rules' version and the active rules.

    Args:
        known: The stored row, or None if the set of rules is new.
        wanted: Values of the request body, which include `rules` and `active_version`.

    Raises:
        PlatformError: The write would activate rules that were not in shadow before.
    """
    version, acting = (known["version"], known["active_version"]) if known else (0, 0)
    is_new = known is None or known["rules"] != wanted["rules"]
    version += is_new
    asked = wanted["active_version"]
    if asked == 0:
        return {"version": version, "active_rules": []}
    if asked == version and not is_new:
        return {"version": version, "active_rules": wanted["rules"]}
    if known is not None and asked == acting:
        return {"version": version, "active_rules": known["active_rules"]}
    message = f"active_version: {asked} cannot act: it must be in shadow before. Send the"
    message += f" rules with active_version {acting} first, look at their counts, then promote"
    raise PlatformError(ErrorCode.CONFLICT, message, param="active_version")
