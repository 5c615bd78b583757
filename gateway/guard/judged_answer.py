"""An answer that classifiers judge at a release fence, after the rules on texts.

Text that the rules have released waits at the fence until classifiers have judged it. Verdicts
arrive through the event loop while further tokens arrive. A verdict after the end of the answer
changes nothing.
"""

from collections.abc import Callable, Sequence

from gateway.dialects.delta import NOTHING, AnswerDelta, joined
from gateway.guard.answer import AnswerGuard
from gateway.guard.fence import Released, ReleaseFence, Segment
from gateway.guard.findings import Findings
from gateway.guard.plan import GuardPlan
from gateway.guard.verdicts import GuardVerdict, JudgedRule
from gateway.text.logprobs import TokenLogprob

# A function that queues a text for judgement by rules, and that calls the callback once.
AskJudges = Callable[[Sequence[JudgedRule], str, Callable[[GuardVerdict], None]], None]
OnRelease = Callable[[AnswerDelta, list[TokenLogprob]], None]


class JudgedAnswer(AnswerGuard):
    """The texts of one answer behind a release fence.

    Attributes:
        on_release: Called with text that a verdict releases, and once if a verdict blocks the
            answer.
        on_settled: Called when no further verdict is expected.
    """

    __slots__ = (
        *("_judge", "_fence", "_is_closed", "_is_cut", "_judged", "_left_tokens", "_open"),
        *("on_release", "on_settled"),
    )

    is_judged = True

    def __init__(
        self,
        plan: GuardPlan,
        request: Findings | None = None,
        unjudged: frozenset[str] = frozenset(),
        *,
        ask: AskJudges,
        is_told: bool = False,
    ) -> None:
        """The answer begins without text.

        Args:
            plan: Rules of the tenant.
            request: Findings of the rules in the request.
            unjudged: Classifiers that did not answer for the request.
            ask: Queues a text for judgement.
            is_told: Whether the client has requested annotations.
        """
        super().__init__(plan, request, unjudged, is_told=is_told)
        self._judge = ask
        self._fence = ReleaseFence(plan.fence, plan.judged_of_answers)
        self._open = dict[int, int]()  # number of outstanding verdicts by segment
        self._judged = Findings()
        self._left_tokens = 0
        self._is_closed = self._is_cut = False
        self.on_release: OnRelease | None = None
        self.on_settled: Callable[[], object] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a verdict is outstanding."""
        return not self._is_cut and self._fence.pending > 0

    def passed(
        self, delta: AnswerDelta, entries: Sequence[TokenLogprob] = (), tokens: int = 0
    ) -> tuple[AnswerDelta, list[TokenLogprob]]:
        """Add a piece as in `AnswerGuard`. Judged text is sent later, through `on_release`."""
        if self.blocked_by:
            return NOTHING, []
        delta, told = super().passed(delta, entries, tokens)
        released, segment = self._fence.push(delta, told, self._shown_tokens)
        self._have_judged(segment)
        if self.blocked_by:  # a rule on texts has blocked the answer, so nothing more arrives
            self._have_judged(self._fence.close())
        return self._left(released)

    def finished(
        self, delta: AnswerDelta, entries: Sequence[TokenLogprob], tokens: int
    ) -> tuple[AnswerDelta, list[TokenLogprob]]:
        """End the answer as in `AnswerGuard`. The remaining text is sent through `on_release`."""
        if self.blocked_by:
            return NOTHING, []
        delta, told = super().finished(delta, entries, tokens)
        shown = self._shown_tokens if self.blocked_by else tokens
        released, segment = self._fence.push(delta, told, shown)
        self._have_judged(segment)
        self._have_judged(self._fence.close())
        return self._left(joined_release(released, self._fence.released()))

    def withheld_tokens(self, tokens: int) -> int:
        """Return the number of withheld tokens, including tokens that a verdict withholds."""
        return tokens - self._left_tokens if self.blocked_by else 0

    def findings(self) -> Findings:
        """Return the number of matches of each rule, including rules with classifiers."""
        return super().findings() + self._judged

    def close(self) -> None:
        """Drop the answer, so that later verdicts change nothing."""
        self._is_closed = True
        self.on_release = self.on_settled = None

    def _have_judged(self, segment: Segment | None) -> None:
        if segment is None:
            return
        number = segment.number
        self._open[number] = len(segment.texts)
        for target, text in segment.texts.items():
            self._judge(self._plan.judged[target], text, lambda it: self._take(number, it))

    def _take(self, number: int, verdict: GuardVerdict) -> None:
        if self._is_closed:
            return
        self.unjudged |= verdict.unjudged
        if self._is_cut:
            return
        self._judged += verdict.found
        if verdict.blocked_by:
            self._is_cut = True
            self.blocked_by = self.blocked_by or verdict.blocked_by
            self._release(NOTHING, [])
        else:
            self._open[number] -= 1
            if not self._open[number]:
                del self._open[number]
                self._fence.judged(number)
                self._release(*self._left(self._fence.released()))
        if self.on_settled is not None and not self.is_pending:
            self.on_settled()

    def _release(self, delta: AnswerDelta, entries: list[TokenLogprob]) -> None:
        if self.on_release is not None:
            self.on_release(delta, entries)

    def _left(self, released: Released) -> tuple[AnswerDelta, list[TokenLogprob]]:
        self._left_tokens = released.tokens or self._left_tokens
        return released.delta, released.entries


def joined_release(first: Released, second: Released) -> Released:
    """Return two released parts, joined in order."""
    delta = joined(first.delta, second.delta)
    return Released(delta, first.entries + second.entries, second.tokens or first.tokens)
