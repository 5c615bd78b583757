"""Drafts the tokens that followed the text's last tokens at an earlier place (prompt lookup).

A caller that can predict most of the answer, for example a file with one change, sends this text as
a prediction. Its tokens are proposed while the answer follows the prediction, in preference to
those of the lookup.

The drafts need no draft model, and save steps if answers repeat their prompt (summaries, edits,
code, JSON). The engine computes a draft beside the last token and accepts only the tokens that it
would have chosen anyway. So the answer is unchanged, and a wrong draft only costs its computation.
"""

from bisect import bisect_right
from collections.abc import Sequence

from replica.engine.types import DraftCounts

# Tokens that must match, since two match by chance too often, and four match rarely in short
# prompts.
NGRAM_TOKENS = 3
# Prompt tokens to index per step, which needs about a millisecond. Indexing a long prompt at once
# would delay the step of all sequences.
READ_TOKENS_MAX = 2048
DRAFT_TOKENS_MAX = 16  # largest number of drafted tokens per step and sequence
_ID_BITS = 24  # bits per token id, which exceeds the needs of any vocabulary
_NGRAM_MASK = (1 << NGRAM_TOKENS * _ID_BITS) - 1
_WIDTH_FIRST = 4
_PAUSE_MAX = 32


class _NgramIndex:
    """The last position of each n-gram among the tokens up to `seen`."""

    __slots__ = ("_older", "follower", "match", "ngram", "seen")

    def __init__(self, older: "_NgramIndex | None" = None) -> None:
        """Begin with the first token, or continue at the end of `older`, which is complete."""
        self.follower: dict[int, int] = {}  # n-gram -> position after its last occurrence
        self._older: dict[int, int] = {} if older is None else older.follower
        # `ngram` has the last tokens, packed. `match` is the position after their previous
        # occurrence, or 0.
        self.ngram, self.match, self.seen = 0, 0, 0
        if older is not None:
            self.ngram, self.match, self.seen = older.ngram, older.match, older.seen

    def read(self, tokens: Sequence[int], end: int) -> None:
        """Index `tokens` up to `end`, where each token is indexed once."""
        ngram, follower, older = self.ngram, self.follower, self._older
        for position in range(self.seen, end):
            ngram = (ngram << _ID_BITS | tokens[position]) & _NGRAM_MASK
            if position >= NGRAM_TOKENS - 1:
                self.match = follower.get(ngram) or older.get(ngram, 0)
                follower[ngram] = position + 1
        self.ngram = ngram
        self.seen = max(self.seen, end)


class _Pace:
    """The adaptive length of drafts.

    The length doubles after a draft that was right as a whole, and otherwise falls to the length of
    the accepted part. After a draft without any accepted token, drafting pauses for 2, 4, ... 32
    steps.

    Attributes:
        width: Largest number of tokens of the next draft.
    """

    __slots__ = ("_misses", "_pause", "_width_max", "width")

    def __init__(self, width: int, width_max: int) -> None:
        """Begin with drafts of `width` tokens."""
        self.width = min(width, width_max)
        self._width_max = width_max
        self._misses = self._pause = 0

    def rests(self) -> bool:
        """Return whether drafting pauses in this step, and count the step."""
        self._pause -= (is_resting := self._pause > 0)
        return is_resting

    def observe(self, tried: int, right: int) -> None:
        """Adapt the length to the number of tried tokens that were right."""
        self.width = min(2 * self.width, self._width_max) if right == tried else max(1, right)
        self._misses = 0 if right else self._misses + 1
        if self._misses:
            self._pause = min(1 << self._misses, _PAUSE_MAX)


