"""Applies the rules of a tenant to one answer, and releases the text that may be shown. Pure.

Content, reasoning and the arguments of each call are separate texts. Log probabilities of tokens
are released only while no text is withheld. Log probabilities next to removed text are dropped.
"""

from collections import deque
from collections.abc import Sequence

from gateway.dialects.delta import NOTHING, AnswerDelta, CallDelta, joined
from gateway.guard.findings import Findings, RuleMatch, annotations, has_marks
from gateway.guard.json_text import JsonReader, written
from gateway.guard.plan import GuardPlan, TargetRules
from gateway.text.logprobs import TokenLogprob
from sluice.guard.matcher import GuardedText
from sluice.guard.rules import GuardTarget

_NONE = TargetRules(None, None)


class Lane:
    """One text of an answer, checked by rules that act and by rules that only count matches.

    Attributes:
        blocked_by: Id of the rule that has blocked the text, empty if no rule has.
    """

    __slots__ = ("_acting", "_counted", "_reader", "blocked_by")

    def __init__(self, rules: TargetRules, *, is_json: bool = False) -> None:
        """With `is_json`, the rules apply to the string values in the text's JSON."""
        self._acting = None if rules.acting is None else GuardedText(rules.acting)
        self._counted = None if rules.counted is None else GuardedText(rules.counted)
        self._reader = JsonReader() if is_json and rules != _NONE else None
        self.blocked_by = ""

    @property
    def holds(self) -> bool:
        """Whether text is withheld until a possible match is complete."""
        return self._acting is not None and bool(self._acting.held)

    @property
    def rewritten(self) -> int:
        """Number of replaced matches."""
        return 0 if self._acting is None else self._acting.rewritten

    @property
    def released(self) -> int:
        """Number of characters of the text that were released, including rewritten characters."""
        return 0 if self._acting is None else self._acting.released

    @property
    def length(self) -> int:
        """Number of characters of the text so far."""
        return 0 if self._acting is None else self._acting.length

    def push(self, piece: str) -> str:
        """Add the next piece, and return the text that may be released."""
        reader = self._reader
        if reader is None:
            return self._passed(piece)
        return written(self._passed(reader.push(piece)))

    def flush(self) -> str:
        """End the text, and return the part of it that was withheld until now."""
        reader, rest = self._reader, ""
        if reader is not None:
            rest = self._passed(reader.flush())
        if self._counted is not None:
            self._counted.flush()
        if self._acting is not None and not self.blocked_by:
            rest += self._acting.flush()
            self._note_block(self._acting)
        return rest if reader is None else written(rest)

    def findings(self) -> Findings:
        """Return the number of matches of each rule."""
        found = Findings()
        for text in (self._acting, self._counted):
            if text is not None:
                for number, count in text.counts.items():
                    rule = text.rules[number]
                    found[RuleMatch(rule.id, rule.action)] += count
        return found

    def _passed(self, piece: str) -> str:
        if self.blocked_by:
            return ""
        if self._counted is not None:
            self._counted.push(piece)
        if self._acting is None:
            return piece
        piece = self._acting.push(piece)
        if self._acting.blocked_by is not None:
            self._note_block(self._acting)
        return piece

    def _note_block(self, text: GuardedText) -> None:
        if text.blocked_by is not None:
            self.blocked_by = text.rules[text.blocked_by].id


