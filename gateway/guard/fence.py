"""The release fence, where parts of an answer wait until classifiers have judged them. Pure.

An answer consists of items, which are pieces of text that the rules have released. A segment of
items is judged together with the end of the text before it. That end is as long as the previous
segment, but at least 200 characters, so that a match across segments is detected. Items are
released in order, as soon as their segment and all earlier segments are clear. With the fence
`none`, items are released at once, and verdicts arrive later. A verdict changes nothing if its
items were released or dropped before.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.dialects.delta import NOTHING, AnswerDelta, joined
from gateway.text.logprobs import TokenLogprob
from sluice.guard.rules import GuardFence, GuardTarget

SEGMENT_CHARACTERS_MAX = 2_000  # the longest text that a classifier judges at once
_BEFORE_CHARACTERS = 200  # minimum length of the earlier text that is judged with a segment
_ENDS = frozenset(".!?\n。！？")  # noqa: RUF001 - full-width marks end sentences, too


class FencePolicy(NamedTuple):
    """The rule that decides where a segment ends.

    Attributes:
        kind: Unit of a segment, of the enum `GuardFence`.
        tokens: Tokens per segment if `kind` is `TOKENS`.
    """

    kind: GuardFence
    tokens: int = 0


class Segment(NamedTuple):
    """A part of an answer to be judged.

    Attributes:
        number: Number of the segment, from 0.
        texts: Text of the segment by kind of text, without empty texts.
    """

    number: int
    texts: dict[GuardTarget, str]


class Released(NamedTuple):
    """Parts of an answer that may be sent.

    Attributes:
        delta: Text of the parts.
        entries: Log probabilities of the parts' tokens.
        tokens: Number of the answer's tokens from its start to the parts' end. It is 0 if the parts
            add no tokens.
    """

    delta: AnswerDelta
    entries: list[TokenLogprob]
    tokens: int = 0


@dataclass(slots=True)
class _Part:
    """The items of one segment."""

    deltas: list[AnswerDelta] = field(default_factory=list[AnswerDelta])
    entries: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    texts: dict[GuardTarget, list[str]] = field(default_factory=dict[GuardTarget, list[str]])
    characters: int = 0
    first_token: int = 0
    tokens: int = 0
    is_clear: bool = False


class ReleaseFence:
    """The release fence of one answer.

    Attributes:
        pending: Number of segments that wait for their verdict.
    """

    __slots__ = ("_before", "_first", "_open", "_parts", "_policy", "_targets", "pending")

    def __init__(self, policy: FencePolicy, targets: frozenset[GuardTarget]) -> None:
        """Only texts of the kinds `targets` are judged. Other texts wait only for earlier items."""
        self._policy = policy
        self._targets = targets
        self._open = _Part()
        self._parts = deque[_Part]()
        self._first = 0  # number of the first segment in `_parts`
        self._before = dict[GuardTarget, str]()
        self.pending = 0

    @property
    def holds(self) -> bool:
        """Whether any item is withheld."""
        return bool(self._parts or self._open.deltas or self._open.entries)

    def push(
        self, delta: AnswerDelta, entries: Sequence[TokenLogprob], tokens: int
    ) -> tuple[Released, Segment | None]:
        """Add an item.

        Returns the parts that may be sent, and the segment that ends with the item, or None.
        """
        if self._policy.kind is GuardFence.NONE:
            self._note_texts(delta)
            segment = self._closed() if self._is_over(delta, tokens) else None
            return Released(delta, list(entries), tokens), segment
        part = self._open
        if delta is not NOTHING:
            part.deltas.append(delta)
            self._note_texts(delta)
        part.entries += entries
        part.tokens = tokens
        segment = self._closed() if not part.texts or self._is_over(delta, tokens) else None
        return self.released(), segment

    def close(self) -> Segment | None:
        """End the answer, and return the last segment to judge, or None."""
        return self._closed()

    def judged(self, number: int) -> None:
        """Record that classifiers block nothing in a segment."""
        self.pending -= 1
        at = number - self._first
        if 0 <= at < len(self._parts):
            self._parts[at].is_clear = True

    def released(self) -> Released:
        """Return the parts that may be sent now."""
        delta, entries, tokens = NOTHING, list[TokenLogprob](), 0
        while self._parts and self._parts[0].is_clear:
            part = self._parts.popleft()
            self._first += 1
            for it in part.deltas:
                delta = joined(delta, it)
            entries += part.entries
            tokens = part.tokens
        return Released(delta, entries, tokens)

    def _note_texts(self, delta: AnswerDelta) -> None:
        calls = "".join([it.arguments for it in delta.calls])
        for target, text in (
            (GuardTarget.ANSWER, delta.reasoning + delta.content),
            (GuardTarget.TOOL_ARGUMENTS, calls),
        ):
            if text and target in self._targets:
                self._open.texts.setdefault(target, []).append(text)
                self._open.characters += len(text)

    def _is_over(self, delta: AnswerDelta, tokens: int) -> bool:
        """Return whether the open segment ends with this item."""
        part, kind = self._open, self._policy.kind
        if part.characters >= SEGMENT_CHARACTERS_MAX and kind is not GuardFence.END:
            return True
        if kind is GuardFence.TOKENS:
            return tokens - part.first_token >= self._policy.tokens
        if kind is GuardFence.END:
            return False
        return not _ENDS.isdisjoint(delta.content) or not _ENDS.isdisjoint(delta.reasoning)

    def _closed(self) -> Segment | None:
        """End the open segment, and return the segment, or None if it has no text to judge."""
        part, self._open = self._open, _Part()
        self._open.first_token = part.tokens
        number = self._first + len(self._parts)
        texts = {target: "".join(it) for target, it in part.texts.items()}
        if self._policy.kind is GuardFence.NONE:
            self._first += 1  # its items were released already
        elif part.deltas or part.entries:
            self._parts.append(part)
            part.is_clear = not texts
        else:
            return None
        if not texts:
            return None
        judged = {it: self._before.get(it, "") + text for it, text in texts.items()}
        for it, text in texts.items():
            kept = min(SEGMENT_CHARACTERS_MAX, max(_BEFORE_CHARACTERS, len(text)))
            self._before[it] = judged[it][-kept:]
        self.pending += 1
        return Segment(number, judged)
