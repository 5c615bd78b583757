"""Drafts by prompt lookup: proposes the tokens that followed the latest ones earlier in the text.

A caller that knows most of the answer (a file with one change) sends it as a prediction; its tokens
are proposed wherever the answer follows it, before those of the lookup.

Drafts need no model, and pay where answers repeat their prompt (summaries, edits, code, JSON). The
engine computes a draft beside the last token and keeps only what it would have chosen anyway, so
that the answer is the same; a wrong draft costs its computation.
"""

from bisect import bisect_right
from collections.abc import Sequence

from replica.engine.types import DraftCounts

# Tokens that must agree: two agree by chance too often, four find little in short prompts.
NGRAM_TOKENS = 3
# Prompt tokens that are read per step: about a millisecond. A long one all at once would hold up
# the step of all sequences.
READ_TOKENS_MAX = 2048
DRAFT_TOKENS_MAX = 16  # per step and sequence
_ID_BITS = 24  # more than any vocabulary has
_NGRAM_MASK = (1 << NGRAM_TOKENS * _ID_BITS) - 1
_WIDTH_FIRST = 4
_PAUSE_MAX = 32


class _NgramIndex:
    """The last position of each n-gram among the tokens up to `seen`."""

    __slots__ = ("_older", "follower", "match", "ngram", "seen")

    def __init__(self, older: "_NgramIndex | None" = None) -> None:
        """Begin with the first token, or at the end of `older`, which is complete."""
        self.follower: dict[int, int] = {}  # n-gram -> position behind its last occurrence
        self._older: dict[int, int] = {} if older is None else older.follower
        # The last tokens, packed; the position behind the occurrence before, 0: none.
        self.ngram, self.match, self.seen = 0, 0, 0
        if older is not None:
            self.ngram, self.match, self.seen = older.ngram, older.match, older.seen

    def read(self, tokens: Sequence[int], end: int) -> None:
        """Index `tokens` before `end`, each once."""
        ngram, follower, older = self.ngram, self.follower, self._older
        for position in range(self.seen, end):
            ngram = (ngram << _ID_BITS | tokens[position]) & _NGRAM_MASK
            if position >= NGRAM_TOKENS - 1:
                self.match = follower.get(ngram) or older.get(ngram, 0)
                follower[ngram] = position + 1
        self.ngram = ngram
        self.seen = max(self.seen, end)


class _Pace:
    """The width of drafts.

    It doubles when a whole draft was right and otherwise falls to the accepted part. After drafts
    without any accepted token it rests for 2, 4, ... 32 chances.

    Attributes:
        width: Tokens of the next draft, at most.
    """

    __slots__ = ("_misses", "_pause", "_width_max", "width")

    def __init__(self, width: int, width_max: int) -> None:
        """Begin with drafts of `width` tokens."""
        self.width = min(width, width_max)
        self._width_max = width_max
        self._misses = self._pause = 0

    def rests(self) -> bool:
        """Let a chance pass, if that is due."""
        self._pause -= (is_resting := self._pause > 0)
        return is_resting

    def observe(self, tried: int, right: int) -> None:
        """Learn how many of the tried tokens were right."""
        self.width = min(2 * self.width, self._width_max) if right == tried else max(1, right)
        self._misses = 0 if right else self._misses + 1
        if self._misses:
            self._pause = min(1 << self._misses, _PAUSE_MAX)


class PredictedText:
    """The position of an answer in its prediction.

    It begins with the first token of both. After a difference it continues at the next occurrence
    of the answer's last tokens in the prediction, which is indexed in parts, as a long prompt is.
    """

    __slots__ = (
        *("_at", "_follower", "_followed", "_is_lost", "_ngram", "_read", "_read_ngram"),
        *("_text", "pace"),
    )

    def __init__(self, text: Sequence[int], answer_from: int, width_max: int) -> None:
        """Prepare.

        Args:
            text: Token ids of the prediction.
            answer_from: Position in the sequence of the first token of the answer.
            width_max: Tokens of a draft.
        """
        self._text = text
        self._followed = answer_from
        self._at, self._is_lost = 0, False
        self._ngram = 0  # the last tokens of the answer, packed
        self._follower: dict[int, list[int]] = {}  # n-gram of the prediction -> positions behind it
        self._read, self._read_ngram = 0, 0
        self.pace = _Pace(width_max, width_max)

    def propose(self, tokens: Sequence[int], count_max: int) -> list[int]:
        """Return at most `count_max` ids that may follow; `tokens` is the whole sequence."""
        self._follow(tokens)
        if self._is_lost or self._at == len(self._text) or self.pace.rests():
            return []
        return list(self._text[self._at : self._at + min(self.pace.width, count_max)])

    def _follow(self, tokens: Sequence[int]) -> None:
        """Follow the new tokens, each once."""
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
        """Continue behind the next occurrence of the answer's last tokens, else the first."""
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
    """Drafts for one sequence; each token is indexed once, in constant time.

    A long prompt is indexed in parts, once for all siblings; until then there are no drafts.
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
        """Make a drafter without indexed tokens.

        Args:
            width_max: Most tokens of a draft; 0: only the prediction is used.
            prompt_tokens: Leading tokens that are equal for all siblings.
            sibling: Sibling with the same prompt, whose index is shared.
            prediction: Prediction of the answer; None: the request has none.
        """
        self.counts = DraftCounts()
        self._prediction, self._is_predicted = prediction, False
        self._pace, self._has_lookup = _Pace(_WIDTH_FIRST, width_max), width_max > 0
        self.prompt = _NgramIndex() if sibling is None else sibling.prompt
        self._prompt_tokens = prompt_tokens
        self._index: _NgramIndex | None = None  # None: the prompt was not read to its end

    @property
    def width(self) -> int:
        """Tokens of the next draft that it finds, at most."""
        return self._pace.width

    def propose(self, tokens: Sequence[int], count_max: int) -> list[int]:
        """Return at most `count_max` ids that may follow.

        Args:
            tokens: The whole sequence; it only ever grows.
            count_max: Most tokens that fit.
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
        # An occurrence that overlaps the end repeats itself: so does its continuation.
        period = len(draft)
        while len(draft) < count:
            draft.append(draft[-period])
        return draft

    def observe(self, tried: int, right: int) -> None:
        """Learn how many of the tokens tried last were right."""
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
        """Return the position behind the last occurrence of the last tokens; 0: none is known."""
        if self._index is None:
            end = min(self._prompt_tokens, self.prompt.seen + READ_TOKENS_MAX)
            self.prompt.read(tokens, end)
            if self.prompt.seen < self._prompt_tokens:
                return 0
            self._index = _NgramIndex(self.prompt)
        self._index.read(tokens, len(tokens))
        return self._index.match
