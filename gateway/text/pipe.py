"""From tokens to what the client sees, for answers that need more than a table: pure.

Tokens -> characters -> tool calls taken out -> stop strings.
"""

from collections.abc import Sequence

from gateway.dialects.hermes import ParsedCall, ToolCallParser
from gateway.text.detokenizer import TextStream
from gateway.text.stops import StopMatcher


class TextPipe:
    """The text of one answer."""

    __slots__ = ("_matcher", "_parser", "_stream", "_taken")

    def __init__(
        self, stream: TextStream, stops: Sequence[str], parser: ToolCallParser | None
    ) -> None:
        """Prepare; without `parser`, marks of tool calls are text like any other."""
        self._stream = stream
        self._matcher = StopMatcher(stops) if stops else None
        self._parser = parser
        self._taken = 0  # calls that `new_calls` has given out

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was completed: nothing may follow."""
        return self._matcher is not None and self._matcher.is_matched

    @property
    def is_transparent(self) -> bool:
        """Whether the next token may bypass this pipe: nothing is held or looked for."""
        return self._matcher is None and self._parser is None and not self._stream.is_pending

    @property
    def has_calls(self) -> bool:
        """Whether a tool call was made."""
        return self._parser is not None and bool(self._parser.calls)

    def push(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; return the text to show."""
        return self._filtered(self._stream.push(tokens))

    def flush(self) -> str:
        """The answer ended without a stop string: return the rest of the text to show."""
        if self.is_stopped:
            return ""
        text = self._filtered(self._stream.flush())
        if self._parser is not None and not self.is_stopped:
            rest = self._parser.flush()
            text += self._matcher.push(rest) if self._matcher is not None else rest
        if self._matcher is not None and not self._matcher.is_matched:
            text += self._matcher.flush()
        return text

    def new_calls(self) -> list[tuple[int, ParsedCall]]:
        """Return the tool calls, with their index, that were completed since the last call."""
        if self._parser is None:
            return []
        found = list(enumerate(self._parser.calls))[self._taken :]
        self._taken += len(found)
        return found

    def _filtered(self, text: str) -> str:
        if text and self._parser is not None:
            text = self._parser.push(text)
        if text and self._matcher is not None:
            text = self._matcher.push(text)
        return text
