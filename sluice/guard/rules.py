"""The guard rules of a tenant, with their parser, bounds and validation. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from sluice.guard.characters import folded_text, lookalike
from sluice.guard.expressions import ExpressionError, compiled
from sluice.guard.named_sets import NAMED_SETS
from sluice.guard.places import Ends, Places, TooLargeError

RULES_MAX = 500
WORDS_MAX = 50_000
WORD_CHARACTERS_MAX = 128
REPLACEMENT_CHARACTERS_MAX = 128
PLACES_MAX = 50_000  # most compiled places of all expressions of a set
THRESHOLD_DEFAULT = 0.5
FENCE_TOKENS = 32  # tokens per released group, if the rules name no number
CHARACTERS_MAX = 1_000_000  # characters of all words and expressions of a set


class GuardAction(StrEnum):
    """The action on a match, the strictest first."""

    BLOCK = "block"  # the text ends before the match
    REWRITE = "rewrite"  # the match is replaced
    MARK = "mark"  # the text is unchanged, and the client receives an annotation
    COUNT = "count"


class GuardTarget(StrEnum):
    """The kind of text to which a guard rule applies."""

    PROMPT = "prompt"
    TOOL_RESULTS = "tool_results"
    ANSWER = "answer"
    TOOL_ARGUMENTS = "tool_arguments"


class GuardFence(StrEnum):
    """The unit in which an answer is delayed for classifiers, the strictest last."""

    NONE = "none"  # text is released at once, and a later match ends the answer
    SENTENCE = "sentence"  # text is released sentence by sentence
    TOKENS = "tokens"  # text is released in groups of a fixed number of tokens
    END = "end"  # text is released when the whole answer is complete


OF_REQUESTS = frozenset({GuardTarget.PROMPT, GuardTarget.TOOL_RESULTS})


class GuardRuleError(ValueError):
    """Raised for an invalid set of rules.

    Attributes:
        field: Path of the invalid field, for example `rules[3].expression`.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class GuardRule:
    """One rule, which uses exactly one of `words`, `expression`, `named` and `classifier`.

    Attributes:
        id: Name of the rule, unique in its set, and visible to clients and in events and metrics.
        action: Consequence of a match.
        targets: Kinds of text that the rule applies to.
        words: Words to find.
        expression: Regular expression, in the language of `expressions`.
        named: Name in `NAMED_SETS`.
        classifier: Name of a classifier of the gateways.
        category: Category of the classifier, or empty for any category.
        threshold: Least score of a match.
        is_case_sensitive: Whether letters match only the same case.
        is_within_words: Whether words are also found inside longer words.
        replacement: Text in place of a match, for the action `rewrite`.
    """

    id: str
    action: GuardAction
    targets: frozenset[GuardTarget]
    words: tuple[str, ...] = ()
    expression: str = ""
    named: str = ""
    is_case_sensitive: bool = False
    is_within_words: bool = False
    replacement: str = ""
    classifier: str = ""
    category: str = ""
    threshold: float = THRESHOLD_DEFAULT

    @property
    def characters(self) -> int:
        """Number of characters of the words and the expression."""
        return len(self.expression) + sum(map(len, self.words))


def rules_from(document: Sequence[Mapping[str, Any]]) -> tuple[GuardRule, ...]:
    """Return the rules of a JSON document that has passed `check`."""
    return tuple([_rule(it) for it in document])


def _rule(it: Mapping[str, Any]) -> GuardRule:
    targets = cast("Sequence[str]", it.get("targets") or ("answer", "tool_arguments"))
    return GuardRule(
        id=it["id"],
        action=GuardAction(it["action"]),
        targets=frozenset(map(GuardTarget, targets)),
        words=tuple(it.get("words") or ()),
        expression=it.get("expression") or "",
        named=it.get("named") or "",
        is_case_sensitive=bool(it.get("is_case_sensitive")),
        is_within_words=bool(it.get("is_within_words")),
        replacement=it.get("replacement") or f"[{it['id']}]",
        classifier=it.get("classifier") or "",
        category=it.get("category") or "",
        threshold=it.get("threshold") or THRESHOLD_DEFAULT,
    )


def check(rules: Sequence[GuardRule]) -> None:
    """Validate rules. Invalid rules raise GuardRuleError with the field and the fix."""
    if len(rules) > RULES_MAX:
        raise GuardRuleError("rules", f"{len(rules)} rules; at most {RULES_MAX} are allowed")
    characters = sum([it.characters for it in rules])
    if characters > CHARACTERS_MAX:
        text = (
            f"words and expressions have {characters} characters; at most {CHARACTERS_MAX} are"
            " allowed"
        )
        raise GuardRuleError("rules", text + "; split the set, or shorten its dictionaries")
    words = sum([len(it.words) for it in rules])
    if words > WORDS_MAX:
        raise GuardRuleError(
            "rules", f"dictionaries have {words} words; at most {WORDS_MAX} are allowed"
        )
    names = set[str]()
    places = Places(PLACES_MAX)
    for number, rule in enumerate(rules):
        if rule.id in names:
            raise GuardRuleError(
                f"rules[{number}].id", f"'{rule.id}' is named twice; give each rule its own id"
            )
        names.add(rule.id)
        _check_rule(rule, f"rules[{number}]", places)


def _check_rewrite(rule: GuardRule, field: str) -> None:
    if rule.classifier:
        text = "a classifier judges whole sentences: block, mark or count its findings"
        raise GuardRuleError(f"{field}.action", text)
    if rule.targets & OF_REQUESTS:
        text = "'rewrite' is for 'answer' and 'tool_arguments'; block or count prompts"
        raise GuardRuleError(f"{field}.targets", text)


def _check_rule(rule: GuardRule, field: str, places: Places) -> None:
    if sum(map(bool, (rule.words, rule.expression, rule.named, rule.classifier))) != 1:
        text = "exactly one of 'words', 'expression', 'named' and 'classifier' is needed"
        raise GuardRuleError(field, text)
    if rule.action is GuardAction.REWRITE:
        _check_rewrite(rule, field)
    if len(rule.replacement) > REPLACEMENT_CHARACTERS_MAX:
        text = f"it is longer than {REPLACEMENT_CHARACTERS_MAX} characters"
        raise GuardRuleError(f"{field}.replacement", text)
    if rule.named and rule.named not in NAMED_SETS:
        known = ", ".join(NAMED_SETS)
        raise GuardRuleError(f"{field}.named", f"'{rule.named}' is not one of {known}")
    for number, word in enumerate(rule.words):
        if not 0 < len(word) <= WORD_CHARACTERS_MAX or not folded_text(word, lookalike).strip():
            text = f"a word has 1 to {WORD_CHARACTERS_MAX} visible characters"
            raise GuardRuleError(f"{field}.words[{number}]", text)
    try:
        end = places.add(Ends(0))
        for expression in NAMED_SETS.get(rule.named, (rule.expression,) * bool(rule.expression)):
            compiled(expression, places, end)
    except ExpressionError as error:
        raise GuardRuleError(f"{field}.expression", str(error)) from None
    except TooLargeError:
        text = f"the expressions come to more than {PLACES_MAX} places; make repeats smaller"
        raise GuardRuleError("rules", text) from None
