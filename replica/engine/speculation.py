"""Drafts the tokens that followed an earlier occurrence of the last tokens (prompt lookup).

A client can send a prediction, a text that it expects as most of the answer, for example a file
with one change. While the answer follows the prediction, the prediction's next tokens are the
draft. Otherwise the lookup provides the draft.

The drafts need no draft model, and save steps if answers repeat their prompt (summaries, edits,
code, JSON). The engine computes a draft after the last token and accepts only those tokens that it
would have chosen without the draft. So the answer is unchanged, and a wrong draft costs only its
computation.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from replica.engine.types import DraftCounts

# Number of equal last tokens that an earlier occurrence needs. Two are often equal by chance, and
# four are seldom equal in short prompts.
NGRAM_TOKENS: Final = 3
# Largest number of prompt tokens to index per step, in about a millisecond. To index a long prompt
# at once would delay the step for all sequences.
READ_TOKENS_MAX = 2048
DRAFT_TOKENS_MAX = 16  # largest number of drafted tokens per step and sequence
# Bits per token id. Of a vocabulary of more than a million ids, some n-grams are confused, which
# only leads to wrong drafts. With more bits, an n-gram would not fit into a machine word.
_ID_BITS: Final = 20
_OLDER_MASK: Final = (1 << (NGRAM_TOKENS - 1) * _ID_BITS) - 1
_WIDTH_FIRST = 4
_PAUSE_MAX = 32


class _NgramIndex:
    """The last position of each n-gram among the first `seen` tokens."""

    __slots__ = ("_older", "follower", "match", "ngram", "seen")

    def __init__(self, older: "_NgramIndex | None" = None) -> None:
        """Begin with the first token, or continue after the tokens of `older`."""
        self.follower: dict[int, int] = {}  # n-gram -> position after its last occurrence
        self._older: dict[int, int] = {} if older is None else older.follower
        # `ngram` has the last tokens as one number. `match` is the position after their previous
        # occurrence, or 0 if there is none.
        self.ngram, self.match, self.seen = 0, 0, 0
        if older is not None:
            self.ngram, self.match, self.seen = older.ngram, older.match, older.seen

    def read(self, tokens: Sequence[int], end: int) -> None:
        """Index `tokens` up to `end`. Each token is indexed only once."""
        ngram, match, follower, older = self.ngram, self.match, self.follower, self._older
        for position in range(self.seen, end):
            ngram = (ngram & _OLDER_MASK) << _ID_BITS | tokens[position]
            if position >= NGRAM_TOKENS - 1:
                match = follower.get(ngram) or older.get(ngram, 0)
                follower[ngram] = position + 1
        self.ngram, self.match = ngram, match
        self.seen = max(self.seen, end)


class _Pace:
    """The adaptive length of drafts.

    The length doubles after a completely right draft. After any other draft, it becomes the number
    of accepted tokens. After a draft without an accepted token, drafting pauses for 2, 4, ... 32
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
        """Return whether drafting pauses in this step. Each call counts as one step."""
        self._pause -= (is_resting := self._pause > 0)
        return is_resting

    def observe(self, tried: int, right: int) -> None:
        """Adapt the length to a draft of `tried` tokens, of which `right` were accepted."""
        self.width = min(2 * self.width, self._width_max) if right == tried else max(1, right)
        self._misses = 0 if right else self._misses + 1
        if self._misses:
            self._pause = min(1 << self._misses, _PAUSE_MAX)


class PredictedText:
    """The position of an answer in its prediction.

    Answer and prediction are compared from their first tokens on. After a difference, the position
    moves to the next occurrence of the answer's last tokens in the prediction. A long prediction
    is indexed in parts over several steps.
    """

    __slots__ = (
        *("_at", "_follower", "_followed", "_is_lost", "_ngram", "_read", "_read_ngram"),
        *("_text", "pace"),
    )

    def __init__(self, text: Sequence[int], answer_from: int, width_max: int) -> None:
        """Set the prediction. The answer begins at position `answer_from` of the sequence.

        Args:
            text: Token ids of the prediction.
            answer_from: Position of the first token of the answer in the sequence.
            width_max: Largest number of tokens of a draft.
        """
        self._text = text
        self._followed = answer_from
        self._at, self._is_lost = 0, False
        self._ngram = 0  # the last tokens of the answer as one number
        # n-gram of the prediction -> positions after its occurrences
        self._follower: dict[int, list[int]] = {}
        self._read, self._read_ngram = 0, 0
        self.pace = _Pace(width_max, width_max)

    def propose(self, tokens: Sequence[int], count_max: int) -> list[int]:
        """Return at most `count_max` ids that may follow `tokens`, which is the whole sequence."""
        self._follow(tokens)
        if self._is_lost or self._at == len(self._text) or self.pace.rests():
            return []
        return list(self._text[self._at : self._at + min(self.pace.width, count_max)])

    def _follow(self, tokens: Sequence[int]) -> None:
        """Advance the position by those tokens that are new since the last call."""
        text, begun = self._text, self._followed
        for position in range(begun, len(tokens)):
            token = tokens[position]
            self._ngram = (self._ngram & _OLDER_MASK) << _ID_BITS | token
            if not self._is_lost and self._at < len(text) and text[self._at] == token:
                self._at += 1
            else:
                self._is_lost = True
        self._followed = len(tokens)
        if self._is_lost:
            self._find()

    def _find(self) -> None:
        """Move after the next occurrence of the answer's last tokens, else after the first."""
        end = min(len(self._text), self._read + READ_TOKENS_MAX)
        for position in range(self._read, end):
            older = (self._read_ngram & _OLDER_MASK) << _ID_BITS
            self._read_ngram = older | self._text[position]
            if position >= NGRAM_TOKENS - 1:
                self._follower.setdefault(self._read_ngram, []).append(position + 1)
        self._read = end
        found = self._follower.get(self._ngram)
        if found:
            index = bisect_right(found, self._at)  # the token at `_at` has just proved wrong
            self._at = found[index] if index < len(found) else found[0]
            self._is_lost = False


class PromptLookup:
    """Drafts for one sequence. Each token is indexed once, in constant time.

    A long prompt is indexed in parts, once for all siblings. The sequence has no drafts until the
    whole prompt is indexed.
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
            sibling: Sibling with the same prompt, whose index is used, or None.
            prediction: Prediction of the answer, or None if the request has none.
        """
        self.counts = DraftCounts()
        self._prediction, self._is_predicted = prediction, False
        self._pace, self._has_lookup = _Pace(_WIDTH_FIRST, width_max), width_max > 0
        self.prompt: _NgramIndex = _NgramIndex() if sibling is None else sibling.prompt
        self._prompt_tokens = prompt_tokens
        self._index: _NgramIndex | None = None  # None until the whole prompt is indexed

    @property
    def width(self) -> int:
        """Largest number of tokens of the next draft that the lookup provides."""
        return self._pace.width

    def propose(self, tokens: Sequence[int], count_max: int) -> list[int]:
        """Return at most `count_max` ids that may follow the sequence.

        Args:
            tokens: All tokens of the sequence. The same list is passed each time, and only grows.
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
        # An occurrence that overlaps the end is a repetition, which the draft continues.
        period = len(draft)
        while len(draft) < count:
            draft.append(draft[-period])
        return draft

    def observe(self, tried: int, right: int) -> None:
        """Count a draft of `tried` tokens, of which `right` were accepted, and adapt `_Pace`."""
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