class PredictedText:
    """The position of an answer in its prediction.

    Answer and prediction are compared from their first tokens on. After a difference, the position
    moves to the next occurrence of the answer's last tokens in the prediction. The prediction is
    indexed in parts, like a long prompt.
    """

    __slots__ = (
        *("_at", "_follower", "_followed", "_is_lost", "_ngram", "_read", "_read_ngram"),
        *("_text", "pace"),
    )

    def __init__(self, text: Sequence[int], answer_from: int, width_max: int) -> None:
        """Prepare to follow an answer in its prediction.

        Args:
            text: Token ids of the prediction.
            answer_from: Position of the first token of the answer in the sequence.
            width_max: Largest number of tokens of a draft.
        """
        self._text = text
        self._followed = answer_from
        self._at, self._is_lost = 0, False
        self._ngram = 0  # the last tokens of the answer, packed
        # n-gram of the prediction -> positions after its occurrences
        self._follower: dict[int, list[int]] = {}
        self._read, self._read_ngram = 0, 0
        self.pace = _Pace(width_max, width_max)

    def propose(self, tokens: Sequence[int], count_max: int) -> list[int]:
        """Return at most `count_max` ids that may follow the whole sequence `tokens`."""
        self._follow(tokens)
        if self._is_lost or self._at == len(self._text) or self.pace.rests():
            return []
        return list(self._text[self._at : self._at + min(self.pace.width, count_max)])

    def _follow(self, tokens: Sequence[int]) -> None:
        """Advance the position by the new tokens, each once."""
        text, begun = self._text, self._followed
        for position in range(begun, len(tokens)):
            token = tokens[position]
            self._ngram = (self._ngram << _ID_BITS | token) & _NGRAM_MASK
            if not self._is_lost and self._at < len(text) and text[self._at] == token:
                self._at += 1
            else:
                self._is_lost = True
        self._followed = len(tokens)
        if self._is_lost:
            self._find()

    def _find(self) -> None:
        """Move behind the next occurrence of the answer's last tokens, otherwise the first."""
        end = min(len(self._text), self._read + READ_TOKENS_MAX)
        for position in range(self._read, end):
            self._read_ngram = (self._read_ngram << _ID_BITS | self._text[position]) & _NGRAM_MASK
            if position >= NGRAM_TOKENS - 1:
                self._follower.setdefault(self._read_ngram, []).append(position + 1)
        self._read = end
        found = self._follower.get(self._ngram)
        if found:
            index = bisect_right(found, self._at)  # the token at `_at` was just wrong
            self._at = found[index] if index < len(found) else found[0]
            self._is_lost = False


class PromptLookup:
    """Drafts for one sequence, where each token is indexed once, in constant time.

    A long prompt is indexed in parts, once for all siblings. There are no drafts until its index is
    complete.
    """

    __slots__ = (
        *("_has_lookup", "_index", "_is_predicted", "_pace", "_prediction", "_prompt_tokens"),
        *("counts", "prompt"),
    )

    def __init__(
        self,
        width_max: int,
        prompt_tokens: int = 0,
        sibling: "PromptLookup | None" = None,
        prediction: PredictedText | None = None,
    ) -> None:
        """Create a drafter without indexed tokens.

        Args:
            width_max: Largest number of tokens of a draft, or 0 if only the prediction is used.
            prompt_tokens: Number of leading tokens that all siblings share.
            sibling: Sibling with the same prompt, whose index of the prompt is shared.
            prediction: Prediction of the answer, or None if the request has none.
        """
        self.counts = DraftCounts()
        self._prediction, self._is_predicted = prediction, False
        self._pace, self._has_lookup = _Pace(_WIDTH_FIRST, width_max), width_max > 0
        self.prompt = _NgramIndex() if sibling is None else sibling.prompt
        self._prompt_tokens = prompt_tokens
        self._index: _NgramIndex | None = None  # None until the prompt is indexed to its end

    @property
    def width(self) -> int:
        """Largest number of tokens of the next draft by lookup."""
        return self._pace.width

    def propose(self, tokens: Sequence[int], count_max: int) -> list[int]:
        """Return at most `count_max` ids that may follow the sequence.

        Args:
            tokens: All tokens of the sequence, in a list that only grows.
            count_max: Largest number of tokens to propose.
        """
        if self._prediction is not None:
            predicted = self._prediction.propose(tokens, count_max)
            self._is_predicted = bool(predicted)
            if predicted:
                return predicted
        match = self._read(tokens) if self._has_lookup else 0
        if not match or self._pace.rests():
            return []
        count = min(self._pace.width, count_max)
        draft = list(tokens[match : match + count])
        # An occurrence that overlaps the end is a repetition, so its continuation repeats too.
        period = len(draft)
        while len(draft) < count:
            draft.append(draft[-period])
        return draft

    def observe(self, tried: int, right: int) -> None:
        """Count the tokens tried last, and adapt the next draft to the number that were right."""
        before = self.counts
        predicted = (tried, right) if self._is_predicted else (0, 0)
        self.counts = DraftCounts(
            before.tried + tried,
            before.accepted + right,
            before.prediction_tried + predicted[0],
            before.prediction_accepted + predicted[1],
        )
        pace = self._pace
        if self._prediction is not None and self._is_predicted:
            pace = self._prediction.pace
        pace.observe(tried, right)

    def _read(self, tokens: Sequence[int]) -> int:
        """Return the position after the previous occurrence of the last tokens, or 0 if new."""
        if self._index is None:
            end = min(self._prompt_tokens, self.prompt.seen + READ_TOKENS_MAX)
            self.prompt.read(tokens, end)
            if self.prompt.seen < self._prompt_tokens:
                return 0
            self._index = _NgramIndex(self.prompt)
        self._index.read(tokens, len(tokens))
        return self._index.match