class AnswerGuard:
    """Guards the texts of one answer.

    Attributes:
        request: Findings of the rules in the request.
        unjudged: Classifiers that did not answer, for the request or the answer.
        blocked_by: Id of the rule that has blocked the answer, empty if no rule has.
    """

    __slots__ = (
        *(
            "_calls",
            "_content",
            "_entries",
            "_shows_findings",
            "_marks",
            "_plan",
            "_reasoning",
            "_seen",
        ),
        *("_shown_tokens", "blocked_by", "request", "unjudged"),
    )

    is_judged = False

    def __init__(
        self,
        plan: GuardPlan,
        request: Findings | None = None,
        unjudged: frozenset[str] = frozenset(),
        *,
        is_told: bool = False,
    ) -> None:
        """The answer begins without text.

        Args:
            plan: Rules of the tenant.
            request: Findings of the rules in the request.
            unjudged: Classifiers that did not answer for the request.
            is_told: Whether the client has requested annotations.
        """
        self._plan = plan
        self._shows_findings = is_told
        # Pairs of (number of the answer's first tokens, number of their characters).
        self._marks = deque[tuple[int, int]]()
        self._shown_tokens = 0
        self.request = Findings() if request is None else request
        self.unjudged = unjudged
        rules = plan.targets.get(GuardTarget.ANSWER, _NONE)
        self._content, self._reasoning = Lane(rules), Lane(rules)
        self._calls: list[Lane] = []
        self._entries: list[TokenLogprob] = []  # log probabilities that are withheld
        self._seen = 0  # number of replaced matches at the last release of entries
        self.blocked_by = ""

    def passed(
        self, delta: AnswerDelta, entries: Sequence[TokenLogprob] = (), tokens: int = 0
    ) -> tuple[AnswerDelta, list[TokenLogprob]]:
        """Add the next piece of the answer.

        Args:
            delta: The piece.
            entries: Log probabilities of its tokens.
            tokens: Number of the answer's tokens so far.

        Returns:
            The part of the text, and the log probabilities, that may be sent.
        """
        if self.blocked_by:
            return NOTHING, []
        reasoning = self._push(self._reasoning, delta.reasoning)
        if (delta.content or delta.calls) and self._reasoning.holds:  # the reasoning has ended
            reasoning += self._rest(self._reasoning)
        content = self._push(self._content, delta.content)
        calls = tuple([it for call in delta.calls for it in self._call(call)])
        self._note_tokens(tokens)
        return AnswerDelta(content, reasoning, calls), self._visible(entries)

    def finished(
        self, delta: AnswerDelta, entries: Sequence[TokenLogprob], tokens: int
    ) -> tuple[AnswerDelta, list[TokenLogprob]]:
        """Add the last piece of an answer, and return all its text that may still be sent."""
        delta, told = AnswerGuard.passed(self, delta, entries, tokens)
        return joined(delta, self.flush()), told + self.rest()

    def close(self) -> None:
        """Drop the answer, because its request was cancelled or has failed."""

    def withheld_tokens(self, tokens: int) -> int:
        """Return how many of the answer's tokens a block has withheld from the client."""
        return tokens - self._shown_tokens if self.blocked_by else 0

    @property
    def is_withheld_free(self) -> bool:
        """Whether withheld tokens are not billed to the tenant."""
        return self.blocked_by in self._plan.unbilled

    def annotations(self) -> dict[str, object] | None:
        """Return the annotations of an ended answer, or None if the client receives none."""
        found = self.findings()
        return (
            annotations(found, self.unjudged) if self._shows_findings or has_marks(found) else None
        )

    def request_annotations(self) -> dict[str, object] | None:
        """Return the annotations of the request, or None if the client receives none."""
        is_told = self._shows_findings or has_marks(self.request)
        return annotations(self.request) if is_told else None

    def flush(self) -> AnswerDelta:
        """End the answer, and return its remaining text."""
        if self.blocked_by:
            return NOTHING
        reasoning, content = self._rest(self._reasoning), ""
        if not self.blocked_by:
            content = self._rest(self._content)
        calls = list[CallDelta]()
        if self._calls and not self.blocked_by and (rest := self._rest(self._calls[-1])):
            calls.append(CallDelta(len(self._calls) - 1, rest))
        return AnswerDelta(content, reasoning, tuple(calls))

    def rest(self) -> list[TokenLogprob]:
        """Return the log probabilities that were still withheld at the end of the answer."""
        return self._visible(())

    def findings(self) -> Findings:
        """Return the number of matches of each rule."""
        found = Findings()
        for lane in (self._content, self._reasoning, *self._calls):
            found += lane.findings()
        return found

    def _note_tokens(self, tokens: int) -> None:
        """Update the number of leading tokens whose characters are all released."""
        lanes, marks = (self._content, self._reasoning, *self._calls), self._marks
        marks.append((tokens, sum([it.length for it in lanes])))
        released = sum([it.released for it in lanes])
        while marks and marks[0][1] <= released:
            self._shown_tokens = marks.popleft()[0]

    def _push(self, lane: Lane, piece: str) -> str:
        if not piece or self.blocked_by:
            return ""
        piece = lane.push(piece)
        self._note_block(lane)
        return piece

    def _rest(self, lane: Lane) -> str:
        rest = lane.flush()
        self._note_block(lane)
        return rest

    def _call(self, call: CallDelta) -> list[CallDelta]:
        """Return the visible part of a piece of a call. A new call ends the previous call."""
        if self.blocked_by:
            return []
        found = list[CallDelta]()
        if call.index >= len(self._calls):
            if self._calls and (rest := self._rest(self._calls[-1])):
                found.append(CallDelta(call.index - 1, rest))
            if self.blocked_by:
                return found
            rules = self._plan.targets.get(GuardTarget.TOOL_ARGUMENTS, _NONE)
            self._calls.append(Lane(rules, is_json=True))
        arguments = self._push(self._calls[call.index], call.arguments)
        if arguments or call.call_id:
            found.append(call._replace(arguments=arguments))
        return found

    def _note_block(self, lane: Lane) -> None:
        self.blocked_by = self.blocked_by or lane.blocked_by

    def _visible(self, entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Return the log probabilities that may be sent, without the ones next to removed text."""
        self._entries += entries
        lanes = (self._content, self._reasoning, *self._calls[-1:])
        if self.blocked_by:
            self._entries.clear()
        if not self._entries or any(it.holds for it in lanes):
            return []
        told, self._entries = self._entries, []
        seen = sum([it.rewritten for it in (self._content, self._reasoning, *self._calls)])
        is_whole, self._seen = seen == self._seen, seen
        return told if is_whole else []
