"""The traits of a conversation that decide which model answers it. Pure.

The whole conversation counts, not its last line: "commit it" after an hour of code is code. Long
conversations are sampled, spread over all messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

# Of features and clusters together: a table that was learned under another one says nothing here.
SCHEME = 1
# Characters and messages that are looked at: about 0.1 ms of work.
_SAMPLE_CHARACTERS = 3072
_MESSAGES_FIRST = 8
_MESSAGES_LAST = 24
_PIECE_LEAST = 96
# UTF-8 bytes of a token: about four, in most languages. The model's own tokenizer counts exactly,
# but only once a model is chosen.
BYTES_PER_TOKEN = 4
# Bounds of the sizes in tokens: a question, a page, a document.
_SIZES = (256, 4096)
# Counted as they stand in lower case: searching for fixed texts is ten times as fast as patterns.
_CODE_MARKS = (
    *("```", "=>", ");", "()", "{\n", "</", "::", "==", "->", "#include", "\nclass ", "\nimport "),
    *("    return ", "const ", "select *", "stack trace", "pull request", "unit test"),
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
_LENGTH_LEAST = 250  # of what the matches of a short text are measured by
_WORDS_LEAST = 8
_WORDS_MOST = 300
_ENGLISH_SHARE = 0.12
_FOREIGN_BYTES = 0.15


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
        tokens: Estimated tokens of the prompt.
        code: Matches of code per thousand characters of the sample; 0: too few to count.
        maths: Matches of mathematics per thousand characters of the sample; 0: too few to count.
        is_foreign: Whether the text is not English.
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
        """The first kind that fits; tools come first: they need a model that calls them."""
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
        prompt_tokens: Tokens that come as ids, in addition to the texts.
    """
    characters = sum(map(len, texts))
    sample = _sample(texts).lower()
    words, bytes_ = sample.split(), len(sample.encode(errors="replace"))
    # Of scripts other than Latin a token has about as many bytes, not characters.
    told = characters * bytes_ // max(1, len(sample))
    return PromptFeatures(
        tokens=prompt_tokens + -(-told // BYTES_PER_TOKEN),
        code=_density(sample, words, _CODE_MARKS, _CODE_WORDS),
        maths=_density(sample, words, _MATHS_MARKS, _MATHS_WORDS),
        is_foreign=_is_foreign(words, len(sample), bytes_),
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


def _density(
    sample: str, words: Sequence[str], marks: Sequence[str], known: frozenset[str]
) -> float:
    found = sum(map(known.__contains__, words)) + sum(map(sample.count, marks))
    return 1000.0 * found / max(_LENGTH_LEAST, len(sample)) if found >= _MATCHES_LEAST else 0.0


def _is_foreign(words: Sequence[str], characters: int, bytes_: int) -> bool:
    if bytes_ - characters >= _FOREIGN_BYTES * max(1, characters):
        return True
    if len(words) < _WORDS_LEAST:
        return False
    words = words[:_WORDS_MOST]
    return sum(map(_ENGLISH.__contains__, words)) < _ENGLISH_SHARE * len(words)
