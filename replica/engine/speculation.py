"""Drafts by prompt lookup: what followed the last tokens where they stood before is tried again.

It costs no model, and pays where answers repeat their prompt (summaries, edits, code, JSON). The
engine computes a draft beside the last token and keeps only what it would have chosen anyway, so
that the answer is the same; a wrong draft costs its computation.
"""

from collections.abc import Sequence

# Tokens that must agree: two agree by chance too often, four find little in short prompts.
NGRAM_TOKENS = 3
# Of a prompt that is looked at per step: about a millisecond. A long one all at once would hold up
# everybody's step.
READ_TOKENS_MAX = 2048
_ID_BITS = 24  # more than any vocabulary has
_NGRAM_MASK = (1 << NGRAM_TOKENS * _ID_BITS) - 1
_WIDTH_FIRST = 4
_PAUSE_MAX = 32


class _NgramIndex:
    """Where each n-gram stood last, of the tokens up to `seen`."""

    __slots__ = ("_older", "follower", "match", "ngram", "seen")

    def __init__(self, older: "_NgramIndex | None" = None) -> None:
        """Begin with the first token, or where `older` ends, which is not read any further."""
        self.follower: dict[int, int] = {}  # n-gram -> position behind its last occurrence
        self._older: dict[int, int] = {} if older is None else older.follower
        # The last tokens, packed; the position behind the occurrence before, 0: none.
        self.ngram, self.match, self.seen = 0, 0, 0
        if older is not None:
            self.ngram, self.match, self.seen = older.ngram, older.match, older.seen

    def read(self, tokens: Sequence[int], end: int) -> None:
        """Look at `tokens` before `end`, each once."""
        ngram, follower, older = self.ngram, self.follower, self._older
        for position in range(self.seen, end):
            ngram = (ngram << _ID_BITS | tokens[position]) & _NGRAM_MASK
            if position >= NGRAM_TOKENS - 1:
                self.match = follower.get(ngram) or older.get(ngram, 0)
                follower[ngram] = position + 1
        self.ngram = ngram
        self.seen = max(self.seen, end)


class PromptLookup:
    """Drafts for one sequence; each token is looked at once, in constant time.

    A long prompt is looked at in parts, once for all siblings; until then there are no drafts.

    The width doubles when a whole draft was right and falls to what was right otherwise. After
    drafts with nothing right it pauses for 2, 4, ... 32 chances.
    """

    __slots__ = (
        "_index",
        "_misses",
        "_pause",
        "_prompt_tokens",
        "_width_max",
        "prompt",
        "width",
    )

    def __init__(
        self, width_max: int, prompt_tokens: int = 0, sibling: "PromptLookup | None" = None
    ) -> None:
        """Make a drafter that has seen nothing.

        Args:
            width_max: Tokens of a draft.
            prompt_tokens: Leading tokens that are equal for all siblings.
            sibling: Has the same prompt, and shares what it knows of it.
        """
        self.width = min(_WIDTH_FIRST, width_max)
        self._width_max = width_max
        self.prompt = _NgramIndex() if sibling is None else sibling.prompt
        self._prompt_tokens = prompt_tokens
        self._index: _NgramIndex | None = None  # None: the prompt was not read to its end
        self._misses = 0
        self._pause = 0

    def propose(self, tokens: Sequence[int], count_max: int) -> list[int]:
        """Return at most `count_max` ids that may follow.

        Args:
            tokens: The whole sequence; it only ever grows.
            count_max: What there is room for.
        """
        match = self._read(tokens)
        if not match:
            return []
        if self._pause:
            self._pause -= 1
            return []
        count = min(self.width, count_max)
        draft = list(tokens[match : match + count])
        # An occurrence that overlaps the end repeats itself: so does its continuation.
        period = len(draft)
        while len(draft) < count:
            draft.append(draft[-period])
        return draft

    def observe(self, tried: int, right: int) -> None:
        """Learn how many of the tried tokens were right."""
        if right == tried:
            self.width = min(2 * self.width, self._width_max)
        else:
            self.width = max(1, right)
        self._misses = 0 if right else self._misses + 1
        if self._misses:
            self._pause = min(1 << self._misses, _PAUSE_MAX)

    def _read(self, tokens: Sequence[int]) -> int:
        """Return the position behind the last occurrence of the last tokens; 0: none is known."""
        if self._index is None:
            end = min(self._prompt_tokens, self.prompt.seen + READ_TOKENS_MAX)
            self.prompt.read(tokens, end)
            if self.prompt.seen < self._prompt_tokens:
                return 0
            self._index = _NgramIndex(self.prompt)
        self._index.read(tokens, len(tokens))
        return self._index.match
