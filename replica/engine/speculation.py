"""Drafts by prompt lookup: what followed the last tokens where they stood before is tried again.

It costs no model, and pays where answers repeat their prompt (summaries, edits, code, JSON). The
engine computes a draft beside the last token and keeps only what it would have chosen anyway, so
that the answer is the same; a wrong draft costs its computation.
"""

from collections.abc import Sequence

# Tokens that must agree: two agree by chance too often, four find little in short prompts.
NGRAM_TOKENS = 3
_ID_BITS = 24  # more than any vocabulary has
_NGRAM_MASK = (1 << NGRAM_TOKENS * _ID_BITS) - 1
_WIDTH_FIRST = 4
_PAUSE_MAX = 32


class PromptLookup:
    """Drafts for one sequence; each token is looked at once, in constant time.

    The width doubles when a whole draft was right and falls to what was right otherwise. After
    drafts with nothing right it pauses for 2, 4, ... 32 chances.
    """

    __slots__ = (
        "_follower",
        "_match",
        "_misses",
        "_ngram",
        "_pause",
        "_seen",
        "_width_max",
        "width",
    )

    def __init__(self, width_max: int) -> None:
        """Make an empty index for drafts of at most `width_max` tokens."""
        self.width = min(_WIDTH_FIRST, width_max)
        self._width_max = width_max
        self._follower: dict[int, int] = {}  # n-gram -> position behind its last occurrence
        self._ngram = 0  # the last tokens, packed
        self._match = 0  # position behind the occurrence before; 0: none
        self._seen = 0
        self._misses = 0
        self._pause = 0

    def propose(self, tokens: Sequence[int], count_max: int) -> list[int]:
        """Return at most `count_max` ids that may follow.

        Args:
            tokens: The whole sequence; it only ever grows.
            count_max: What there is room for.
        """
        self._read(tokens)
        if not self._match:
            return []
        if self._pause:
            self._pause -= 1
            return []
        count = min(self.width, count_max)
        draft = list(tokens[self._match : self._match + count])
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

    def _read(self, tokens: Sequence[int]) -> None:
        ngram, follower = self._ngram, self._follower
        for position in range(self._seen, len(tokens)):
            ngram = (ngram << _ID_BITS | tokens[position]) & _NGRAM_MASK
            if position >= NGRAM_TOKENS - 1:
                self._match = follower.get(ngram, 0)
                follower[ngram] = position + 1
        self._ngram = ngram
        self._seen = len(tokens)
