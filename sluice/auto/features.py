"""The features of a conversation, by which a model is chosen. Pure.

Features describe the whole conversation, not only its last message, because "commit it" after an
hour of code is a request about code. Long conversations are sampled across all messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

# Version of features and clusters. A quality table of another version is not applicable.
SCHEME = 2
# Limits of the sample, in characters and messages, for about 0.1 ms of work per conversation.
_SAMPLE_CHARACTERS = 2048
_MESSAGES_FIRST = 8
_MESSAGES_LAST = 24
_PIECE_LEAST = 64
# UTF-8 bytes per token, about four in most languages. An exact count needs the tokenizer of the
# model, which has not been chosen yet.
BYTES_PER_TOKEN = 4
# Bounds between the sizes question, page and document, in tokens.
_SIZES = (256, 4096)
# Texts to search for in the lower-case sample, ten times as fast as regular expressions.
_CODE_MARKS = (
    *("```", "=>", ");", "()", "{\n", "</", "::", "==", "->", "#include", "\nclass ", "\nimport "),
    *("    return ", "const ", "select *", "stack trace", "pull request", "unit test"),
    *("):\n", "\nfrom ", "self.", '"""'),
)
_CODE_WORDS = frozenset(
    {
        *("def", "func", "fn", "struct", "async", "await", "elif", "traceback", "git", "commit"),
        *("compile", "refactor", "refactoring", "python", "javascript", "typescript", "java"),
        *("rust", "sql", "null", "nullptr", "void", "stderr", "localhost", "debug", "code"),
    }
)
_MATHS_MARKS = (
    *(" + ", " * ", " = ", "^", "\\frac", "\\int", "\\sum", "√", "≤"),
    *("how many", "how much", " per ", "sum of"),
)
_MATHS_WORDS = frozenset(
    {
        *("solve", "prove", "equation", "integral", "derivative", "percent", "probability"),
        *("calculate", "theorem", "average", "remainder", "twice", "multiply", "divided"),
        *("triangle", "polynomial", "matrix", "km", "cost", "costs"),
    }
)
# The words of both kinds together, so that one look-up per word suffices.
_WORDS = _CODE_WORDS | _MATHS_WORDS
_ENGLISH = frozenset(
    {
        *("the", "of", "and", "to", "a", "in", "is", "it", "you", "that", "for", "on", "with"),
        *("as", "are", "be", "this", "have", "from", "or", "at", "by", "not", "an", "what", "can"),
        *("i", "my", "me", "do", "how", "we", "if", "will", "your", "was", "but", "all", "when"),
        *("he", "she", "they", "his", "her", "their", "its", "them", "who", "which", "would"),
        *("could", "should", "there", "these", "those", "each", "than", "then", "about", "into"),
        *("after", "before", "between", "more", "most", "many", "much", "some", "other", "only"),
        *("does", "did", "had", "has", "were", "because", "following", "no", "up", "out"),
    }
)
# Least matches per thousand characters, and least matches in total, for a text to be of a kind.
_PER_THOUSAND = 4.0
_MATCHES_LEAST = 2
_LENGTH_LEAST = 250  # least length, in characters, by which matches are divided
_WORDS_LEAST = 8
_WORDS_MOST = 300
_ENGLISH_SHARE = 0.12
_FOREIGN_BYTES = 0.15


class PromptKind(IntEnum):
    """The kind of task that a conversation is about."""

    TEXT = 0
    CODE = 1
    MATHS = 2
    FOREIGN = 3  # not English
    TOOLS = 4


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """The features of a whole conversation.

    Attributes:
        tokens: Estimated tokens of the prompt.
        code: Matches of code per thousand characters of the sample, or 0 if there are too few.
        maths: Matches of mathematics per thousand characters of the sample, or 0 if there are too
            few.
        is_foreign: Whether the text is not English.
        tools: Number of tools that the model may call.
        output_tokens_max: Most output tokens of the answer, or 0 without a bound.
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
        """The kind of task. With tools it is TOOLS, since the model must be able to call tools."""
        if self.tools:
            return PromptKind.TOOLS
        if self.code >= _PER_THOUSAND:  # first, since code has the signs of mathematics as well
            return PromptKind.CODE
        if self.maths >= _PER_THOUSAND:
            return PromptKind.MATHS
        return PromptKind.FOREIGN if self.is_foreign else PromptKind.TEXT

    @property
    def cluster(self) -> int:
        """Number of the cluster, below `CLUSTERS`, which combines kind and size."""
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
    """Return the features of a conversation.

    Args:
        texts: Texts of all messages, in order.
        tools: Number of tools that the model may call.
        output_tokens_max: Most output tokens of the answer, or 0 without a bound.
        tier_priority: Priority of the caller's tier.
        prompt_tokens: Number of prompt tokens that the request contains as token ids.
    """
    characters = sum(map(len, texts))
    sample = _sample(texts).lower()
    words, bytes_ = sample.split(), len(sample.encode(errors="replace"))
    # Scripts differ in characters per token, but hardly in bytes per token. So bytes are used.
    told = characters * bytes_ // max(1, len(sample))
    known = list(filter(_WORDS.__contains__, words))
    code = sum(map(_CODE_WORDS.__contains__, known)) + sum(map(sample.count, _CODE_MARKS))
    maths = sum(map(_MATHS_WORDS.__contains__, known)) + sum(map(sample.count, _MATHS_MARKS))
    # Any text may have numbers, so at most as many numbers as words and signs are counted.
    maths += min(maths, sum(map(str.isdigit, words)))
    return PromptFeatures(
        tokens=prompt_tokens + -(-told // BYTES_PER_TOKEN),
        code=_density(code, len(sample)),
        maths=_density(maths, len(sample)),
        is_foreign=_is_foreign(words, len(sample), bytes_),
        tools=tools,
        output_tokens_max=output_tokens_max,
        tier_priority=tier_priority,
    )


def _sample(texts: Sequence[str]) -> str:
    """Return pieces of all messages, or of the first and last messages if there are many."""
    if len(texts) > _MESSAGES_FIRST + _MESSAGES_LAST:
        texts = (*texts[:_MESSAGES_FIRST], *texts[-_MESSAGES_LAST:])
    left, pieces = _SAMPLE_CHARACTERS, list[str]()
    for index, text in enumerate(texts):
        most = max(_PIECE_LEAST, left // (len(texts) - index))
        pieces.append(text[:most])
        left -= len(pieces[-1])
    return "\n".join(pieces)


def _density(matches: int, characters: int) -> float:
    if matches < _MATCHES_LEAST:
        return 0.0
    return 1000.0 * matches / max(_LENGTH_LEAST, characters)


def _is_foreign(words: Sequence[str], characters: int, bytes_: int) -> bool:
    if bytes_ - characters >= _FOREIGN_BYTES * max(1, characters):
        return True
    if len(words) < _WORDS_LEAST:
        return False
    words = words[:_WORDS_MOST]
    return sum(map(_ENGLISH.__contains__, words)) < _ENGLISH_SHARE * len(words)
