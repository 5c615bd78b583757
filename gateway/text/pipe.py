"""Converts tokens to visible text, for answers that need more than `TokenTable.fragments`. Pure.

The first stage decodes tokens to characters. The second stage extracts tool calls and reasoning,
and the last stage ends the text at stop strings.
"""

from collections.abc import Sequence

from gateway.dialects.delta import NOTHING, AnswerDelta, OutputParser, joined
from gateway.text.detokenizer import TokenTable
from gateway.text.stops import StopMatcher


class TextPipe:
    """The text of one answer.

    Attributes:
        table: Table of the tokens.
        characters: Number of characters of the tokens so far.
        shown: Number of characters of content released so far.
        reasoning_tokens: Tokens before the end of the reasoning, its marks included.
    """

    __slots__ = (
        *("_matcher", "_parsed_tokens", "_parser", "_stream"),
        *("characters", "reasoning_tokens", "shown", "table"),
    )

    def __init__(
        self, table: TokenTable, stops: Sequence[str] = (), parser: OutputParser | None = None
    ) -> None:
        """Without `parser`, marks of tool calls and reasoning are text like any other."""
        self.table = table
        self._stream = table.stream()
        self._matcher = StopMatcher(stops) if stops else None
        self._parser = parser
        self.characters = self.shown = self.reasoning_tokens = self._parsed_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """Whether no text may follow, because a stop string or the only allowed call has ended."""
        if self._matcher is not None and self._matcher.is_matched:
            return True
        return self._parser is not None and self._parser.is_complete

    @property
    def stopped_by(self) -> str:
        """The stop string that was completed, empty if none was."""
        return "" if self._matcher is None else self._matcher.matched_stop

    @property
    def may_stop(self) -> bool:
        """Whether the pipe may stop, so that each token has to be checked."""
        return self._matcher is not None or self._parser is not None

    @property
    def is_transparent(self) -> bool:
        """Whether the next token may bypass this pipe, because no text is withheld or searched."""
        if self._matcher is not None or self._stream.is_pending:
            return False
        return self._parser is None or self._parser.is_plain

    @property
    def is_parsed(self) -> bool:
        """Whether the answer may contain calls or reasoning besides content."""
        return self._parser is not None

    @property
    def has_calls(self) -> bool:
        """Whether the model has called a tool."""
        return self._parser is not None and self._parser.has_calls

    def push(self, tokens: Sequence[int]) -> AnswerDelta:
        """Add the next tokens, and return their part of the answer."""
        parser = self._parser
        if parser is None:
            return self._pushed(self._stream.push(tokens))
        # Tokens are pushed singly, so that no piece has both the end of a stop string and a
        # following call. Nor may a piece have both reasoning and the text after it.
        delta = NOTHING
        for token in tokens:
            if not self.is_stopped:
                was_reasoning = parser.is_reasoning
                brought = self._pushed(self._stream.push((token,)))
                delta = brought if delta is NOTHING else joined(delta, brought)
                self._parsed_tokens += 1
                if was_reasoning or parser.is_reasoning:
                    self.reasoning_tokens = self._parsed_tokens
        return delta

    def flush(self) -> AnswerDelta:
        """End the answer, and return the withheld text. It is empty after a stop string."""
        delta, matcher, parser = NOTHING, self._matcher, self._parser
        if not self.is_stopped:
            delta = self._pushed(self._stream.flush())
            if parser is not None and not self.is_stopped:
                delta = joined(delta, self._filtered(parser.flush()))
        if matcher is not None and not matcher.is_matched:
            held = matcher.flush()
            self.shown += len(held)
            delta = delta._replace(content=delta.content + held)
        return delta

    def _pushed(self, text: str) -> AnswerDelta:
        self.characters += len(text)
        if not text:
            return NOTHING
        return self._filtered(
            AnswerDelta(text) if self._parser is None else self._parser.push(text)
        )

    def _filtered(self, delta: AnswerDelta) -> AnswerDelta:
        matcher = self._matcher
        if matcher is not None and delta.content:
            delta = delta._replace(content=matcher.push(delta.content))
        self.shown += len(delta.content)
        return delta
