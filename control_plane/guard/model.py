"""Rules on texts in the form for a tenant's admins, and their activation after a shadow phase.

Pure.
"""

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

# As large as the bounds of rules can come to in JSON, and well below what a set of 10 MB has.
BODY_BYTES_MAX = 4 << 20
_NAMES_MAX = 100


class GuardRuleBody(AdminBody):
    """A rule; exactly one of `words`, `expression`, `named` and `classifier` defines its matches.

    `classifier` is a name in the gateways' configuration; a text matches if its score of `category`
    (empty: of any) is `threshold` or more.
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

    Raises GuardRuleError (a ValueError) with the fix if a rule is not valid.
    """
    check(rules_from([it.model_dump() for it in rules]))
    return rules


class GuardSetBody(AdminBody):
    """Rules on the texts of a tenant's requests and answers.

    New `rules` only count (shadow), under the next `version`. They act once `active_version` is set
    to that version; until then the earlier ones act. 0: none act. `models` and `keys` narrow the
    set; empty: all of the tenant's. `is_withheld_free`: tokens that its blocks keep from the client
    are not billed. `fence`: how long answers wait for classifiers that block.
    `is_closed_on_failure`: texts that a classifier could not judge are blocked by its rules.
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
    """Return the values that complete a write: the version of the rules, and the rules in effect.

    Args:
        known: The stored row; None: the set of rules is new.
        wanted: Values of the request body: `rules` and `active_version`.

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
