"""The traits of a conversation that decide which model answers it. Pure.

All of the conversation counts, not its last line: "commit it" behind an hour of code is code. Of
long conversations a bounded sample is looked at, spread over all messages.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

# Of features and clusters together: a table that was learned under another one says nothing here.
SCHEME = 1
# Characters and messages that are looked at: about 0.1 ms of work.
_SAMPLE_CHARACTERS = 6144
_MESSAGES_FIRST = 8
_MESSAGES_LAST = 24
_PIECE_LEAST = 128
# Latin text has about four characters per token, and more tokens never were seen than one per
# character. The router's own numbers are exact, but come when the choice is made.
CHARACTERS_PER_TOKEN = 4
# Bounds of the sizes in tokens: a question, a page, a document.
_SIZES = (256, 4096)
_CODE = re.compile(
    r"```|\b(?:def|class|func|fn|struct|import|from|return|const|let|var|public|private) \w"
    r"|#include\b|=>|\);|\{$|^\s*(?:if|for|while) .*[:{]$|</?\w+>|\bselect\b.{1,80}\bfrom\b"
    r"|\b(?:Traceback|stack trace|git|commit|pull request|compile|unit test|refactor)\b",
    re.IGNORECASE | re.MULTILINE,
)
_MATHS = re.compile(
    r"\d\s?[-+*/\u00d7\u00f7^=<>]\s?\d|\\(?:frac|int|sum|sqrt|cdot|le|ge)\b|[∑∫√≤≥≠π]"
    r"|\b(?:solve|prove|equation|integral|derivative|percent|probability|how many|how much"
    r"|calculate|theorem|average|remainder|sum of|twice|per (?:day|hour|week))\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_]+")
_ENGLISH = frozenset(
    {
        *("the", "of", "and", "to", "a", "in", "is", "it", "you", "that", "for", "on", "with"),
        *("as", "are", "be", "this", "have", "from", "or", "at", "by", "not", "an", "what", "can"),
        *("i", "my", "me", "do", "how", "we", "if", "will", "your", "was", "but", "all", "when"),
    }
)
# Matches per thousand characters from which a text is of a kind, and the least of them.
_PER_THOUSAND = 4.0
_MATCHES_LEAST = 2
_WORDS_LEAST = 8
_ENGLISH_SHARE = 0.12
_FOREIGN_LETTERS = 0.15


class PromptKind(IntEnum):
    """The kind of work that a conversation is."""

    TEXT = 0
    CODE = 1
    MATHS = 2
    FOREIGN = 3  # not English
    TOOLS = 4


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """The traits of a whole conversation.

    Attributes:
        tokens: Estimate of its prompt.
        code: Matches of code per thousand characters of the sample; 0: too few to count.
        maths: The same of mathematics.
        is_foreign: Whether it is not English.
        tools: Number of tools that may be called.
        output_tokens_max: Bound of the answer; 0: none was given.
        tier_priority: Priority of the caller's tier.
    """

    tokens: int = 0
    code: float = 0.0
    maths: float = 0.0
    is_foreign: bool = False
    tools: int = 0
    output_tokens_max: int = 0
    tier_priority: int = 0

    @property
    def kind(self) -> PromptKind:
        """The first that fits: who offers tools needs a model that calls them, whatever is said."""
        if self.tools:
            return PromptKind.TOOLS
        if max(self.code, self.maths) >= _PER_THOUSAND:
            return PromptKind.CODE if self.code >= self.maths else PromptKind.MATHS
        return PromptKind.FOREIGN if self.is_foreign else PromptKind.TEXT

    @property
    def cluster(self) -> int:
        """The cluster, below `CLUSTERS`: the kind and the size."""
        size = sum(self.tokens >= bound for bound in _SIZES)
        return self.kind * (len(_SIZES) + 1) + size


CLUSTERS = len(PromptKind) * (len(_SIZES) + 1)


def kind_of(cluster: int) -> PromptKind:
    """Return the kind of a cluster's conversations."""
    return PromptKind(cluster // (len(_SIZES) + 1))


def features_of(
    texts: Sequence[str],
    *,
    tools: int = 0,
    output_tokens_max: int = 0,
    tier_priority: int = 0,
    prompt_tokens: int = 0,
) -> PromptFeatures:
    """Return the traits of a conversation.

    Args:
        texts: Texts of all messages, in order.
        tools: Number of tools that may be called.
        output_tokens_max: Bound of the answer; 0: none.
        tier_priority: Priority of the caller's tier.
        prompt_tokens: Tokens that come as ids, besides the texts.
    """
    characters = sum(map(len, texts))
    sample = _sample(texts)
    return PromptFeatures(
        tokens=prompt_tokens + -(-characters // CHARACTERS_PER_TOKEN),
        code=_density(_CODE, sample),
        maths=_density(_MATHS, sample),
        is_foreign=_is_foreign(sample),
        tools=tools,
        output_tokens_max=output_tokens_max,
        tier_priority=tier_priority,
    )


def _sample(texts: Sequence[str]) -> str:
    """Return pieces of all messages, or of the first and last ones where there are many."""
    if len(texts) > _MESSAGES_FIRST + _MESSAGES_LAST:
        texts = (*texts[:_MESSAGES_FIRST], *texts[-_MESSAGES_LAST:])
    left, pieces = _SAMPLE_CHARACTERS, list[str]()
    for index, text in enumerate(texts):
        most = max(_PIECE_LEAST, left // (len(texts) - index))
        pieces.append(text[:most])
        left -= len(pieces[-1])
    return "\n".join(pieces)


def _density(pattern: re.Pattern[str], sample: str) -> float:
    found = sum(1 for _ in pattern.finditer(sample))
    return 1000.0 * found / max(250, len(sample)) if found >= _MATCHES_LEAST else 0.0


def _is_foreign(sample: str) -> bool:
    words = _WORD.findall(sample[:2048])
    letters = sum(map(len, words))
    if not letters:
        return False
    if sum(not word.isascii() for word in words) >= _FOREIGN_LETTERS * len(words):
        return True
    if len(words) < _WORDS_LEAST:
        return False
    return sum(word.lower() in _ENGLISH for word in words) < _ENGLISH_SHARE * len(words)
